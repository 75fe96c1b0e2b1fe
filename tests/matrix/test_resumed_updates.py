"""Several updates of a batch under the launcher: a run that is interrupted in one of them goes on bit for bit."""

import json
import sys
from pathlib import Path

import pytest

from tests.forked_torchrun import forking
from tests.matrix.patched import cpu_flags, unchanged
from tests.matrix.releases import OVERLAID, release_environment
from tests.matrix.replaying_server import ReplayingServer
from tests.mcore.test_runs import REWARD, checksums, steps_of
from tests.preloaded import run_preloaded
from tools.local_server import free_port

SCRIPT = Path(__file__).with_name("pretrain_interrupted.py")
UPDATES = 4
RUN = [
    "--global-batch-size", 8, "--rollout-updates-per-batch", 2, "--rollout-epochs-per-batch", 2, "--train-iters", 8,
    "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable", "--weight-decay", 0.1,
    "--exit-signal-handler", "--moe-grouped-gemm",
    "--moe-permute-fusion", "--pipeline-model-parallel-size", 2,
]  # fmt: skip
ROWS = ["--rollout-pad-sequences"]
ENDING = ["--rollout-max-kl-to-old", 1e-9]
CASES = {
    "signal": ("signal:2", [], True), "signal, rows": ("signal:2", ROWS, True),
    "signal, replayed": ("signal:2", ["--router-replay", "R2"], True),
    "overflow": ("overflow:2", ["--fp16", "--initial-loss-scale", 1024, "--rollout-max-first-step-kl", 1.0], False),
    "early end": ("none:0", ENDING, False),
}  # fmt: skip
"""Name -> fault of the first batch, flags, and whether the fault ends the run."""


@pytest.fixture(scope="module", params=CASES)
def runs(request, sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    """(case, the runs by name: exit, folder, the server's checksums behind it)."""
    fault, flags, ends = CASES[request.param]
    folder, found = tmp_path_factory.mktemp("updates"), {}
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 12)))
    wanted = {"whole": "none:0" if ends else fault, "begun": fault, "resumed": "none:0"}
    if not ends:  # the whole run has saved in its middle
        del wanted["begun"]
    with unchanged(sglang_server_fp32, tiny_moe_dir), ReplayingServer(sglang_server_fp32.url) as door:
        for name, interrupt in wanted.items():
            door.replay()
            load = ["--load", folder / ("begun" if ends else "whole") / "checkpoints", "--ckpt-step", 4]
            done = launch(
                folder, name, tiny_moe_dir, door.url, interrupt, *flags, *(load if name == "resumed" else []),
                "--save-interval", 8 if ends else 4,
            )
            assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            found[name] = done, folder / name, checksums(sglang_server_fp32.url)
        assert door.sampled == 0, "the resumed run asked for other samples"
    return request.param, found


def launch(folder, name, model, url, interrupt, *flags):
    ours = [
        "--rollout-url", url, "--rollout-hf-checkpoint", model, "--rollout-prompts", folder / "prompts.jsonl",
        "--rollout-reward-function", f"{folder / 'reward.py'}:reward", "--rollout-group-size", 4,
        "--rollout-max-new-tokens", 8, "--rollout-correction-preset", "decoupled_token_is", "--rollout-server-check",
        "off", "--rollout-log-dir", folder / name / "log", "--save", folder / name / "checkpoints",
    ]  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master-addr", "127.0.0.1",
        "--master-port", str(free_port()), "-m", "megatron_rl_corr.launch", SCRIPT, *cpu_flags(model),
        *map(str, [*RUN, *flags, *ours]),
    ]  # fmt: skip
    variables = release_environment(OVERLAID[-1]) | {
        "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "INTERRUPT": interrupt,
    }  # fmt: skip
    return run_preloaded(forking(command)[1:], env=variables)


def untimed(step):
    return {name: value for name, value in step.items() if not name.startswith("time/") and name != "tokens_per_s"}


def test_run_when_interrupted_in_an_update_then_it_saves_at_the_batchs_end_and_goes_on_bit_for_bit(runs):
    case, found = runs
    _, whole, weights = found["whole"]
    wanted, (_, resumed, resumed_weights) = steps_of(whole), found["resumed"]
    assert [step["step"] for step in wanted] == list(range(1, 9))
    assert [step["weight_version"] for step in wanted] == [0, 0, 0, 1, 1, 1, 1, 2]
    if "begun" in found:
        done, begun, _ = found["begun"]
        assert [untimed(step) for step in steps_of(begun)] == [untimed(step) for step in wanted[:4]]
        assert (begun / "checkpoints/latest_checkpointed_iteration.txt").read_text().strip() == "4"
        assert "exiting program after receiving SIGTERM" in done.stdout
        cursor = json.loads((begun / "checkpoints/iter_0000004/rollout_cursor.json").read_text())
        assert (cursor["next"], cursor["again"]) == (4, [])
    skipped = {"overflow": [0, 1, 0, 0], "early end": [0, 1, 1, 1]}.get(case, [0] * 4)
    assert [step["skipped"] for step in wanted[:4]] == skipped
    assert [untimed(step) for step in steps_of(resumed)] == [untimed(step) for step in wanted[4:]]
    assert resumed_weights == weights
