"""An agent's episode with a real server of each engine: what was sampled over several requests is what one
pass over a branch gives.
"""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from examples.quickstart.make_model import make_tokenizer
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams
from megatron_rl_corr.rollout.gateway.episode import Episode, EpisodeRules
from megatron_rl_corr.rollout.gateway.harmony import split_harmony
from megatron_rl_corr.rollout.gateway.templates import Templates
from megatron_rl_corr.rollout.gateway.tool_calls import split_thoughts
from megatron_rl_corr.rollout.gateway.types import ChatRequest, GatewayError, TextRequest
from megatron_rl_corr.rollout.seeds import Draw
from tests.preloaded import PreloadedServer, run_preloaded
from tests.rollout.gateway.agents_model import SIMPLE, Servers, fast, templates
from tests.rollout.gateway.published_templates import FOLDER, PREFIX
from tests.tiers import in_matrix, long, matrix
from tools.cpu import environment, sglang_arguments

pytestmark = matrix
SHAPE = ExpertShape(num_layers=4, layers=(0, 1, 2, 3), top_k=2, experts=8)
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<pad>{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments.a }})"
    "{% endfor %}"
    "<eos>{% endfor %}"
    "{% if add_generation_prompt %}<pad>assistant:{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
USER = {"role": "user", "content": "is it wet?"}
LOOK = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
]
SCORED = [
    ("qwen3_5_think", 0),
    ("gptoss", 0),
    ("gemma4_v5", 1),
    *in_matrix(
        *((name, sample) for name in ("qwen3", "glm4moe", "llama3_1", "nemotron_3_nano") for sample in (0, 1))
    ),
]
"""(published template, number of the conversation) whose tokens are scored again."""


def parse(text, tools, turn, cut):
    """What stands behind the first bracket is a call's argument."""
    content, bracket, rest = text.partition("(")
    function = {"name": "look", "arguments": json.dumps({"a": rest})}
    call = {"id": f"call{turn}", "type": "function", "function": function}
    return (content, [call]) if bracket else (text, [])


@pytest.fixture(scope="module")
def loop():
    with LoopThread() as thread:
        yield thread


@pytest.fixture(
    scope="module",
    params=["keeping_server", "vllm_server_fp32", *in_matrix("sglang_server_fp32", "vllm_v2_server_fp32")],
)
def client(request, tiny_moe_dir, loop):
    """Two of these servers return routed experts."""
    server = request.getfixturevalue(request.param)
    routes = request.param in ("keeping_server", "vllm_v2_server_fp32")
    vocab_size = json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]
    made = RolloutClient(
        [server.url],
        vocab_size=vocab_size,
        timeout_s=120,
        engine=server.engine,
        experts=SHAPE if routes else None,
        decode=tokenizer().decode_all,
    )
    loop.call(made.wait_healthy(60))
    yield made
    loop.call(made.close())


def tokenizer():
    made = make_tokenizer()
    made.chat_template = TEMPLATE
    return Tokenizer(made, "FOLDER")


def episode(client, sample, tokens=24):
    rules = EpisodeRules(sampling(client, tokens), max_tokens=480, max_turns=20, parse=parse)
    return Episode(client, Templates(tokenizer()), rules, Draw(0, 5, sample))


def sampling(client, tokens):
    """A server that returns sampling masks wants a top_k; this one keeps all ids."""
    masked = client.experts is not None and client.engine_of(client.base_urls[0]).name == "vLLM"
    return SamplingParams(tokens, top_k=client.vocab_size if masked else -1)


def message(answer):
    return {"role": "assistant", "content": answer.text, "tool_calls": answer.tool_calls}


def next_messages(answer):
    results = [{"role": "tool", "content": "12 mm", "tool_call_id": call["id"]} for call in answer.tool_calls]
    return [message(answer), *(results or [{"role": "user", "content": "and now?"}])]


async def conversation(made):
    """Two answers, the first of which is continued twice and again, and a history that is edited; all in
    parallel where it can be.
    """
    first, second = await made.chat(ChatRequest([USER], TOOLS, n=2, stop=("!!",)))
    history = [USER, *next_messages(first)]
    (third,), _, _ = await asyncio.gather(
        made.chat(ChatRequest(history, TOOLS)),
        made.chat(ChatRequest([*history, {"role": "user", "content": "look again"}], TOOLS)),
        made.chat(ChatRequest([USER, *next_messages(second)], TOOLS)),
    )
    await made.chat(ChatRequest([*history, *next_messages(third)], TOOLS))
    await made.chat(ChatRequest([USER, {"role": "assistant", "content": "yes."}, USER], TOOLS))
    (raw,) = await made.text(TextRequest("1+1=", max_tokens=5))
    await made.text(TextRequest([*tokenizer().encode("1+1="), *raw.output_ids.tolist(), 3, 4], max_tokens=5))
    return await made.finish()


