"""`megatron-rl-corr advise`: the rule of --rollout-correction auto, on metrics and on saved samples."""

import json
import math

import pytest
import torch

from megatron_rl_corr import cli
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.observability.metrics_file import MetricsFile
from megatron_rl_corr.rollout.sample_file import Sample, SavedBatch, write_trajectories


def row(step, ess, mean=1.0, **more):
    found = {"step": step, "rollout_corr/ess_sequences": ess}
    found |= {"rollout_corr/chi2_seq": mean**2 / ess - 1, "rollout_corr/sequences": 2048.0}
    return found | more


def advised(capsys, *paths):
    assert cli.main(["advise", *map(str, paths)]) == 0
    return capsys.readouterr().out.splitlines()


def sample(number, ratios):
    """A response whose tokens have these ratios."""
    trajectory = Trajectory(
        prompt_index=number,
        sample_index=0,
        prompt_ids=torch.tensor([1]),
        output_ids=torch.arange(len(ratios)),
        rollout_logprobs=torch.full((len(ratios),), -3.0),
        finish_reason="stop",
        weight_versions=(VersionSpan("0", 0, len(ratios)),),
        cached_tokens=0,
        server="http://a",
    )
    return Sample(trajectory, 1.0, train_logprobs=torch.tensor(ratios).log() - 3.0)


def test_advise_when_a_run_has_metrics_then_its_levels_and_the_flags_of_the_last(tmp_path, capsys):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step, ess in enumerate([0.9, 0.6, 0.2, 0.01, 0.6], 1):
        file.write(row(2 * step - 1, ess, update=1))
        file.write({"step": 2 * step, "update": 2})
    (tmp_path / "run.json").write_text(json.dumps({"rollout": {"updates_per_batch": 2}}))
    lines = advised(capsys, tmp_path)
    assert lines[0] == "5 batches, of steps 1 to 9; chosen for the next one: token 3, sequence 2"
    assert [line.split()[:2] for line in lines[3:-2]] == [["1", "1024"], ["5", "1024"], ["9", "1024"]]
    assert lines[3].endswith("sequence weights, at most 8") and lines[4].endswith("token weights, at most 8")
    assert lines[-1].endswith("to keep the last choice: --rollout-is token --rollout-is-threshold 8")


def test_advise_when_a_bypass_run_measured_each_update_then_the_first_of_each_batch(tmp_path, capsys):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 9):
        file.write(row(step, 0.9, update=1 + (step - 1) % 4))
    settings = {"rollout": {"updates_per_batch": 4}, "rollout_correction": {"bypass_mode": True}}
    (tmp_path / "run.json").write_text(json.dumps(settings))
    lines = advised(capsys, tmp_path)
    assert lines[0].startswith("2 batches, of steps 1 to 5") and lines[3].split()[:2] == ["1", "2048"]


def test_advise_when_the_run_chose_then_its_choices_are_compared(tmp_path, capsys):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    measured = [(0.4, 0), (0.8, 0), (math.nan, 1), (0.9, 1), (0.9, 0)]  # the last began again
    for step, (ess, level) in enumerate(measured, 1):
        file.write(row(step, ess, **{"auto/level": level}))
    lines = advised(capsys, tmp_path)
    assert lines[0].endswith("chosen for the next one: token 1, sequence 3")
    assert "the run had other weights in 1 of these steps: it began again in between" in lines


def test_advise_when_given_samples_then_the_numbers_are_theirs(tmp_path, capsys):
    # Products 1, 1, 4 and 0.25: ESS (6.25)^2 / (18.0625 * 4) = 0.5407, mean 1.5625; |D| is ln 2 at most.
    ratios = [[1.0, 1.0]] * 2 + [[2.0, 2.0], [0.5, 0.5]]
    path = tmp_path / "step_000007_replica0.parquet"
    write_trajectories(path, [sample(place, one) for place, one in enumerate(ratios)])
    for given in (path, tmp_path):
        lines = advised(capsys, given)
        assert lines[0].startswith("1 batch, of steps 7 to 7")
        assert lines[3].split()[:4] == ["7", "4", "0.5407", "1.563"]
        assert lines[3].endswith("token weights, at most 2")


def test_advise_when_a_batch_of_samples_made_several_updates_then_n_is_of_one(tmp_path, capsys):
    path = tmp_path / "step_000007_replica0.parquet"
    batch = SavedBatch(7, 2, 0, 1, 1, True, None, "/m")
    write_trajectories(path, [sample(place, [1.0]) for place in range(8)], batch=batch)
    assert advised(capsys, path)[3].split()[:2] == ["7", "4"]


def test_advise_when_the_run_has_an_advantage_then_the_flags_keep_it(tmp_path, capsys):
    MetricsFile(tmp_path / "metrics.jsonl").write(row(1, 0.9, update=1))
    settings = {"rollout_correction": {"advantage": "group_mean"}}
    (tmp_path / "run.json").write_text(json.dumps(settings))
    lines = advised(capsys, tmp_path)
    assert lines[-1].endswith(" --rollout-advantage group_mean") and "no fixed flags" not in lines[-2]


def test_advise_when_a_row_lacks_the_number_of_sequences_then_it_is_left_out(tmp_path, capsys):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({name: value for name, value in row(1, 0.9).items() if name != "rollout_corr/sequences"})
    file.write(row(2, 0.9))
    assert advised(capsys, tmp_path)[0].startswith("1 batch, of steps 2 to 2")


def test_advise_when_a_replicas_file_is_missing_then_refused(tmp_path, capsys):
    batch = SavedBatch(7, 1, 0, 2, 1, True, None, "/m")
    path = tmp_path / "step_000007_replica0.parquet"
    write_trajectories(path, [sample(0, [1.0])], batch=batch)
    assert cli.main(["advise", str(path)]) == 2
    assert "step 7 has 2 files, one of each replica, got 1" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"step": 1}\n', ""])
def test_advise_when_no_step_was_measured_then_told(tmp_path, capsys, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    assert cli.main(["advise", str(tmp_path)]) == 2
    assert "no step has sequences whose mismatch was measured" in capsys.readouterr().err
