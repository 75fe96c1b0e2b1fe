"""KL to a reference policy under the launcher: exactly 0 at the start, never on the servers, kept over a restart."""

import json
import sys
from pathlib import Path

import pytest

from tests.forked_torchrun import forking
from tests.matrix.patched import cpu_flags, process_environment, unchanged
from tests.matrix.releases import OVERLAID, chosen
from tests.matrix.test_launcher_step import REWARD
from tests.mcore.test_reference import MORE, check, kl_reference  # noqa: F401
from tests.preloaded import run_preloaded
from tools.local_server import free_port

pytestmark = pytest.mark.skipif(chosen() != OVERLAID, reason="make test-matrix runs it; tests/mcore has the gradients")
HERE = Path(__file__).resolve().parent
REPLICAS = [
    "--expert-model-parallel-size", 2, "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
]  # fmt: skip
"""Two, whose parameters are views of the distributed optimizer's buffers and are gathered late."""


@pytest.mark.parametrize("processes", MORE)
def test_kl_penalties_in_more_layouts_then_gradients_equal_hf_autograd(processes, tiny_moe_dir, kl_reference):  # noqa: F811
    check(processes, MORE[processes], tiny_moe_dir, kl_reference)


def launch(folder, model, url, *flags, ranks=2, script=HERE / "pretrain_any.py"):
    """One run of the launcher; what its process ended with."""
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 12)))
    ours = [
        "--rollout-url", url, "--rollout-hf-checkpoint", model, "--rollout-prompts", folder / "prompts.jsonl",
        "--rollout-reward-function", f"{folder / 'reward.py'}:reward", "--rollout-group-size", 4,
        "--rollout-max-new-tokens", 8, "--rollout-server-check", "off", "--rollout-log-dir", folder / "log",
        "--global-batch-size", 16, "--log-interval", 1,
    ]  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master-addr", "127.0.0.1",
        "--master-port", str(free_port()), "-m", "megatron_rl_corr.launch", script, *cpu_flags(model),
        *map(str, [*ours, *flags]),
    ]  # fmt: skip
    return run_preloaded(forking(list(map(str, command)))[1:], env=process_environment() | {"CUDA_VISIBLE_DEVICES": ""})


def steps_of(folder):
    return [json.loads(line) for line in (folder / "log/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("packed", [False, True])
def test_reference_when_it_is_the_start_then_its_kl_is_0_until_the_first_update_and_servers_have_the_live_weights(
    packed, tmp_path, tiny_moe_dir, sglang_server_fp32
):
    flags = [*REPLICAS, "--rollout-kl-loss-coef", 0.1, "--rollout-sampler-kl-coef", 0.1]
    flags += ["--rollout-pack-sequences"] if packed else []
    with unchanged(sglang_server_fp32, tiny_moe_dir):
        done = launch(tmp_path / "run", tiny_moe_dir, sglang_server_fp32.url, *flags, "--train-iters", 3)
    assert done.returncode == 0, done.stderr[-4000:]
    first, *later = steps_of(tmp_path / "run")
    assert first["loss/reference_kl"] == 0 and [step["loss/reference_missing"] for step in later] == [0, 0]
    assert all(step["loss/reference_kl"] > 1e-5 for step in later)
    # Of the same weights after every push: the reference's never got there.
    assert all(0 <= step["rollout_corr/k3_kl"] < 1e-6 for step in (first, *later))
