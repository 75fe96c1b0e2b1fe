"""Several updates of a batch under the launcher: a run that is interrupted in one of them
goes on bit for bit.
"""

import json
from pathlib import Path

import pytest

from tests.matrix.releases import OVERLAID, chosen
from tests.mcore.launched import checksums, launch, replayed, untimed_steps

SCRIPT = Path(__file__).with_name("pretrain_interrupted.py")
UPDATES = 4
RUN = [
    "--global-batch-size",
    8,
    "--rollout-updates-per-batch",
    2,
    "--rollout-epochs-per-batch",
    2,
    "--train-iters",
    8,
    "--exit-signal-handler",
    "--moe-grouped-gemm",
    "--moe-permute-fusion",
    "--pipeline-model-parallel-size",
    2,
]
ROWS = ["--rollout-pad-sequences"]
ENDING = ["--rollout-max-kl-to-old", 1e-9]
CASES = {
    "signal": ("signal:2", [], True),
    "signal, rows": ("signal:2", ROWS, True),
    "signal, replayed": ("signal:2", ["--router-replay", "R2"], True),
    "overflow": (
        "overflow:2",
        ["--fp16", "--initial-loss-scale", 1024, "--rollout-max-first-step-kl", 1.0],
        False,
    ),
    "early end": ("none:0", ENDING, False),
    "result rejected": ("rejected:5", [], True),
}
"""Name -> fault, flags, and whether the fault ends the run behind the first batch."""


# make test-matrix runs all
@pytest.fixture(scope="module", params=CASES if chosen() == OVERLAID else ["signal"])
def runs(request, sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    """(case, the runs by name: exit, folder, the server's checksums behind it)."""
    fault, flags, ends = CASES[request.param]
    folder, found = tmp_path_factory.mktemp("updates"), {}
    wanted = {"whole": "none:0" if ends else fault, "begun": fault, "resumed": "none:0"}
    if not ends:  # the whole run has saved in its middle
        del wanted["begun"]
    with replayed(sglang_server_fp32, tiny_moe_dir, folder) as door:
        for name, interrupt in wanted.items():
            door.replay()
            load = ["--load", folder / ("begun" if ends else "whole") / "checkpoints", "--ckpt-step", 4]
            # or Megatron would only compute the rejected result once more
            load += ["--rerun-mode", "disabled"]
            done = launch(
                folder,
                name,
                tiny_moe_dir,
                door.url,
                SCRIPT,
                *RUN,
                *flags,
                *(load if name == "resumed" else []),
                "--save-interval",
                8 if ends else 4,
                processes=2,
                INTERRUPT=interrupt,
            )
            assert done.returncode == (interrupt == "rejected:5"), done.stderr[-4000:] + done.stdout[-2000:]
            found[name] = done, folder / name, checksums(sglang_server_fp32.url)
        assert door.sampled == 0, "the resumed run asked for other samples"
    return request.param, found


def test_run_when_interrupted_in_an_update_then_it_saves_at_the_batchs_end_and_goes_on_bit_for_bit(runs):
    case, found = runs
    _, whole, weights = found["whole"]
    wanted, (_, resumed, resumed_weights) = untimed_steps(whole), found["resumed"]
    assert [step["step"] for step in wanted] == list(range(1, 9))
    assert [step["weight_version"] for step in wanted] == [0, 0, 0, 1, 1, 1, 1, 2]
    if "begun" in found:
        done, begun, _ = found["begun"]
        assert untimed_steps(begun) == wanted[:4]
        assert (begun / "checkpoints/latest_checkpointed_iteration.txt").read_text().strip() == "4"
        cursor = json.loads((begun / "checkpoints/iter_0000004/rollout_cursor.json").read_text())
        if case == "result rejected":
            # The second batch was sampled, rewarded and not trained: its prompts are drawn again.
            assert (cursor["next"], cursor["again"], cursor["batches"]) == (8, [4, 5, 6, 7], 1)
        else:
            assert "exiting program after receiving SIGTERM" in done.stdout
            assert (cursor["next"], cursor["again"], cursor["batches"]) == (4, [], 1)
    skipped = {"overflow": [0, 1, 0, 0], "early end": [0, 1, 1, 1]}.get(case, [0] * 4)
    assert [step["skipped"] for step in wanted[:4]] == skipped
    assert untimed_steps(resumed) == wanted[4:]
    assert resumed_weights == weights
