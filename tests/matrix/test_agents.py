"""Runs of the trainer on episodes of a harness with a tool, against real servers: what is trained is what the
harness was answered, whole and once, whatever weights came meanwhile.
"""

from contextlib import contextmanager

import pytest

from megatron_rl_corr.data.tokenizer import Tokenizer
from tests.conftest import ROOT
from tests.matrix.agent_truth import (
    check_episodes,
    check_logprobs,
    model_with_template,
    noted,
    run_agents,
    steps_of,
    trained_of,
    write_agent_rows,
)
from tests.matrix.patched import unchanged
from tests.preloaded import PreloadedServer, run_preloaded
from tests.tiers import long
from tools.cpu import environment, gpu_available, sglang_arguments, vllm_arguments

pytestmark = long
STEPS = 5
AHEAD = ["--rollout-max-lag", 2]


@pytest.fixture
def trained_server(sglang_server_fp32, tiny_moe_dir):
    """The shared server, for a run that trains: later tests find its first weights."""
    with unchanged(sglang_server_fp32, tiny_moe_dir) as server:
        yield server


@pytest.mark.parametrize("lag", [0, 2])
def test_run_when_agents_are_sampled_then_each_episode_is_trained_whole_and_once(
    lag, engine_server, tiny_moe_dir, tmp_path
):
    write_agent_rows(tmp_path, 64)
    model = model_with_template(tiny_moe_dir, tmp_path)
    flags, (engine, server) = [] if lag == 0 else AHEAD, engine_server
    how = {"tokens": 40}
    if engine == "vllm":  # it is faster, and pushes would meet no answer
        flags, how = [*flags, "--rollout-max-concurrency", 2], {"tokens": 90}
    with unchanged(server, tiny_moe_dir):
        done = run_agents(tmp_path, server.url, model, *flags, steps=STEPS, **how)
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-3000:]
    trained, changed = check_episodes(tmp_path, model, steps=STEPS, lag=lag)
    branches = [len(samples) for samples in trained.values()]
    assert set(branches) == {1, 2}
    episodes = noted(tmp_path).values()
    steps = steps_of(tmp_path)
    assert sum(step["rollout/failed/agent"] for step in steps) == 0
    mixed = [step["rollout/mixed_version_fraction"] for step in steps]
    if lag == 0:
        assert changed == 0 == sum(mixed) and len(episodes) == len(trained)
    else:
        assert changed > 0 < sum(mixed)  # in the middle of answers, too
        assert max(step["weight_lag"] for step in steps) >= 1


def test_run_when_answers_go_on_in_place_at_a_push_then_their_keys_are_those_of_before(
    keeping_server, tiny_moe_dir, tmp_path
):
    """An answer's tokens behind a push are of its weights, over keys and values of those before; the next
    answer is of one set of weights again, though the server has the conversation in its cache.
    """
    write_agent_rows(tmp_path, 64)
    model = model_with_template(tiny_moe_dir, tmp_path)
    flags = [*AHEAD, "--rollout-pause-mode", "in_place"]
    with unchanged(keeping_server, tiny_moe_dir):
        done = run_agents(tmp_path, keeping_server.url, model, *flags, steps=STEPS)
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-3000:]
    trained, changed = check_episodes(tmp_path, model, steps=STEPS, lag=2, in_place=True)
    assert changed > 0
    every = [one for samples in trained.values() for one in samples]
    with pytest.raises(AssertionError):
        check_logprobs(tmp_path, "run", model, every, in_place=False)


LAYOUTS = {
    "pp2": ["--pipeline-model-parallel-size", 2],
    "pp2 vpp2": ["--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 1],
    "tp2 ep2": [
        *["--tensor-model-parallel-size", 2, "--sequence-parallel", "--expert-model-parallel-size", 2],
        *["--expert-tensor-parallel-size", 1],
    ],
    "ep2": ["--expert-model-parallel-size", 2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_when_its_layout_is_another_then_episodes_are_trained_alike(
    layout, trained_server, tiny_moe_dir, tmp_path
):
    """Of a model that two ranks share; its log-probs are the servers'."""
    write_agent_rows(tmp_path, 32)
    model = model_with_template(tiny_moe_dir, tmp_path)
    done = run_agents(tmp_path, trained_server.url, model, *LAYOUTS[layout], steps=2)
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-3000:]
    trained, _ = check_episodes(tmp_path, model, steps=2)
    assert {len(samples) for samples in trained.values()} == {1, 2}
    for step in steps_of(tmp_path):
        assert step["grad_norm"] > 0 and step["rollout_corr/log_ratio_abs_max"] < 1e-3


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """The agent example's model, which calls its tool."""
    out = tmp_path_factory.mktemp("taught") / "model"
    made = run_preloaded([ROOT / "examples/agent/make_model.py", out, "--steps", 100], engine="sglang")
    assert made.returncode == 0, made.stderr[-3000:]
    return out


@contextmanager
def server_of(engine, model, folder, *more):
    arguments = {"sglang": sglang_arguments, "vllm": vllm_arguments}[engine]()
    with PreloadedServer(
        model,
        engine=engine,
        dtype="float32",
        log_path=folder / "server.log",
        extra_arguments=[*arguments, *more],
        environment=environment(engine),
    ) as server:
        yield server


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_run_when_the_policy_calls_tools_then_calls_and_results_are_as_the_harness_had_them(
    engine, taught, tmp_path
):
    if engine == "vllm" and gpu_available():
        pytest.skip("make setup-vllm installs vLLM without a GPU only")
    write_agent_rows(tmp_path, 64, question="1{}+20")
    with server_of(engine, taught, tmp_path) as server:
        flags = ["--rollout-max-lag", 1]
        done = run_agents(tmp_path, server.url, taught, *flags, steps=3, tokens=24)
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-3000:]
    check_episodes(tmp_path, taught, steps=3, lag=1)
    notes = noted(tmp_path).values()
    assert sum(one.calls for one in notes) > len(notes) / 4
    texts = " ".join(
        Tokenizer.from_folder(taught).decode_all(sample.trajectory.output_ids.tolist())
        for samples in trained_of(tmp_path).values()
        for sample in samples
    )
    # Where a call is made, its result comes behind it, and is no token of the policy's.
    assert "</tool_call><|end|><|tool|>" in texts
    assert max(step["weight_version"] for step in steps_of(tmp_path)) == 3


def test_run_when_a_servers_cache_is_smaller_than_its_context_then_harnesses_are_told_and_none_fails(
    tiny_moe_dir, tmp_path
):
    """A cache of 300 tokens, behind a context of 512 and sequences of 385."""
    write_agent_rows(tmp_path, 32, turns=9, pause_s=0.0)
    model = model_with_template(tiny_moe_dir, tmp_path)
    with server_of("sglang", tiny_moe_dir, tmp_path, "--max-total-tokens", "300") as server:
        done = run_agents(tmp_path, server.url, model, steps=2)
    assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-3000:]
    trained, _ = check_episodes(tmp_path, model, steps=2)
    refused = [text for one in noted(tmp_path).values() for text in one.refused]
    assert refused and all("maximum context length is 294 tokens" in text for text in refused)
    steps = steps_of(tmp_path)
    assert sum(step["agent/refused"] for step in steps) == len(refused)
    assert sum(step["rollout/groups_replaced"] for step in steps) == 0
    lengths = [
        sample.trajectory.prompt_ids.numel() + sample.trajectory.output_ids.numel()
        for samples in trained.values()
        for sample in samples
    ]
    assert 280 < max(lengths) <= 294
