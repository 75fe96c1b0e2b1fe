"""A checkpoint before the first update, when the optimizer has no state yet: a run goes on from it."""

from pathlib import Path

import pytest

from tests.mcore.launched import checksums, launch, replayed, untimed_steps
from tests.tiers import long

SCRIPT = Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"
RUN = ["--global-batch-size", 8, "--train-iters", 4, "--save-interval", 2, "--moe-grouped-gemm"]
SKIPPED = 2
# All samples of the first two steps have one reward: their advantages are 0, and no update is made.
REWARD = """
from pathlib import Path

SCORED = Path(__file__).with_name("scored")

def reward(prompt, output_ids, finish_reason):
    with SCORED.open("ab") as file:
        file.write(b"1")
    if SCORED.stat().st_size <= 16:
        return 1.0
    return sum(int(i) % 2 for i in output_ids) / 8
"""
OPTIMIZERS = {
    "distributed": ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
    "whole": (),
}


@pytest.mark.parametrize("optimizer", ["distributed", pytest.param("whole", marks=long)])
def test_run_when_saved_before_its_first_update_then_it_goes_on_as_one_that_never_ended(
    sglang_server_fp32, tiny_moe_dir, tmp_path, optimizer
):
    again = ["--load", tmp_path / "whole/checkpoints", "--ckpt-step", SKIPPED]
    steps, weights = {}, {}
    with replayed(sglang_server_fp32, tiny_moe_dir, tmp_path) as door:
        (tmp_path / "reward.py").write_text(REWARD)
        for name, flags in (("whole", []), ("resumed", again)):
            door.replay()
            done = launch(
                tmp_path,
                name,
                tiny_moe_dir,
                door.url,
                SCRIPT,
                *RUN,
                *flags,
                processes=2,
                optimizer=OPTIMIZERS[optimizer],
            )
            assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            steps[name], weights[name] = untimed_steps(tmp_path / name), checksums(sglang_server_fp32.url)
    assert [step["skipped"] for step in steps["whole"]] == [1, 1, 0, 0]
    assert steps["resumed"] == steps["whole"][SKIPPED:]
    assert weights["resumed"] == weights["whole"]
