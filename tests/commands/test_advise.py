"""`megatron-rl-corr advise`: the rule of --rollout-correction auto, on metrics and on saved samples."""

import json

import pytest
import torch

from megatron_rl_corr import cli
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.observability.metrics_file import MetricsFile
from megatron_rl_corr.rollout.sample_file import Sample, write_trajectories


def row(step, ess, variance, **more):
    found = {"step": step, "rollout_corr/ess_sequences": ess, "rollout_corr/chi2_token": variance}
    return found | {"rollout_corr/sequences": 2048.0} | more


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
    for step, (ess, variance) in enumerate([(0.9, 0.01), (0.4, 0.1), (0.2, 0.1), (0.01, 4.0), (0.4, 0.3)], 1):
        file.write(row(2 * step - 1, ess, variance))
        file.write({"step": 2 * step, "update": 2})
    (tmp_path / "run.json").write_text(json.dumps({"rollout": {"updates_per_batch": 2}}))
    lines = advised(capsys, tmp_path)
    assert lines[0] == "5 batches, of steps 1 to 9; behind them: hold 1, token 2, sequence 2"
    assert [line.split()[:2] for line in lines[3:-1]] == [
        ["1", "1024"],
        ["5", "1024"],
        ["7", "1024"],
        ["9", "1024"],
    ]
    assert lines[3].endswith("sequence weights, at most 8") and lines[4].endswith("token weights, at most 8")
    assert "nearly no step" in lines[5]
    assert lines[-1].endswith("to keep the last choice: --rollout-is token --rollout-is-threshold 8")


def test_advise_when_the_run_chose_then_what_it_decided_from_is_replayed(tmp_path, capsys):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    levels = [1, 1, 2, 1]  # by auto/*; the fourth began again with token weights
    for step, level in enumerate(levels, 1):
        chosen_from = {"auto/level": level, "auto/ess": [0.4, 0.6, 0.9, 0.9][step - 1], "auto/variance": 0.1}
        file.write(row(step, 0.1, 9.0, **chosen_from))
    lines = advised(capsys, tmp_path)
    assert lines[0].endswith("behind them: token 1, sequence 3")
    assert "the run had other weights in 1 of these steps: it began again in between" in lines


def test_advise_when_nothing_mends_it_then_causes_not_flags(tmp_path, capsys):
    MetricsFile(tmp_path / "metrics.jsonl").write(row(1, 0.0, 30.0))
    last = advised(capsys, tmp_path)[-1]
    assert "--router-replay R3" in last and "--rollout-is " not in last


def test_advise_when_given_samples_then_ess_and_variance_are_theirs(tmp_path, capsys):
    # Products 1, 1, 4 and 0.25: ESS (6.25)^2 / (18.0625 * 4) = 0.5407. rho^2: 4 of 1, two of 4, two of 0.25,
    # so 12.5 / 8 - 1 = 0.5625.
    samples = [
        sample(place, ratios) for place, ratios in enumerate([[1.0, 1.0]] * 2 + [[2.0, 2.0], [0.5, 0.5]])
    ]
    path = tmp_path / "step_000007_replica0.parquet"
    write_trajectories(path, samples)
    for given in (path, tmp_path):
        lines = advised(capsys, given)
        assert lines[0].startswith("1 batches, of steps 7 to 7")
        assert lines[3].split()[:4] == ["7", "4", "0.5407", "0.5625"]
        assert lines[3].endswith("sequence weights, at most 2")


@pytest.mark.parametrize("content", ['{"step": 1}\n', ""])
def test_advise_when_no_step_was_measured_then_told(tmp_path, capsys, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    assert cli.main(["advise", str(tmp_path)]) == 2
    assert "no step has rollout_corr/ess_sequences" in capsys.readouterr().err
