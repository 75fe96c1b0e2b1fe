"""The agent example: each harness as it is, before a policy that is always right and before a real server of
the example's model; and the run as a user starts it.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest
import torch

from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.observability.metrics_file import read_metrics
from megatron_rl_corr.rollout import RolloutClient
from megatron_rl_corr.rollout.sample_file import read_trajectories
from tests.examples.agent_runs import AGENTS, EXAMPLE, PYTHON, ROOT, episodes, require_harnesses
from tests.preloaded import PreloadedServer, address, run_preloaded
from tests.rollout.agents.test_agents import Script
from tests.tiers import in_matrix, long, matrix
from tools.cpu import environment, gpu_available, sglang_arguments, vllm_arguments

pytestmark = matrix
FORKED = ROOT / "tests/examples/forked_quickstart.py"
SUMS = [(3, 4), (12, 30), (40, 9), (7, 0), (25, 24), (49, 49)]
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call><|end|>'
CALLED = re.compile(
    r"<\|tools\|>add <\|end\|><\|user\|>(\d+)\+(\d+)<\|end\|>"
    r'<\|assistant\|><tool_call>\{"name": "add", "arguments": \{"a": (\d+), "b": (\d+)\}\}</tool_call>'
    r"<\|end\|>"
    r"<\|tool\|>(\d+)<\|end\|><\|assistant\|>(.*)<\|end\|>"
)
"""A conversation of a question, a call, its result and an answer, as the model reads it."""


@pytest.fixture(scope="module", autouse=True)
def harnesses():
    require_harnesses()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    out = tmp_path_factory.mktemp("agent") / "model"
    made = run_preloaded([EXAMPLE / "make_model.py", out, "--steps", 100], engine="sglang", timeout=300)
    assert made.returncode == 0, made.stderr[-3000:]
    return out


@pytest.fixture(scope="module", params=["sglang", *in_matrix("vllm")])
def server(request, model, tmp_path_factory):
    """A server of the example's model, in float32."""
    if request.param == "vllm" and gpu_available():
        pytest.skip("make setup-vllm installs vLLM without a GPU only")
    arguments = {"sglang": [*sglang_arguments(), "--random-seed", "0"], "vllm": vllm_arguments()}
    with PreloadedServer(
        model,
        engine=request.param,
        dtype="float32",
        log_path=tmp_path_factory.mktemp("server") / "server.log",
        extra_arguments=arguments[request.param],
        environment=environment(request.param),
    ) as made:
        yield made


def whole_ids(branch):
    return torch.cat([branch.prompt_ids, branch.output_ids])


class RightPolicy(Script):
    """Calls the tool with the numbers of the question, and answers what it gives."""

    def __init__(self, tokenizer):
        super().__init__()
        self._tokenizer = tokenizer

    def _said(self, prompt_ids, sampling, draw):
        text = self._tokenizer.decode_all(prompt_ids.tolist())
        a, b = re.search(r"(\d+)\+(\d+)<\|end\|>", text).groups()
        if told := re.search(r"<\|tool\|>(\d+)<\|end\|><\|assistant\|>$", text):
            said = f"{told[1]}<|end|>"
        elif told := re.search(r"Observation:\n(\d+)<\|end\|><\|assistant\|>$", text):  # of smolagents
            said = CALL % ("final_answer", json.dumps({"answer": told[1]}))
        else:
            said = CALL % ("add", json.dumps({"a": int(a), "b": int(b)}))
        return self._tokenizer.encode(said), "stop"


@pytest.mark.parametrize("name", AGENTS)
def test_harness_when_the_policy_calls_and_answers_then_it_is_rewarded(model, name):
    policy = RightPolicy(Tokenizer.from_folder(model))
    found, counts = asyncio.run(episodes(policy, model, name, SUMS[:2], 1))
    rewrites = name == "smolagents"  # it writes calls into the history as text
    assert len(found) == 2
    for episode, branches in found.items():
        assert episode.tree.check() == [] and len(branches) == 1 + rewrites
        assert {branch.environment_reward for branch in branches} == {1.0}
    assert counts.forks == Counter({"first": 2, "edited": 2 * rewrites})
    assert (counts.requests, counts.turns, counts.refused, counts.undelivered) == (4, 4, 0, 0)


