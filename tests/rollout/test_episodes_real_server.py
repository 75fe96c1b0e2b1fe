"""Episodes with a real server of each engine: a joined episode has the log-probs of one pass
over all its tokens.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megatron_rl_corr.rollout import (
    Environment,
    LoopThread,
    Prompt,
    RolloutClient,
    SamplingParams,
    generate_episodes,
)
from tests.hf_truth import assert_is_truth

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [Prompt(0, [3, 1, 4]), Prompt(1, [15, 9, 2, 6, 5])]
SAID = [[70, 71, 72], [8]]


class Talks(Environment):
    """A turn ends with one of twelve of the vocabulary's ids; it says something of three and of one token."""

    stop_token_ids = tuple(range(12))

    def __init__(self, prompt):
        self.turn = 0

    async def step(self, output_ids, finish_reason):
        self.turn += 1
        return SAID[(self.turn - 1) % 2]


@pytest.fixture(scope="module")
def loop():
    with LoopThread() as thread:
        yield thread


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def client(request, tiny_moe_dir, loop):
    vocab_size = json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]
    server = request.getfixturevalue(f"{request.param}_server_fp32")
    client = RolloutClient([server.url], vocab_size=vocab_size, timeout_s=120, engine=request.param)
    loop.call(client.wait_healthy(60))
    yield client
    loop.call(client.close())


def prefill_logprobs(client, loop, ids):
    """[len(ids)] of all tokens in one pass, NaN for the first."""
    (url,) = client.base_urls
    engine = client.engine_of(url)
    answer = loop.call(client.ask(url, engine.score(ids[:1], ids[1:], likeliest=1)))
    scores = engine.parse_scores(answer, server=url, output_ids=ids[1:], vocab_size=client.vocab_size)
    return torch.tensor([float("nan"), *scores.logprobs], dtype=torch.float32)


def check_form(episode):
    """Three turns, with what was said between them and nowhere else; spans that partition it."""
    turn_ids = episode.turn_ids.tolist()
    assert set(turn_ids) == {-1, 0, 1, 2} and episode.finish_reason == "length"
    said = [SAID[0], SAID[1]]
    for turn, ids in enumerate(said):
        last = max(i for i, t in enumerate(turn_ids) if t == turn)
        assert (
            turn_ids[last + 1 : last + 1 + len(ids)] == [-1] * len(ids)
            and turn_ids[last + 1 + len(ids)] == turn + 1
        )
        assert episode.output_ids[last + 1 : last + 1 + len(ids)].tolist() == ids
        # or end-of-sequence
        assert episode.output_ids[last] in Talks.stop_token_ids or episode.output_ids[last] > 70
    assert episode.rollout_logprobs.isnan().tolist() == [t == -1 for t in turn_ids]
    bounds = [0, *(span.end for span in episode.weight_versions)]
    assert bounds[-1] == len(turn_ids) and bounds[:-1] == [span.start for span in episode.weight_versions]


def episodes(client, loop, **sampling):
    made = loop.call(
        generate_episodes(
            client,
            PROMPTS,
            SamplingParams(120, **sampling),
            environment=Talks,
            max_turns=3,
            samples_per_prompt=4,
        )
    )
    return [episode for episode in made if episode.turn_ids.max() == 2]


def test_episode_when_of_three_turns_then_its_logprobs_are_those_of_one_pass_over_all_tokens(client, loop):
    before = client.counts()["tokens"]
    made = episodes(client, loop)
    assert len(made) >= 6
    sampled_tokens = 0
    for episode in made:
        check_form(episode)
        ids = torch.cat([episode.prompt_ids, episode.output_ids]).tolist()
        whole = prefill_logprobs(client, loop, ids)[episode.prompt_ids.numel() :]
        sampled = episode.sampled
        sampled_tokens += int(sampled.sum())
        torch.testing.assert_close(episode.rollout_logprobs[sampled], whole[sampled], atol=1e-4, rtol=0)
    assert client.counts()["tokens"] - before >= sampled_tokens and client.counts()["nonfinite_logprobs"] == 0


def test_episode_when_truncated_then_sampled_tokens_are_renormalised_on_their_sets_and_said_ones_stand_alone(
    client, loop, tiny_moe_dir
):
    from transformers import AutoModelForCausalLM

    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    engine = client.engine_of(client.base_urls[0])
    if engine.name == "vLLM":  # its V1 runner returns no mask; tests/matrix samples from the V2 runner
        (info,) = loop.call(client.server_info())
        assert "--return-sampling-mask" in engine.sampling_problem(info, SamplingParams(120, **sampling))
        return
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_dir, dtype=torch.float32).eval()
    made = episodes(client, loop, **sampling)
    assert len(made) >= 4
    for episode in made:
        check_form(episode)
        sampled, sets = episode.sampled, episode.support.ids.split(episode.support.lengths.tolist())
        assert_is_truth(episode, model, atol=1e-4, temperature=0.7, tokens=sampled)
        assert (episode.support.lengths[sampled] > 1).any()
        said = [ids[0] for ids, drawn in zip(sets, sampled, strict=True) if not drawn]
        assert said == episode.output_ids[~sampled].tolist()
        assert (episode.support.lengths[~sampled] == 1).all()


def test_calculator_when_an_untrained_model_uses_it_then_calls_are_answered_and_scored(client, loop):
    spec = importlib.util.spec_from_file_location("calculator", ROOT / "examples/tool_use/calculator.py")
    calculator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(calculator)
    rows = [json.loads(line) for line in (ROOT / "examples/tool_use/prompts.jsonl").read_text().splitlines()]
    prompts = [Prompt(i, calculator.encode(row["prompt"])) for i, row in enumerate(rows)]
    made = loop.call(
        generate_episodes(
            client,
            prompts,
            SamplingParams(24),
            environment=calculator.Calculator,
            max_turns=4,
            samples_per_prompt=8,
        )
    )
    answered = [episode for episode in made if (episode.turn_ids == -1).any()]
    assert len(answered) >= 5 and len(made) == 96  # about one in five calls
    for episode in answered:
        second = int((episode.turn_ids == 1).nonzero()[0])
        expression, _, said = calculator.decode(episode.output_ids[:second].tolist()).rpartition("=")
        assert said == f"{calculator.calculate(expression) or '?'};"
        assert episode.turn_ids[:second].tolist() == [0] * (len(expression) + 1) + [-1] * len(said)
    for episode in made:
        sampled = calculator.decode(episode.output_ids[episode.sampled].tolist())
        assert 0 <= episode.environment_reward <= sampled.count("=") / 3 + 1e-6  # it is a float32
    assert max(episode.environment_reward for episode in made) > 0
