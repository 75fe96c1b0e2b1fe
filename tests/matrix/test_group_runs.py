"""Whole runs whose groups are filtered and over-sampled, with an advantage of the batch and a
loss of the user.
"""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.mcore.launched import launch, replayed, untimed_steps
from tests.tiers import long

pytestmark = long
SCRIPT = Path(__file__).resolve().parent / "pretrain_any.py"
OWN = Path(__file__).resolve().parents[1] / "mcore/own_functions.py"
# Of four samples of eight tokens, about every third group has no spread.
REWARD = """
def reward(prompt, output_ids, finish_reason):
    return float(output_ids[-1] % 3 > 0)
"""
RUN = [
    "--global-batch-size",
    16,
    "--train-iters",
    4,
    "--save-interval",
    2,
    "--moe-grouped-gemm",
    "--moe-permute-fusion",
]
GROUPS = ["--rollout-group-filter", "spread", "--rollout-oversampling", 1.5]
WAYS = {
    "none": [*GROUPS, "--rollout-advantage", "reinforce_plus_plus", "--rollout-loss", f"{OWN}:soft_gate"],
    "lag": [*GROUPS, "--rollout-max-lag", 1, "--rollout-advantage", f"{OWN}:leave_best_out"],
}


def trained(folder):
    """Step -> the numbers of its groups, of both replicas: one of each sample."""
    found = {}
    for file in folder.glob("samples/step_*_replica*.parquet"):
        numbers = pq.read_table(file, columns=["group"])["group"].to_pylist()
        found.setdefault(int(file.name.split("_")[1]), []).extend(numbers)
    return found


@pytest.fixture(scope="module", params=WAYS)
def runs(request, sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    """(which, a run of four steps, one that goes on from its second)."""
    folder, way = tmp_path_factory.mktemp("groups"), WAYS[request.param]
    with replayed(sglang_server_fp32, tiny_moe_dir, folder) as door:
        (folder / "reward.py").write_text(REWARD)
        for name, more in {
            "whole": [],
            "resumed": ["--load", folder / "whole/checkpoints", "--ckpt-step", 2],
        }.items():
            door.replay()
            done = launch(
                folder,
                name,
                tiny_moe_dir,
                door.url,
                SCRIPT,
                *RUN,
                *way,
                *more,
                "--rollout-save-trajectories",
                folder / name / "samples",
                processes=2,
            )
            assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    return request.param, folder / "whole", folder / "resumed"


def test_run_when_groups_are_filtered_and_oversampled_then_no_prompt_is_lost_or_comes_twice(runs):
    which, whole, resumed = runs
    steps = untimed_steps(whole)
    assert len(steps) == 4 and all(step["rollout/groups_without_spread"] == 0 for step in steps)
    assert sum(step["rollout/groups_filtered"] for step in steps) > 0
    if which == "none":
        # Each replica samples three groups for two; the third is aborted, or was done and is not kept.
        for step in steps:
            assert step["rollout/surplus_aborted"] + step["rollout/surplus_discarded"] == 2
            assert (
                step["rollout/surplus_kept"]
                == step["rollout/groups_running"]
                == step["rollout/groups_ready"]
                == 0
            )
            assert step["weight_lag"] == 0 and step["loss/gate"] == pytest.approx(1.0, abs=1e-6)
    assert [len(numbers) for numbers in trained(whole).values()] == [16] * 4
    first = {number for step in (1, 2) for number in trained(whole)[step]}
    later = {number for numbers in trained(resumed).values() for number in numbers}
    assert len(first) == len(later) == 8 and not first & later
    cursor = json.loads((whole / "checkpoints/iter_0000002/rollout_cursor.json").read_text())
    again = set(cursor["again"])
    assert again & later, "what was drawn and not trained comes first"
    # What is neither trained nor drawn again was filtered, or is of the row that is too long.
    gone = set(range(cursor["next"])) - again - first
    filtered, long = (
        sum(step[name] for step in steps[:2])
        for name in ("rollout/groups_filtered", "rollout/skipped_prompts/long")
    )
    assert not again & first and not gone & later and max(first) < cursor["next"]
    # a lag filters for the steps behind the checkpoint too
    assert len(gone) == filtered + long or which == "lag"
