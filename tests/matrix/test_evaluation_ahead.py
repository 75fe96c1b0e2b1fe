"""Evaluation while the next step is trained: on real ranks, of one version of the weights each,
and none is lost.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.matrix.releases import OVERLAID, chosen
from tests.mcore.launched import launch, replayed

pytestmark = pytest.mark.skipif(
    chosen() != OVERLAID,
    reason="make test-matrix runs it; tests/mcore/test_evaluate.py has the order of the reports",
)
SCRIPT = Path(__file__).resolve().parent / "pretrain_any.py"
HELD_OUT = [[9, 8, 7, n] for n in range(5)]
SAMPLES = 2
RUN = ["--global-batch-size", 16, "--save-interval", 100, "--rollout-max-lag", 1, "--eval-interval", 1]


@pytest.fixture(scope="module")
def runs(sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    """Name -> (the ended run, its rows, how many held-out samples each version of the
    weights was asked for).
    """
    folder, found = tmp_path_factory.mktemp("ahead"), {}
    path = folder / "held_out.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in HELD_OUT))
    flags = [*RUN, "--rollout-eval-prompts", f"five={path}", "--rollout-eval-samples", SAMPLES]
    ends = {"whole": ["--train-iters", 3], "left": ["--train-iters", 9, "--exit-interval", 2]}
    with replayed(sglang_server_fp32, tiny_moe_dir, folder) as door:
        for name, end in ends.items():
            door.replay()
            door.samples.clear()
            done = launch(folder, name, tiny_moe_dir, door.url, SCRIPT, *flags, *end, processes=2)
            assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            rows = [
                json.loads(line) for line in (folder / name / "log/metrics.jsonl").read_text().splitlines()
            ]
            answers = [
                json.loads(answer)["meta_info"]["weight_versions"]
                for body, answers in door.samples.items()
                if json.loads(body)["input_ids"] in HELD_OUT
                for answer in answers
            ]
            assert all(len(spans) == 1 for spans in answers), "the weights changed within an evaluation"
            versions = Counter(int(spans[0]["version"].rpartition("-")[2]) for spans in answers)
            found[name] = done, rows, versions
    return found


@pytest.mark.parametrize(("name", "steps"), [("whole", 3), ("left", 2)])
def test_evaluation_when_samples_are_ahead_then_each_step_has_its_own_of_its_own_weights(runs, name, steps):
    done, rows, versions = runs[name]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert versions == dict.fromkeys(range(1, steps + 1), len(HELD_OUT) * SAMPLES)
    for row in rows:
        assert row["weight_version"] == row["step"] and row["eval/five/samples"] == len(HELD_OUT) * SAMPLES
        assert row["eval/five/failed"] == 0 and row["eval/five/mean@2"] >= 0
        assert f"[rollout] held-out reward of five after step {row['step']}: " in done.stdout
    assert all("time/eval_s" in row for row in rows[1:])


def test_evaluation_when_the_exit_interval_ends_the_run_then_the_checkpoint_is_there(runs):
    done, rows, _ = runs["left"]
    assert "exiting program at iteration 2" in done.stdout
