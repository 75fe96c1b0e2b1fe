"""Corrections, losses and gradients of every family over context- and data-parallel ranks are
those of one process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.reduce.correction_worker import CONFIGS, LAYOUTS, LENGTHS, global_batch, my_positions, run

HERE = Path(__file__).resolve().parent
CUTS = ["zigzag", "contiguous", "packed row"]


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request, tmp_path_factory) -> tuple[str, list[dict]]:
    """What the ranks of a layout saved."""
    folder, name = tmp_path_factory.mktemp("ranks"), request.param
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, HERE / "correction_worker.py", folder, name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cp, dp = LAYOUTS[name]
    # The files are this test's own.
    return name, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(cp * dp)]


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict]:
    everything = torch.arange(sum(LENGTHS))
    return {name: run(config, everything, 0, len(LENGTHS), None) for name, config in CONFIGS.items()}


def test_cuts_when_laid_together_then_every_token_once_and_the_awkward_cases_are_there():
    batch = global_batch()
    for layout, (cp, dp) in LAYOUTS.items():
        for cut in CUTS:
            parts = [my_positions(cut, layout, rank) for rank in range(cp * dp)]
            assert torch.cat(parts).sort().values.tolist() == list(range(sum(LENGTHS)))
    first, second = (my_positions("zigzag", "cp2", rank) for rank in (0, 1))
    # Sequence 4 has valid tokens on the second rank only; in a packed row, sequence 0 lies on
    # the first alone.
    assert not batch["mask"][first][batch["seq_ids"][first] == 4].any()
    assert batch["mask"][second][batch["seq_ids"][second] == 4].any()
    assert 0 not in batch["seq_ids"][my_positions("packed row", "cp2", 1)]
    # A turn of sequence 6 has tokens on both ranks, and on neither the same.
    turns = [set(batch["turn_ids"][part][batch["seq_ids"][part] == 6].tolist()) for part in (first, second)]
    assert turns[0] & turns[1]


def test_configurations_when_run_by_one_process_then_each_does_something(one_process):
    for name, found in one_process.items():
        rejecting = any(word in name for word in ("kept", "rejecting", "rules", "opsm and veto"))
        if rejecting:
            assert 0 < found["kept_tokens"] < found["valid_tokens"], name
    assert one_process["everything rejected"]["kept_tokens"] == 0
    assert one_process["everything rejected"]["gradient"].count_nonzero() == 0
    assert one_process["m2po"]["kept_tokens"] < one_process["m2po"]["valid_tokens"]
    # Rules of all levels leave other lengths than the valid ones, and take whole sequences.
    kept, valid = (one_process[f"seq-mean-token-mean over {kind}"] for kind in ("kept", "valid"))
    assert (
        kept["lengths"].tolist() != valid["lengths"].tolist() and kept["sequences"] < valid["sequences"] == 7
    )


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_step_when_sharded_then_weights_masks_losses_and_gradients_of_one_process(
    layout, one_process, name, cut
):
    expected, (layout_name, ranks) = one_process[name], layout
    each = len(LENGTHS) // LAYOUTS[layout_name][1]
    for rank, results in enumerate(ranks):
        found = results[cut, name]
        mine = found["positions"]
        for part in ("mask", "valid"):
            assert found[part].tolist() == expected[part][mine].tolist(), part
        for part in ("weights", "coefficients", "losses", "gradient"):
            torch.testing.assert_close(found[part], expected[part][mine], rtol=2e-6, atol=1e-9, msg=part)
        first = each * (rank // LAYOUTS[layout_name][0])
        for part in ("kept_sequences", "lengths"):
            assert found[part].tolist() == expected[part][first : first + each].tolist(), part
        for part in ("valid_tokens", "kept_tokens", "sequences"):
            assert found[part] == expected[part], part


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_metrics_when_sharded_then_all_of_one_process_and_the_same_on_every_rank(
    layout, one_process, name, cut
):
    expected, ranks = one_process[name]["metrics"], layout[1]
    assert len(expected) > 100
    for results in ranks:
        # The losses are float32: their sum depends on the order of additions.
        found = results[cut, name]["metrics"]
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-7, nan_ok=True)
        assert found == pytest.approx(ranks[0][cut, name]["metrics"], rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_collectives_when_a_step_is_corrected_and_reported_then_one_over_cp_and_three_over_dp_cp(
    layout, name
):
    m2po = CONFIGS[name].rollout_m2_threshold is not None
    for results in layout[1]:
        for cut in CUTS:
            found = results[cut, name]
            assert found["collectives"] == {"cp": 1, "dp_cp": 2 if m2po else 1}
            assert found["reporting"] == {"dp_cp": 2}
            # GSPO's ratio is of the policy as it is in the forward pass: its sum can't have been
            # exchanged before.
            assert found["in_loss"] == ({"cp": 1} if CONFIGS[name].loss == "gspo" else {})
