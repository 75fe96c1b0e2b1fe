"""Corrections compared on kept samples: numbers by hand, and what is missing."""

import json
import math
from dataclasses import replace

import pytest
import torch

from megatron_rl_corr import cli
from megatron_rl_corr.commands.correct.compare import KeptBatch, comparison
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.rollout.sample_file import Sample, write_trajectories

NAN = math.nan


def sample(rollout, train, turns=None, **known):
    """rho = pi_train / pi_rollout of each token, from its two probabilities; a turn of -1 is
    the environment's.
    """
    trajectory = Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=torch.tensor([1]),
        output_ids=torch.arange(len(rollout)),
        rollout_logprobs=torch.tensor(rollout).log(),
        finish_reason="stop",
        weight_versions=(VersionSpan("0", 0, len(rollout)),),
        cached_tokens=0,
        server="http://a",
        turn_ids=None if turns is None else torch.tensor(turns),
    )
    return Sample(trajectory, 1.0, train_logprobs=torch.tensor(train).log(), **known)


# rho: 1, 4 and 1/2, 1/2, 1: the weights of a truncation at 2 are 1, 2 and 1/2, 1/2, 1.
SAMPLES = [sample([0.5, 0.1], [0.5, 0.4]), sample([0.8, 0.2, 0.1], [0.4, 0.1, 0.1])]


def test_metrics_when_weights_are_truncated_then_by_hand():
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_mode="truncate", rollout_is_upper=2.0)
    numbers = KeptBatch.of(SAMPLES).metrics(config)
    assert numbers["rollout_corr/valid_tokens"] == 5 and numbers["rollout_corr/sequences"] == 2
    assert numbers["rollout_corr/weight_mean"] == pytest.approx((1 + 2 + 0.5 + 0.5 + 1) / 5)
    assert numbers["rollout_corr/kl"] == pytest.approx(-(math.log(4) - 2 * math.log(2)) / 5, abs=1e-7)
    assert numbers["rollout_corr/kept_fraction"] == 1


def test_metrics_when_sequences_are_rejected_then_their_tokens_are_not_kept():
    # Geometric means of rho: 2 and (1/4)^(1/3) = 0.63.
    config = RolloutCorrectionConfig.from_dict(
        {"rollout_rs": "seq_mean_ratio", "rollout_rs_threshold": "0.5_1.5"}
    )
    numbers = KeptBatch.of(SAMPLES).metrics(config)
    assert numbers["rollout_corr/kept_fraction"] == pytest.approx(3 / 5)
    assert numbers["rollout_corr/rejected_fraction/seq_mean_ratio"] == pytest.approx(2 / 5)


def test_metrics_when_an_environment_spoke_then_its_tokens_are_left_out_and_turns_are_told():
    config = RolloutCorrectionConfig.from_dict({"rollout_is": "turn", "rollout_is_threshold": 2.0})
    talk = sample([0.5, NAN, 0.2, 0.2], [0.25, 0.9, 0.2, 0.4], turns=[0, -1, 1, 1])
    numbers = KeptBatch.of([talk, SAMPLES[0]]).metrics(config)
    assert numbers["rollout_corr/valid_tokens"] == 5 and numbers["rollout_corr/nonfinite_tokens"] == 0
    assert (
        numbers["rollout_corr/by_turn/first/tokens"] == 3
        and numbers["rollout_corr/by_turn/later/tokens"] == 2
    )
    # Turns: 1/2; 1 * 2 = 2; and 1 * 4, at most 2. Tokens: 1, 2 and 2.
    assert numbers["rollout_corr/weight_mean"] == pytest.approx((0.5 + 2 + 2 + 2 + 2) / 5)


def test_command_when_presets_are_compared_then_a_column_each(tmp_path, capsys):
    write_trajectories(tmp_path / "a.parquet", SAMPLES[:1])
    write_trajectories(tmp_path / "b.parquet", SAMPLES[1:])
    files = [str(tmp_path / name) for name in ("a.parquet", "b.parquet")]
    assert cli.main(["correct", *files, "--preset", "decoupled_token_is", "decoupled_geo_rs"]) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0] == "2 samples of 2 files, as one batch"
    assert table.splitlines()[1].split() == ["decoupled_token_is", "decoupled_geo_rs"]
    assert "rejected_fraction/seq_mean_ratio                   -                 1" in table
    assert cli.main(["correct", *files, "--preset", "decoupled_token_is", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)["decoupled_token_is"]
    assert numbers == KeptBatch.of(SAMPLES).metrics(RolloutCorrectionConfig.from_preset("decoupled_token_is"))


def test_command_when_something_is_missing_then_it_is_named(tmp_path, capsys):
    path = tmp_path / "a.parquet"
    write_trajectories(path, [replace(SAMPLES[0], train_logprobs=None)])
    for arguments, said in (
        ([], "nothing to compare; give --preset"),
        (
            ["--preset", "decoupled_token_is"],
            "1 of 1 samples have no train_logprobs: a run with --rollout-bypass-mode",
        ),
        (["--preset", "no_such"], "no_such"),
    ):
        assert cli.main(["correct", str(path), *arguments]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="there are no samples"):
        KeptBatch.of([])


def test_comparison_when_a_number_is_missing_then_a_dash():
    rows = dict(line.split()[-2:] for line in comparison({"x": {"rollout_corr/ess": 0.5}}).splitlines()[1:])
    assert rows.pop("ESS") == "0.5" and len(rows) == 12 and set(rows.values()) == {"-"}
