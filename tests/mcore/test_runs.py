"""Whole runs on Transformer Engine's spec: one that goes on from a checkpoint, and one of HybridModel."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from megatron_rl_corr.rollout import RolloutClient
from tests.forked_torchrun import forking
from tests.matrix.patched import cpu_flags, unchanged
from tests.matrix.releases import OVERLAID, release_environment
from tests.matrix.replaying_server import ReplayingServer
from tests.preloaded import run_preloaded
from tools.local_server import free_port

SCRIPT = Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"
REWARD = "def reward(prompt, output_ids, finish_reason):\n    return sum(int(i) % 2 for i in output_ids) / 8\n"
GROUPED = ["--moe-grouped-gemm", "--moe-permute-fusion"]
RUN = [
    "--global-batch-size", 16, "--train-iters", 4, "--save-interval", 2, "--use-distributed-optimizer",
    "--dist-ckpt-optim-fully-reshardable", "--weight-decay", 0.1,
]  # fmt: skip
LAYOUT = [
    *GROUPED, "--tensor-model-parallel-size", 2, "--sequence-parallel", "--pipeline-model-parallel-size", 2,
    "--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1,
]  # fmt: skip
OTHER_LAYOUT = [
    *GROUPED, "--context-parallel-size", 2, "--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1,
]  # fmt: skip
HYBRID = ["--hybrid-layer-pattern", "*E*E|*E*E", "--spec", "pretrain_any", "hybrid_spec"]
"""Of four layers, the middle of which is where a stage ends."""
NEAR = 1e-4  # of float32


@pytest.fixture(scope="module")
def runs(sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    """Name -> (exit, folder of the run, the server's checksums after it)."""
    folder, found = tmp_path_factory.mktemp("checkpoints"), {}
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 12)))
    again = ["--load", folder / "whole/checkpoints", "--ckpt-step", 2]
    wanted = {
        "whole": LAYOUT, "resumed": [*LAYOUT, *again], "elsewhere": [*OTHER_LAYOUT, *again],
        "local": [
            *again, "--transformer-impl", "local", "--pipeline-model-parallel-size", 2, "--rollout-pad-sequences",
        ],
        "hybrid": [*LAYOUT, *HYBRID],
    }  # fmt: skip
    with unchanged(sglang_server_fp32, tiny_moe_dir), ReplayingServer(sglang_server_fp32.url) as door:
        for name, flags in wanted.items():
            door.replay()
            done = launch(folder, name, tiny_moe_dir, door.url, *flags)
            assert name == "local" or done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            found[name] = done, folder / name, checksums(sglang_server_fp32.url), door.sampled
    return found


def launch(folder, name, model, url, *flags):
    ours = [
        "--rollout-url", url, "--rollout-hf-checkpoint", model, "--rollout-prompts", folder / "prompts.jsonl",
        "--rollout-reward-function", f"{folder / 'reward.py'}:reward", "--rollout-group-size", 4,
        "--rollout-max-new-tokens", 8, "--rollout-correction-preset", "decoupled_token_is", "--rollout-server-check",
        "off", "--rollout-log-dir", folder / name / "log", "--save", folder / name / "checkpoints",
    ]  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "4", "--master-addr", "127.0.0.1",
        "--master-port", str(free_port()), "-m", "megatron_rl_corr.launch", SCRIPT, *cpu_flags(model),
        *map(str, [*RUN, *flags, *ours]),
    ]  # fmt: skip
    variables = release_environment(OVERLAID[-1]) | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return run_preloaded(forking(command)[1:], env=variables)


def checksums(url):
    async def asked():
        async with RolloutClient([url], vocab_size=96) as client:
            [answer] = await client.weights_checker()
            return answer["ranks"][0]["checksums"]

    return asyncio.run(asked())


def steps_of(folder):
    return [json.loads(line) for line in (folder / "log/metrics.jsonl").read_text().splitlines()]


def test_run_when_resumed_in_the_same_layout_then_its_steps_and_weights_are_those_of_a_run_that_never_ended(runs):
    (_, whole, weights, _), (_, resumed, resumed_weights, sampled) = runs["whole"], runs["resumed"]
    wanted, steps = steps_of(whole), steps_of(resumed)
    assert [step["step"] for step in steps] == [3, 4] and len(wanted) == 4
    assert sampled == 0, "other samples were asked for"
    for step, expected in zip(steps, wanted[2:], strict=True):
        assert step["grad_norm"] > 0
        timed = {name for name in step if name.startswith("time/") or "tokens_per_s" in name}
        assert {n: step[n] for n in step.keys() - timed} == {n: expected[n] for n in expected.keys() - timed}
    assert resumed_weights == weights


def test_run_when_resumed_in_another_layout_then_its_steps_are_nearly_those_of_a_run_that_never_ended(runs):
    (_, whole, *_), (_, resumed, _, sampled) = runs["whole"], runs["elsewhere"]
    wanted, steps = steps_of(whole)[2:], steps_of(resumed)
    assert [step["step"] for step in steps] == [3, 4] and sampled == 0
    for step, expected in zip(steps, wanted, strict=True):
        for name in ("loss/policy", "loss/entropy", "grad_norm", "reward/mean", "rollout_corr/valid_tokens"):
            assert step[name] == pytest.approx(expected[name], rel=NEAR, abs=1e-7), name
        assert step["rollout_corr/k3_kl"] < 1e-6, "other weights than those that were pushed"


def test_run_when_resumed_on_layers_of_other_names_then_refused_with_the_remedy(runs):
    done, folder, *_ = runs["local"]
    saved = folder.parent / "whole/checkpoints/iter_0000002"
    assert done.returncode == 1 and not (folder / "log/metrics.jsonl").exists()
    assert (
        f"megatron_rl_corr: --transformer-impl local: the checkpoint {saved} was saved with transformer_engine, whose "
        "layers have other names"
    ) in done.stderr


def test_hybrid_model_of_the_same_layers_then_its_steps_and_weights_are_those_of_gpt_model(runs):
    (_, gpt, weights, _), (hybrid_run, hybrid, hybrid_weights, sampled) = runs["whole"], runs["hybrid"]
    wanted, steps = steps_of(gpt), steps_of(hybrid)
    assert [step["step"] for step in steps] == [1, 2, 3, 4] and sampled == 0
    assert hybrid_run.stdout.count("a HybridModel") == 4, "another model was built"
    for step, expected in zip(steps, wanted, strict=True):
        for name in ("loss/policy", "loss/entropy", "grad_norm", "rollout_corr/k3_kl"):
            assert step[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-12), name
    assert hybrid_weights == weights