async def sampled(server, model, name, sums, samples):
    """{episode: its branches}, all counts, and [(log-probs of a branch's sampled tokens, those that the
    server gives in one pass)].
    """
    config = json.loads((model / "config.json").read_text())
    async with RolloutClient(
        [server.url],
        vocab_size=config["vocab_size"],
        timeout_s=120,
        engine=server.engine,
        decode=Tokenizer.from_folder(model).decode_all,
    ) as client:
        found, counts = await episodes(client, model, name, sums, samples)
        engine, pairs = client.engine_of(server.url), []
        for branch in (one for branches in found.values() for one in branches):
            ids = whole_ids(branch).tolist()
            answer = await client.ask(server.url, engine.score(ids[:1], ids[1:], likeliest=1))
            scores = engine.parse_scores(
                answer, server=server.url, output_ids=ids[1:], vocab_size=config["vocab_size"]
            )
            again = torch.tensor(scores.logprobs)[branch.prompt_ids.numel() - 1 :]
            pairs.append((branch.rollout_logprobs[branch.sampled], again[branch.sampled]))
    return found, counts, pairs


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[long] * (name in ("langgraph", "pydantic_ai")))
        for name in AGENTS
        if name != "smolagents"
    ],
)
def test_harness_when_a_real_server_answers_then_its_conversation_is_exact(server, model, name):
    found, counts, pairs = asyncio.run(sampled(server, model, name, SUMS, 4))
    tokenizer, called = Tokenizer.from_folder(model), 0
    assert len(found) == 24 and counts.turns > 24 and counts.refused == counts.undelivered == 0
    # Pydantic AI leaves an empty answer out of the history and asks again: anew, if it was the first, else
    # behind the answer before it.
    before_the_last = [turn for episode in found for turn in list(episode.tree.turns())[:-1]]
    left_out = [turn for turn in before_the_last if name == "pydantic_ai" and not turn.text]
    anew = sum(turn.parent is None for turn in left_out)
    again = len(left_out) - anew
    assert counts.forks == Counter({"first": 24, "edited": anew, "earlier": again})
    for episode, branches in found.items():
        assert episode.tree.check(branches) == []
        assert len(branches) == 1 or (
            name == "pydantic_ai" and any(turn.text == "" for turn in episode.tree.turns())
        )
        branch = branches[-1]
        text = tokenizer.decode_all(whole_ids(branch).tolist())
        a, b = map(int, re.match(r"<\|tools\|>add <\|end\|><\|user\|>(\d+)\+(\d+)<\|end\|>", text).groups())
        last = text.rpartition("<|assistant|>")[2].removesuffix("<|end|>")
        assert branch.environment_reward == (last.strip() == str(a + b))
        if parts := CALLED.fullmatch(text):
            *_, one, other, result, answer = parts.groups()
            assert int(result) == int(one) + int(other)
            called += "<" not in answer
    assert called > 0  # about half of them
    assert max(float((one - again).abs().max()) for one, again in pairs) < 1e-5


def test_smolagents_when_a_real_server_answers_then_what_it_forces_is_overridden_and_its_branches_are_exact(
    server, model
):
    """The model knows nothing of its instructions, and calls no tool."""
    found, counts, pairs = asyncio.run(sampled(server, model, "smolagents", SUMS[:2], 1))
    for episode, branches in found.items():
        assert episode.tree.check(branches) == [] and len(branches) > 1
        assert episode.counts.overridden["tool_choice"] == 3  # its steps; then it asks without tools
    assert counts.requests == counts.turns == 8 and counts.refused == 0
    assert max(float((one - again).abs().max()) for one, again in pairs) < 1e-5


STEPS, RUN = 3, ["--agent", "--out"]
QUICK = ["--supervised-steps", 100]


@long
def test_example_when_run_then_its_agents_give_the_samples_and_it_ends_well(tmp_path):
    out = tmp_path / "run"
    done = run_preloaded([FORKED, *RUN, out, "--steps", STEPS, *QUICK], cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    steps = read_metrics(out / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert sum(step.get("grad_norm", 0.0) for step in steps) > 0  # none where all rewards are equal
    assert sum(step["agent/episodes"] for step in steps) >= 64 * STEPS
    # What a call is followed by begins no conversation anew.
    assert all(step["agent/branches"] == 1 <= step["agent/turns"] for step in steps)
    assert sum(step["agent/turns"] for step in steps) > STEPS
    for step in steps:
        files = sorted((out / "samples").glob(f"step_{step['step']:06d}_*.parquet"))
        samples = [sample for path in files for sample in read_trajectories(path)]
        rewards = [sample.trajectory.environment_reward for sample in samples]
        assert len(samples) == 64 and sum(rewards) / 64 == pytest.approx(step["reward/mean"])
    assert "4/4 the run, drawn" in done.stdout and (out / "report.html").is_file()


@long
def test_stop_while_agents_are_asked_then_no_process_is_left(tmp_path):
    out, mark = tmp_path / "run", {"TEST_AGENT_OUT": str(tmp_path)}
    for engine in ("megatron", "sglang"):
        address(engine)  # shared with what is started here
    with open(tmp_path / "said", "w+") as said:
        process = subprocess.Popen(
            [sys.executable, FORKED, *RUN, out, "--supervised-steps", "1"],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=os.environ | mark,
        )
        try:
            started = time.monotonic()
            while not agents_of(mark):
                assert process.poll() is None and time.monotonic() - started < 200, said.read()
                time.sleep(0.2)
            stop = [sys.executable, EXAMPLE / "run.py", "--stop", "--out", out]
            subprocess.run(stop, check=True, timeout=60)
            assert process.wait(60) == 143
        finally:
            process.kill()
            process.wait()
    assert agents_of(mark) == []


def agents_of(mark):
    """Numbers of living processes with this variable that run harnesses."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cmdline()[:1] == [str(PYTHON)] and mark.items() <= process.environ().items():
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