def one_pass(client, loop, ids):
    """[len(ids)] log-probs of all tokens in one pass, NaN for the first."""
    (url,) = client.base_urls
    engine = client.engine_of(url)
    answer = loop.call(client.ask(url, engine.score(ids[:1], ids[1:], likeliest=1)))
    scores = engine.parse_scores(answer, server=url, output_ids=ids[1:], vocab_size=client.vocab_size)
    return torch.tensor([float("nan"), *scores.logprobs], dtype=torch.float32)


def test_episode_when_forked_and_with_tools_then_every_sampled_token_has_the_logprob_and_routes_of_one_pass(
    client, loop
):
    sampled, called, far, seen = 0, 0, [], 0
    for sample in range(3 if client.experts is None else 2):
        made = episode(client, sample)
        branches = loop.call(conversation(made))
        assert made.tree.check(branches) == [] and len(branches) == 5
        assert {reason: count for reason, count in made.tree.forks.items() if count} == {
            "first": 1,
            "edited": 2,
            "earlier": 1,
        }
        shapes = [sorted(set(branch.turn_ids.tolist()) - {-1}) for branch in branches]
        assert sorted(shapes) == [[0], [0, 1], [0, 1], [0, 1, 2], [1]] or sorted(shapes) == [
            [0],
            [0, 1],
            [0, 1],
            [0, 1],
            [1, 2],
        ]
        assert made.counts.turns == 9
        sampled += sum(int(branch.sampled.sum()) for branch in branches)
        called += made.counts.rerendered
        for branch in branches:
            ids = torch.cat([branch.prompt_ids, branch.output_ids])
            whole = one_pass(client, loop, ids.tolist())[branch.prompt_ids.numel() :]
            apart = (branch.rollout_logprobs - whole).abs()[branch.sampled]
            far.append(float(apart.max()))
            if client.experts is not None:
                again = loop.call(client.turn(ids, sampling(client, 1), Draw(0, 6, 0)))
                assert torch.equal(branch.routed_experts, again.routed_experts[: ids.numel() - 1])
                seen += len(branch.routed_experts)
    assert max(far) < 1e-5, sorted(far)[-5:]
    assert sampled > 100 and (seen > 0) == (client.experts is not None)


def test_episode_when_sampling_is_aborted_in_a_turn_then_each_turn_is_continued_and_is_one(client, loop):
    async def aborted(made):
        asking = asyncio.ensure_future(made.chat(ChatRequest([USER], max_tokens=300, n=4)))
        await asyncio.sleep(0.1)
        await client.pause_generation("abort")
        await asyncio.sleep(0.1)
        await client.continue_generation()
        first, *_ = await asking
        await made.chat(ChatRequest([USER, *next_messages(first)], max_tokens=10))
        return await made.finish()

    before = client.counts()["continuations"]
    for sample in range(9, 19):  # an engine may be so fast that all have ended
        made = episode(client, sample, tokens=300)
        branches = loop.call(aborted(made))
        assert made.tree.check(branches) == [] and made.counts.turns == 5 and len(branches) == 4
        for branch in branches:
            ids = torch.cat([branch.prompt_ids, branch.output_ids])
            whole = one_pass(client, loop, ids.tolist())[branch.prompt_ids.numel() :]
            apart = (branch.rollout_logprobs - whole).abs()[branch.sampled]
            assert float(apart.max()) < 1e-4
        if client.counts()["continuations"] > before:
            return
    raise AssertionError("nothing was ever continued")


def test_episode_when_a_server_is_killed_in_a_turn_then_another_answers_and_nothing_comes_twice(
    victim, companion, loop, wait_until_sampling
):
    client = RolloutClient(
        [victim.server.url, companion.url],
        vocab_size=len(make_tokenizer()),
        timeout_s=60,
        engine=victim.engine,
    )
    made = episode(client, 11, tokens=300)
    future = loop.submit(made.chat(ChatRequest([USER], n=8)))
    wait_until_sampling(victim.server.url)
    victim.kill()
    assert len(future.result(60)) == 8
    branches = loop.call(made.finish())
    assert made.tree.check(branches) == [] and len(branches) == made.counts.turns == 8
    assert client.counts()["retries"] > 0 and companion.url in {branch.server for branch in branches}
    assert len({tuple(branch.output_ids.tolist()) for branch in branches}) == 8
    loop.call(client.close())


def longest_of(client, loop):
    (url,) = client.base_urls
    engine = client.engine_of(url)
    return engine.longest_sequence(url, loop.call(client.ask(url, engine.sequence_limit())))


@pytest.mark.parametrize("left", [12, 3, 1])
def test_conversation_when_it_reaches_the_longest_that_a_server_takes_then_it_is_cut_and_none_fails(
    client, loop, left
):
    """A server may take fewer tokens than its context has; the longest episode must not fail for it."""
    most = longest_of(client, loop)
    rules = EpisodeRules(sampling(client, 400), max_tokens=most, max_turns=20)
    made = Episode(client, Templates(tokenizer()), rules, Draw(0, 5, left))

    async def scenario():
        try:
            (answer,) = await made.text(TextRequest([3 + one % 40 for one in range(most - left)]))
        except GatewayError as error:
            return error.code
        return answer.finish_reason

    assert loop.call(scenario()) in ("context_length_exceeded", "length", "stop")
    loop.call(made.finish())


@pytest.fixture(scope="module")
def byte_client(tmp_path_factory, loop):
    """Of an SGLang server in float32, whose tokenizer knows the control tokens of published templates."""
    if FOLDER is None:
        pytest.skip("make setup-agents installs TRL's wheel, which has published chat templates")
    model = tmp_path_factory.mktemp("byte_model")
    script = Path(__file__).with_name("make_byte_model.py")
    made = run_preloaded([script, model], engine="sglang")
    assert made.returncode == 0, made.stderr
    server = PreloadedServer(
        model,
        dtype="float32",
        log_path=tmp_path_factory.mktemp("byte_server") / "server.log",
        extra_arguments=[*sglang_arguments(), "--random-seed", "0"],
        environment=environment("sglang"),
    )
    with server:
        client = RolloutClient(
            [server.url],
            vocab_size=Servers.vocab_size,
            timeout_s=300,
            engine="sglang",
            decode=Tokenizer(fast(SIMPLE), "FOLDER").decode_all,
        )
        loop.call(client.wait_healthy(60))
        yield client
        loop.call(client.close())


def parse_half(text, tools, turn, cut):
    """Every second answer has a call: its argument is what stands behind the fifth character."""
    if int(turn) % 2 or len(text) < 6:
        return text, []
    function = {"name": "look", "arguments": json.dumps({"a": text[5:]})}
    return text[:5], [{"id": f"call{turn:>05}", "type": "function", "function": function}]


async def published_conversation(client, template, sample):
    """An untrained policy over a template: it says anything, also control tokens in an answer's midst."""
    made = templates(PREFIX + template)
    ends = sorted(made.tokenizer.control_tokens.values())[sample::3]
    harmony = template == "gptoss"
    rules = EpisodeRules(
        SamplingParams(24, stop_token_ids=tuple(ends)),
        max_tokens=8000,
        max_turns=20,
        parse=parse_half,
        thoughts=split_harmony if harmony else split_thoughts if sample else None,
    )
    talk, history = Episode(client, made, rules, Draw(0, 7, sample)), [USER]
    for number in range(5):
        answers = await talk.chat(ChatRequest(history, LOOK, n=1 + number % 2, stop=("é",)))
        last = answers[-1]
        said = {"role": "assistant", "content": last.text, "reasoning_content": last.reasoning}
        results = [
            {"role": "tool", "content": "12 mm", "tool_call_id": call["id"]} for call in last.tool_calls
        ]
        history = [*history, said | {"tool_calls": last.tool_calls}, *results]
        if not results:
            history.append({"role": "user", "content": "and now?"})
    return talk, await talk.finish()


@long
def test_published_templates_when_a_server_samples_then_every_token_has_the_logprob_of_one_pass(
    byte_client, loop
):
    async def all_of_them():
        return await asyncio.gather(
            *(published_conversation(byte_client, name, sample) for name, sample in SCORED)
        )

    sampled, goes_on, rerendered, far = 0, 0, 0, []
    for talk, branches in loop.call(all_of_them()):
        assert talk.tree.check(branches) == [] and talk.counts.turns == 7
        goes_on += sum(turn.parent is not None for turn in talk.tree.turns())
        rerendered += talk.counts.rerendered
        for branch in branches:
            ids = torch.cat([branch.prompt_ids, branch.output_ids])
            whole = one_pass(byte_client, loop, ids.tolist())[branch.prompt_ids.numel() :]
            far.append(float((branch.rollout_logprobs - whole).abs()[branch.sampled].max()))
            sampled += int(branch.sampled.sum())
    assert max(far) < 1e-5, sorted(far)[-5:]
    assert sampled > 200 and goes_on > len(SCORED) and rerendered > 0
