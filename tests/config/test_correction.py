"""Settings from Python, YAML, verl's keys and flags mean the same; what is wrong or has no effect says so."""

import argparse
import dataclasses
import re

import pytest

from megatron_rl_corr.config.correction import PRESETS, RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.config.flags import CORRECTION, add_group, correction_config, given_flags
from megatron_rl_corr.config.problems import Problems

from_dict = RolloutCorrectionConfig.from_dict
NO_EFFECT_WITHOUT_WEIGHTS = (
    "`rollout_is_threshold`, `rollout_is_mode` and `rollout_is_batch_normalize` have no effect without "
    "weights; add `rollout_is` token, sequence or geometric, or drop them"
)


def from_flags(*flags: str) -> RolloutCorrectionConfig:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_group(parser, CORRECTION)
    problems = Problems()
    given = given_flags(parser, flags, problems)
    assert given.others == [] and not problems
    return correction_config(given.values)


def from_yaml(tmp_path, text: str) -> RolloutCorrectionConfig:
    path = tmp_path / "correction.yaml"
    path.write_text(text)
    return RolloutCorrectionConfig.from_yaml(str(path))


def message_of(call, *args, **kwargs) -> str:
    with pytest.raises(ValueError) as raised:
        call(*args, **kwargs)
    return str(raised.value)


# verl's keys and values


@pytest.mark.parametrize(
    "verl, expected",
    [
        # A number truncates from above; verl's default.
        (
            {"rollout_is": "token", "rollout_is_threshold": 2.0},
            RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=2.0),
        ),
        ({"rollout_is": "token"}, RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=2.0)),
        (
            {"rollout_is": "sequence", "rollout_is_threshold": "5"},
            RolloutCorrectionConfig(rollout_is="sequence", rollout_is_upper=5.0),
        ),
        # Two bounds mask (IcePop); this one is on rho itself.
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
            RolloutCorrectionConfig(
                rollout_is="token", rollout_is_mode="mask", rollout_is_lower=0.5, rollout_is_upper=5.0
            ),
        ),
        # verl writes every key out, its default threshold beside weights that are off too.
        (
            {
                "rollout_is": None,
                "rollout_is_threshold": 2.0,
                "rollout_is_batch_normalize": False,
                "rollout_rs": None,
                "rollout_rs_threshold": None,
                "bypass_mode": False,
                "loss_type": "ppo_clip",
            },
            RolloutCorrectionConfig(),
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
            RolloutCorrectionConfig(
                rollout_is="token", rollout_is_upper=2.0, rollout_is_batch_normalize=True
            ),
        ),
    ],
)
def test_from_dict_when_keys_are_verls_then_verls_meaning(verl, expected):
    assert from_dict(verl) == expected


@pytest.mark.parametrize(
    "name, threshold, level, divergence, lower, upper",
    [
        # verl's k1 is -D, so its bounds are on 1/rho: 0.5 <= 1/rho <= 5 is 0.2 <= rho <= 2.
        ("token_k1", "0.5_5.0", "token", "ratio", 0.2, 2.0),
        ("seq_sum_k1", "0.5_2.0", "seq_sum", "ratio", 0.5, 2.0),
        ("seq_mean_k1", "0.25_4", "seq_mean", "ratio", 0.25, 4.0),
        # One bound u is [1/u, u], the same in either direction.
        ("token_k1", 4.0, "token", "ratio", 0.25, 4.0),
        ("seq_mean_ratio", 4, "seq_mean", "ratio", 0.25, 4.0),
        # Our own name bounds rho as written.
        ("token_ratio", "0.5_5.0", "token", "ratio", 0.5, 5.0),
        ("token_k2", 0.5, "token", "k2", None, 0.5),
        ("seq_sum_k3", "1e-2", "seq_sum", "k3", None, 0.01),
        ("seq_max_k2", 3, "seq_max", "k2", None, 3.0),
        ("seq_mean_k3", 0.01, "seq_mean", "k3", None, 0.01),
        ("turn_mean_k1", "0.5_5.0", "turn_mean", "ratio", 0.2, 2.0),
        ("turn_mean_k2", 0.5, "turn_mean", "k2", None, 0.5),
        # Every token's rho in the bounds.
        ("seq_max_ratio", "0.1_5.0", "seq_max", "ratio", 0.1, 5.0),
        ("seq_sum_abs_diff", 1.5, "seq_sum", "abs_diff", None, 1.5),
        ("seq_mean_exp_abs", 1.5, "seq_mean", "exp_abs", None, 1.5),
        ("token_rollout_prob", 1e-4, "token", "rollout_prob", 1e-4, None),
        ("seq_mean_opsm", 1e-4, "seq_mean", "opsm", None, 1e-4),
    ],
)
def test_rollout_rs_when_named_as_verl_does_then_bounds_on_rho(
    name, threshold, level, divergence, lower, upper
):
    config = from_dict({"rollout_rs": name, "rollout_rs_threshold": threshold})
    assert config.rollout_rs == (RejectionRule(level, divergence, lower, upper),)


def test_rollout_rs_when_a_list_then_a_threshold_each_or_one_for_all():
    one_each = from_dict({"rollout_rs": "token_k1, seq_mean_k3", "rollout_rs_threshold": "0.5_5.0, 0.01"})
    assert one_each.rollout_rs == (
        RejectionRule("token", "ratio", 0.2, 2.0),
        RejectionRule("seq_mean", "k3", upper=0.01),
    )
    shared = from_dict({"rollout_rs": "token_k2,seq_max_k3,seq_sum_k1", "rollout_rs_threshold": 2.0})
    assert shared.rollout_rs == (
        RejectionRule("token", "k2", upper=2.0),
        RejectionRule("seq_max", "k3", upper=2.0),
        RejectionRule("seq_sum", "ratio", 0.5, 2.0),
    )


@pytest.mark.parametrize(
    "preset, verl",
    [
        ("decoupled_token_is", {"rollout_is": "token", "rollout_is_threshold": 2.0}),
        ("decoupled_seq_is", {"rollout_is": "sequence", "rollout_is_threshold": 2.0}),
        ("decoupled_token_icepop", {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}),
        (
            "decoupled_seq_is_rs",
            {
                "rollout_is": "sequence",
                "rollout_is_threshold": 2.0,
                "rollout_rs": "seq_sum_k1",
                "rollout_rs_threshold": "0.5_2.0",
            },
        ),
        ("decoupled_geo_rs", {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}),
        (
            "decoupled_geo_rs_seq_tis",
            {
                "rollout_is": "sequence",
                "rollout_is_threshold": 2.0,
                "rollout_rs": "seq_mean_k1",
                "rollout_rs_threshold": "0.999_1.001",
            },
        ),
        (
            "decoupled_geo_rs_token_tis",
            {
                "rollout_is": "token",
                "rollout_is_threshold": 2.0,
                "rollout_rs": "seq_mean_k1",
                "rollout_rs_threshold": "0.999_1.001",
            },
        ),
        ("decoupled_k3_rs", {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}),
        (
            "decoupled_k3_rs_seq_tis",
            {
                "rollout_is": "sequence",
                "rollout_is_threshold": 2.0,
                "rollout_rs": "seq_mean_k3",
                "rollout_rs_threshold": 0.01,
            },
        ),
        (
            "decoupled_k3_rs_token_tis",
            {
                "rollout_is": "token",
                "rollout_is_threshold": 2.0,
                "rollout_rs": "seq_mean_k3",
                "rollout_rs_threshold": 0.01,
            },
        ),
        ("disabled", {}),
    ],
)
def test_preset_when_taken_then_what_verls_values_of_it_mean(preset, verl):
    assert RolloutCorrectionConfig.from_preset(preset) == from_dict(verl) == from_dict({"preset": preset})


def test_presets_when_listed_then_all_are_frozen_and_seven_have_neither_weights_nor_rules():
    without = [name for name, config in PRESETS.items() if not config.changes_gradient]
    assert without == [
        "disabled",
        "bypass_ppo_clip",
        "slime_rollout_logprobs",
        "prime_rl",
        "dppo_binary_kl",
        "sapo",
        "dro",
    ]
    for config in PRESETS.values():
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.rollout_is = "token"
        for rule in config.rollout_rs:
            with pytest.raises(dataclasses.FrozenInstanceError):
                rule.upper = 3.0


@pytest.mark.parametrize(
    "key, flag, value, rule",
    [
        (
            "rollout_token_veto_threshold",
            "--rollout-token-veto-threshold",
            "1e-4",
            RejectionRule("seq_max", "ratio", 1e-4, 1e4),
        ),
        ("rollout_opsm_delta", "--rollout-opsm-delta", 2e-4, RejectionRule("seq_mean", "opsm", upper=2e-4)),
        ("opsm_delta", "--rollout-opsm-delta", 2e-4, RejectionRule("seq_mean", "opsm", upper=2e-4)),
        (
            "off_policy_sequence_mask_delta",
            "--rollout-opsm-delta",
            0.5,
            RejectionRule("seq_mean", "opsm", upper=0.5),
        ),
        ("rollout_min_prob", "--rollout-min-prob", 1e-3, RejectionRule("token", "rollout_prob", lower=1e-3)),
    ],
)
def test_shorthand_of_a_rule_when_given_then_the_rule_joins_the_others(key, flag, value, rule):
    geo = PRESETS["decoupled_geo_rs"]
    both = dataclasses.replace(geo, rollout_rs=(*geo.rollout_rs, rule))
    assert from_dict({"preset": "decoupled_geo_rs", key: value}) == both
    assert from_flags("--rollout-correction-preset", "decoupled_geo_rs", flag, str(value)) == both
    # A second value takes the first one's place; none takes it away, and null, as a peer writes
    # it, adds nothing.
    name = rule.name if rule.name != "seq_max_ratio" else "seq_mean_exp_abs"
    old = {"rollout_rs": name, "rollout_rs_threshold": 1.01 if "exp" in name else 0.9}
    assert rule in from_dict({**old, key: value}).rollout_rs
    assert from_dict({key: None}) == RolloutCorrectionConfig()


def test_shorthand_when_none_then_a_presets_rule_goes(tmp_path):
    path = tmp_path / "correction.yaml"
    path.write_text("rollout_token_veto_threshold: 1e-4\nrollout_min_prob: 1e-3\n")
    yaml = ("--rollout-correction-config", str(path))
    assert [rule.name for rule in from_flags(*yaml).rollout_rs] == ["seq_max_ratio", "token_rollout_prob"]
    assert from_flags(
        *yaml, "--rollout-token-veto-threshold", "none", "--rollout-min-prob", "0.01"
    ).rollout_rs == (RejectionRule("token", "rollout_prob", lower=0.01),)


def test_mask_when_one_sided_then_allowed_since_nothing_lies_below_zero():
    assert from_dict({"rollout_is": "token", "rollout_is_mode": "mask", "rollout_is_threshold": 2.0}) == (
        RolloutCorrectionConfig(rollout_is="token", rollout_is_mode="mask", rollout_is_upper=2.0)
    )


@pytest.mark.parametrize(
    "settings, clip, aggregation, advantage",
    [
        ({}, (0.2, 0.2), "token-mean", "grpo"),
        ({"loss": "grpo"}, (0.2, 0.2), "seq-mean-token-mean", "grpo"),
        ({"loss": "dr_grpo", "loss_scale_length": 9}, (0.2, 0.2), "seq-mean-token-sum-norm", "group_mean"),
        ({"loss": "dapo"}, (0.2, 0.28), "token-mean", "grpo"),
        ({"loss": "gspo"}, (3e-4, 4e-4), "seq-mean-token-mean", "grpo"),
        ({"loss": "rloo"}, None, "seq-mean-token-sum", "rloo"),
        (
            {"loss": "gspo", "clip_ratio_high": 1e-3, "loss_aggregation": "token-mean", "advantage": "raw"},
            (3e-4, 1e-3),
            "token-mean",
            "raw",
        ),
    ],
)
def test_loss_when_named_then_brings_its_own_clip_aggregation_and_advantage(
    settings, clip, aggregation, advantage
):
    config = from_dict(settings)
    assert clip is None or config.clip == clip
    assert (config.aggregation, config.advantage_kind) == (aggregation, advantage)


# The same from every source

EVERYTHING = RolloutCorrectionConfig(
    rollout_is="geometric",
    rollout_is_mode="clip",
    rollout_is_lower=0.25,
    rollout_is_upper=4.0,
    rollout_is_batch_normalize=True,
    rollout_rs=(RejectionRule("token", "ratio", 0.2, 2.0), RejectionRule("seq_max", "k3", upper=1.5)),
    rollout_m2_threshold=0.04,
    rollout_batch_filter_kl=0.01,
    diagnostics_only=True,
    loss="dapo",
    clip_ratio_low=0.1,
    clip_ratio_high=0.3,
    clip_ratio_c=None,
    loss_aggregation="seq-mean-token-sum-norm",
    loss_scale_length=512.0,
    loss_denominator="kept",
    clip_sat_tail=3.0,
    entropy_coef=1e-3,
    advantage="group_mean",
    kl_loss_coef=0.01,
    kl_loss_type="k3+",
    kl_reward_coef=0.02,
    kl_reward_type="k2",
    sampler_kl_coef=0.03,
    sampler_kl_type="k3",
    distill_coef=0.5,
    distill_top_k=8,
)
YAML_OURS = """
rollout_is: geometric
rollout_is_mode: clip
rollout_is_lower: 0.25
rollout_is_upper: 4
rollout_is_batch_normalize: true
rollout_rs:
  - {level: token, divergence: ratio, lower: 0.2, upper: 2.0}
  - {level: seq_max, divergence: k3, upper: 15e-1}
rollout_m2_threshold: 0.04
rollout_batch_filter_kl: 1e-2
diagnostics_only: true
loss: dapo
clip_ratio_low: 1e-1
clip_ratio_high: 0.3
clip_ratio_c: null
loss_aggregation: seq-mean-token-sum-norm
loss_scale_length: 512
loss_denominator: kept
clip_sat_tail: 3
entropy_coef: 1e-3
advantage: group_mean
kl_loss_coef: 1e-2
kl_loss_type: k3+
kl_reward_coef: 0.02
kl_reward_type: k2
sampler_kl_coef: 0.03
sampler_kl_type: k3
distill_coef: 0.5
distill_top_k: 8
"""
YAML_MIXED = """
rollout_correction:
  rollout_is: geometric
  rollout_is_mode: clip
  rollout_is_threshold: 0.25_4
  rollout_is_batch_normalize: true
  rollout_rs: [token_k1, seq_max_k3]
  rollout_rs_threshold: [0.5_5, 1.5]
  rollout_m2_threshold: 0.04
  rollout_batch_filter_kl: 0.01
  diagnostics_only: true
  loss_type: dapo
  bypass_mode: false
  clip_ratio_low: 0.1
  clip_ratio_high: 0.3
  clip_ratio_c: none
  loss_agg_mode: seq-mean-token-sum-norm
  loss_scale_factor: 512
  loss_denominator: kept
  clip_sat_tail: 3.0
  entropy_coeff: 0.001
  advantage: group_mean
  reference_policy_kl_penalty: 0.01
  reference_policy_kl_type: low_var_kl+
  kl_reward_coef: 0.02
  kl_reward_type: k2
  sampler_kl_coef: 0.03
  sampler_kl_type: k3
  distill_coef: 0.5
  distill_top_k: 8
"""
FLAGS = (
    "--rollout-is",
    "geometric",
    "--rollout-is-mode",
    "clip",
    "--rollout-is-threshold",
    "0.25_4",
    "--rollout-is-batch-normalize",
    "--rollout-rs",
    "token_k1,seq_max_k3",
    "--rollout-rs-threshold",
    "0.5_5,1.5",
    "--rollout-m2-threshold",
    "0.04",
    "--rollout-batch-filter-kl",
    "0.01",
    "--rollout-diagnostics-only",
    "--rollout-loss",
    "dapo",
    "--rollout-clip-ratio-low",
    "0.1",
    "--rollout-clip-ratio-high",
    "0.3",
    "--rollout-clip-ratio-c",
    "none",
    "--rollout-loss-aggregation",
    "seq-mean-token-sum-norm",
    "--rollout-loss-scale-length",
    "512",
    "--rollout-loss-denominator",
    "kept",
    "--rollout-clip-sat-tail",
    "3",
    "--rollout-entropy-coef",
    "0.001",
    "--rollout-advantage",
    "group_mean",
    "--rollout-kl-loss-coef",
    "0.01",
    "--rollout-kl-loss-type",
    "k3+",
    "--rollout-kl-reward-coef",
    "0.02",
    "--rollout-kl-reward-type",
    "k2",
    "--rollout-sampler-kl-coef",
    "0.03",
    "--rollout-sampler-kl-type",
    "k3",
    "--rollout-distill-coef",
    "0.5",
    "--rollout-distill-top-k",
    "8",
)


def test_every_field_when_set_from_yaml_flags_or_python_then_one_configuration(tmp_path):
    # No field may keep its default here, or the comparison would say nothing about it.
    default = dataclasses.asdict(RolloutCorrectionConfig())
    same = [name for name, value in dataclasses.asdict(EVERYTHING).items() if default[name] == value]
    # Two policies exclude what needs the whole batch; the others are of other losses than dapo.
    assert same == ["sapo_temperature_pos", "sapo_temperature_neg", "dro_beta", "bypass_mode"]
    assert from_yaml(tmp_path, YAML_OURS) == EVERYTHING
    assert from_yaml(tmp_path, YAML_MIXED) == EVERYTHING
    assert from_flags(*FLAGS) == EVERYTHING
    as_mapping = dataclasses.asdict(EVERYTHING)
    assert from_dict(as_mapping) == EVERYTHING
    assert from_dict(as_mapping | {"rollout_rs": EVERYTHING.rollout_rs}) == EVERYTHING


@pytest.mark.parametrize(
    "yaml, flags, expected",
    [
        (
            "loss: sapo\nsapo_temperature_pos: 0.5\nsapo_temperature_neg: 2",
            (
                "--rollout-loss",
                "sapo",
                "--rollout-sapo-temperature-pos",
                "0.5",
                "--rollout-sapo-temperature-neg",
                "2",
            ),
            {"loss": "sapo", "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0},
        ),
        (
            "loss: dro\ndro_beta: 0.05",
            ("--rollout-loss", "dro", "--rollout-dro-beta", "0.05"),
            {"loss": "dro", "dro_beta": 0.05},
        ),
        (
            "rollout_is: sequence\nrollout_is_mode: gamma",
            ("--rollout-is", "sequence", "--rollout-is-mode", "gamma"),
            {"rollout_is": "sequence", "rollout_is_mode": "gamma"},
        ),
    ],
)
def test_settings_of_one_loss_or_weight_when_set_from_yaml_flags_or_python_then_one_configuration(
    yaml, flags, expected, tmp_path
):
    assert from_yaml(tmp_path, yaml) == from_flags(*flags) == RolloutCorrectionConfig(**expected)


GAMMA = {"rollout_is": "sequence", "rollout_is_mode": "gamma"}


def test_gamma_when_laid_over_bounds_or_bounds_over_it_then_the_last_one_counts():
    gamma = RolloutCorrectionConfig(**GAMMA)
    assert PRESETS["decoupled_seq_is"].with_settings({"rollout_is_mode": "gamma"}) == gamma
    for threshold, mode in (("3", "truncate"), ("0.5_3", "mask")):
        assert gamma.with_settings({"rollout_is_threshold": threshold}).rollout_is_mode == mode
    truncated = gamma.with_settings({"rollout_is_mode": "truncate"})
    assert (truncated.rollout_is_mode, truncated.rollout_is_upper) == ("truncate", 2.0)
    assert gamma.with_settings({"rollout_is": "none"}) == RolloutCorrectionConfig()


@pytest.mark.parametrize("text", ["", "rollout_correction:\n", "{}", "# nothing\n"])
def test_from_yaml_when_nothing_is_set_then_the_defaults(tmp_path, text):
    assert from_yaml(tmp_path, text) == RolloutCorrectionConfig()


def test_from_yaml_when_a_threshold_looks_like_one_number_then_it_is_still_two_bounds(tmp_path):
    # YAML 1.1 reads 1_5 as the number 15 and 0.5_5 as 0.55.
    config = from_yaml(tmp_path, "rollout_is: token\nrollout_is_threshold: 1_5\n")
    assert (config.rollout_is_lower, config.rollout_is_upper) == (1.0, 5.0)


def test_flags_when_over_a_preset_then_only_what_they_name_changes():
    base = PRESETS["decoupled_geo_rs_token_tis"]
    assert from_flags("--rollout-correction-preset", "decoupled_geo_rs_token_tis") == base
    assert from_flags(
        "--rollout-correction-preset", "decoupled_geo_rs_token_tis", "--rollout-is", "sequence"
    ) == dataclasses.replace(base, rollout_is="sequence")
    assert from_flags(
        "--rollout-correction-preset", "decoupled_geo_rs_token_tis", "--rollout-is-threshold", "3"
    ) == dataclasses.replace(base, rollout_is_upper=3.0)
    assert (
        from_flags("--rollout-correction-preset", "decoupled_geo_rs_token_tis", "--rollout-rs", "none")
        == PRESETS["decoupled_token_is"]
    )


def test_flags_when_weights_are_turned_off_then_the_presets_bounds_go_too():
    flags = ("--rollout-correction-preset", "decoupled_token_icepop", "--rollout-is", "none")
    assert from_flags(*flags) == RolloutCorrectionConfig()
    assert "has no effect with `rollout_is` none" in message_of(
        from_flags, *flags, "--rollout-is-threshold", "3"
    )


def test_flags_when_over_yaml_then_they_win(tmp_path):
    path = tmp_path / "correction.yaml"
    path.write_text(YAML_OURS)
    yaml = ("--rollout-correction-config", str(path))
    assert from_flags(*yaml, "--rollout-clip-ratio-high", "0.28") == dataclasses.replace(
        EVERYTHING, clip_ratio_high=0.28
    )
    assert from_flags(*yaml, "--no-rollout-is-batch-normalize") == dataclasses.replace(
        EVERYTHING, rollout_is_batch_normalize=False
    )
    # The file's mode stays where it can: new bounds for a clip are not a mask.
    assert from_flags(*yaml, "--rollout-is-threshold", "0.5_3") == dataclasses.replace(
        EVERYTHING, rollout_is_lower=0.5, rollout_is_upper=3.0
    )


def test_flags_when_they_name_the_level_that_yaml_left_out_then_the_files_threshold_counts(tmp_path):
    path = tmp_path / "correction.yaml"
    path.write_text("rollout_is: null\nrollout_is_threshold: 5.0\n")
    yaml = ("--rollout-correction-config", str(path))
    assert from_flags(*yaml) == RolloutCorrectionConfig()
    assert from_flags(*yaml, "--rollout-is", "token") == RolloutCorrectionConfig(
        rollout_is="token", rollout_is_upper=5.0
    )


# What is refused, and in which words


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"rollout_is": "token", "rollout_is_threshold": -1},
            "`rollout_is_threshold` upper bound must be positive, got -1; "
            "use `rollout_is` none to disable the weights",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0_2"},
            "`rollout_is_threshold` lower bound must be positive, got 0; "
            "use a small one, such as 1e-9, to keep everything below",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": "5.0_0.5"},
            "`rollout_is_threshold` lower bound 5 is above the upper bound 0.5; swap them",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": "nan"},
            "`rollout_is_threshold` upper bound must be positive, got nan; "
            "use `rollout_is` none to disable the weights",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": "inf"},
            "`rollout_is_threshold` upper bound must be finite, got inf; "
            "use `rollout_is` none to disable the weights",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": "low_high"},
            "`rollout_is_threshold` must be a number or LOWER_UPPER such as 0.5_5.0, got 'low_high'",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": "1_2_3"},
            "`rollout_is_threshold` must be a number or LOWER_UPPER such as 0.5_5.0, got '1_2_3'",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": True},
            "`rollout_is_threshold` must be a number or LOWER_UPPER, got True",
        ),
        (
            {"rollout_is": "token", "rollout_is_upper": "2.0"},
            "`rollout_is_upper` must be a number, got '2.0'",
        ),
        (
            {"rollout_is": "tokens"},
            "`rollout_is` must be one of token, sequence, geometric, turn, none; got 'tokens'; "
            "did you mean 'token'?",
        ),
        (
            {"rollout_is": "token", "rollout_is_mode": "icepop"},
            "`rollout_is_mode` must be one of truncate, clip, mask, gamma; got 'icepop'",
        ),
        (
            {"rollout_is": "token", "rollout_is_batch_normalize": "false"},
            "`rollout_is_batch_normalize` must be true or false, got 'false'",
        ),
        (
            {"rollout_rs": "token_k4", "rollout_rs_threshold": 1},
            "`rollout_rs`: unknown rule 'token_k4'; did you mean 'token_k3'?",
        ),
        (
            {"rollout_rs": "token_k1"},
            "`rollout_rs` token_k1 needs `rollout_rs_threshold`, one bound a rule or one for all",
        ),
        (
            {"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2.0,0.5"},
            "`rollout_rs_threshold` gives 2 bounds for 3 rules (token_k1,token_k2,token_k3); "
            "give one for all or one a rule, separated by commas",
        ),
        (
            {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": -0.5},
            "`rollout_rs_threshold` for seq_mean_k3 upper bound must be positive, got -0.5; "
            "use `rollout_rs` none to disable rejection",
        ),
        (
            {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.5"},
            "`rollout_rs_threshold` for token_k2 takes one upper bound, got a lower bound of 0.1: "
            "it is 0 where the policies agree; leave the lower bound out",
        ),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5},
            "`rollout_rs_threshold` for token_k1: one bound means [1/0.5, 0.5], so it must be at least 1; "
            "got 0.5",
        ),
        (
            {"rollout_rs": "seq_mean_k1,seq_mean_ratio", "rollout_rs_threshold": 2},
            "`rollout_rs` names seq_mean_ratio twice; give each rule once, with one pair of bounds",
        ),
        (
            {"rollout_rs": " , ", "rollout_rs_threshold": 2},
            "`rollout_rs` ' , ' names no rule; use `rollout_rs` none to disable rejection",
        ),
        ({"rollout_rs": 3}, "`rollout_rs` must name rules, or be none; got 3"),
        ({"rollout_rs": [3]}, "`rollout_rs`: a rule is a name or a mapping of its fields, got 3"),
        (
            {"rollout_rs": [{"level": "token", "divergence": "k2", "uper": 1.0}]},
            "`rollout_rs`: unknown key 'uper' of a rule; did you mean 'upper'?",
        ),
        (
            {"rollout_rs": [{"level": "token", "upper": 1.0}]},
            "`rollout_rs`: the rule {'level': 'token', 'upper': 1.0} lacks 'divergence'",
        ),
        (
            {"rollout_is": "token", "rollout_is_mode": "gamma"},
            "`rollout_is_mode` gamma weighs whole sequences by the product of their ratios, got "
            "`rollout_is` token; use `rollout_is` sequence, or another mode",
        ),
        (
            GAMMA | {"rollout_is_upper": 2.0},
            "`rollout_is_upper` 2 has no effect with `rollout_is_mode` gamma, whose weights are at most "
            "1.25 without a bound; drop it, and `rollout_is_threshold`, or use another mode",
        ),
        (
            GAMMA | {"rollout_is_threshold": "0.5_2"},
            "`rollout_is_lower` 0.5 has no effect with `rollout_is_mode` gamma, whose weights are at most "
            "1.25 without a bound; drop it, and `rollout_is_threshold`, or use another mode",
        ),
        (
            GAMMA | {"bypass_mode": True, "loss": "sapo"},
            "`rollout_is` sequence in bypass mode would weigh twice: the ratio of `loss` sapo is pi_theta / "
            "pi_rollout already; use `rollout_is` none, or `loss` reinforce",
        ),
        (
            {"sapo_temperature_neg": 2.0},
            "`sapo_temperature_neg` 2 has no effect without `loss` sapo; drop it, or add `loss` sapo",
        ),
        (
            {"loss": "sapo", "sapo_temperature_pos": 0},
            "`sapo_temperature_pos` must be positive, got 0; 1 is usual",
        ),
        (
            {"loss": "dro"},
            "`loss` dro needs `dro_beta`, the strength of its pull to pi_old; use 0.05, for example, and "
            "with it several updates a batch (`updates_per_batch`) or `bypass_mode`, since with one update "
            "pi_old is the policy itself",
        ),
        (
            {"loss": "gspo", "clip_sat_tail": 3},
            "`clip_sat_tail` 3 shrinks the interval of PPO's clip, which `loss` gspo does not have; use "
            "`loss` ppo_clip, grpo, dr_grpo or dapo, or drop it",
        ),
        (
            {"clip_sat_tail": 3, "bypass_mode": True},
            "`clip_sat_tail` needs the whole batch, but bypass mode corrects one microbatch at a time, in "
            "the loss; drop it, or `bypass_mode`",
        ),
        ({"clip_sat_tail": 0}, "`clip_sat_tail` must be positive, got 0; 3 is a start"),
        ({"dro_beta": 0.1}, "`dro_beta` 0.1 has no effect without `loss` dro; drop it, or add `loss` dro"),
        (
            {"loss": "dro", "dro_beta": 0.1, "clip_ratio_high": 0.2},
            "`clip_ratio_high` has no effect with `loss` dro, which does not clip; drop it, or use `loss` "
            "ppo_clip",
        ),
        (
            {"loss": "ppo"},
            "`loss` must be one of ppo_clip, grpo, dr_grpo, dapo, gspo, cispo, dppo_tv, dppo_kl, "
            "sapo, dro, reinforce, rloo, FILE.py:NAME; got 'ppo'; did you mean 'dppo_tv'?",
        ),
        (
            {"loss_type": "reinforced"},
            "`loss` must be one of ppo_clip, grpo, dr_grpo, dapo, gspo, cispo, dppo_tv, dppo_kl, "
            "sapo, dro, reinforce, rloo, FILE.py:NAME; got 'reinforced'; did you mean 'reinforce'?",
        ),
        (
            {"loss_denominator": "keep"},
            "`loss_denominator` must be one of valid, kept; got 'keep'; did you mean 'kept'?",
        ),
        (
            {"advantage": "gae"},
            "`advantage` must be one of grpo, group_mean, rloo, raw, batch_mean, reinforce_plus_plus, "
            "reinforce_plus_plus_baseline, otb, FILE.py:NAME; got 'gae'",
        ),
        (
            {"advantage": "otb", "bypass_mode": True},
            "`advantage` otb needs the distributions of pi_old, of a pass that `bypass_mode` leaves out; "
            "drop that, or use `advantage` group_mean",
        ),
        (
            {"advantage": "otb", "rollout_opsm_delta": 1e-4},
            "seq_mean_opsm needs the advantage of a whole response before the correction, and `advantage` "
            "otb gives one a token, from the corrected weights; drop one of them",
        ),
        (
            {"advantage": "otb", "rollout_is": "sequence", "rollout_is_mode": "gamma"},
            "rollout_is_mode gamma needs the advantage of a whole response before the correction, and "
            "`advantage` otb gives one a token, from the corrected weights; drop one of them",
        ),
        ({"clip_ratio_low": 1.5}, "`clip_ratio_low` must be in (0, 1], got 1.5; 0.2 is usual for ppo_clip"),
        (
            {"clip_ratio_high": 0},
            "`clip_ratio_high` must be positive and finite, got 0; 0.2 is usual for ppo_clip",
        ),
        (
            {"clip_ratio_high": "0.2"},
            "`clip_ratio_high` must be a number, got '0.2'",
        ),
        (
            {"clip_ratio_high": float("inf")},
            "`clip_ratio_high` must be positive and finite, got inf; 0.2 is usual for ppo_clip",
        ),
        ({"bypass_mode": "yes"}, "`bypass_mode` must be true or false, got 'yes'"),
        ({"clip_ratio_c": 1.0}, "`clip_ratio_c` must be above 1, got 1; 3 is usual, none turns it off"),
        (
            {"rollout_m2_threshold": 0},
            "`rollout_m2_threshold` must be positive, got 0; 0.04 is usual",
        ),
        (
            {"rollout_batch_filter_kl": float("inf")},
            "`rollout_batch_filter_kl` must be finite, got inf; use 1e-2, for example",
        ),
        (
            {"entropy_coef": -0.1},
            "`entropy_coef` must be at least 0, got -0.1; 0 turns it off",
        ),
        (
            {"rollout_rs": "seq_mean_exp_abs", "rollout_rs_threshold": 0.9},
            "`rollout_rs_threshold` for seq_mean_exp_abs must be at least 1, got 0.9: e^|D| is never below "
            "1; NeMo-RL uses 1.5",
        ),
        (
            {"rollout_rs": "token_rollout_prob", "rollout_rs_threshold": "0.1_0.5"},
            "`rollout_rs_threshold` for token_rollout_prob takes one lower bound, got an upper bound of "
            "0.5: it drops the tokens that the server found improbable; leave the upper bound out",
        ),
        (
            {"rollout_min_prob": 1},
            "`rollout_rs_threshold` for token_rollout_prob must be a probability below 1, got 1; 1e-4 is "
            "usual",
        ),
        (
            {"rollout_rs": "token_abs_diff", "rollout_rs_threshold": 1},
            "`rollout_rs_threshold` for token_abs_diff must be below 1, got 1: a difference of "
            "probabilities is never above it; use 0.2, for example",
        ),
        (
            {"rollout_token_veto_threshold": 2},
            "`rollout_token_veto_threshold` 2 means rho in [2, 1 / 2], so it must be below 1; 1e-4 is usual",
        ),
        (
            {"opsm_delta": "0.1_0.2"},
            "`rollout_opsm_delta` takes one number, got '0.1_0.2'; 1e-4 is usual",
        ),
        (
            {"off_policy_sequence_mask_delta": -1},
            "`rollout_opsm_delta` must be positive, got -1; use none to turn it off",
        ),
        ({"rollout_iss": "token"}, "unknown key 'rollout_iss'; did you mean 'rollout_is'?"),
        ({"losstype": "ppo_clip"}, "unknown key 'losstype'; did you mean 'loss_type'?"),
        (
            {"preset": "decoupled_token"},
            "`rollout_correction_preset`: unknown preset 'decoupled_token'; "
            "did you mean 'decoupled_token_is'?",
        ),
    ],
)
def test_setting_when_wrong_then_flag_rule_value_and_remedy(settings, words):
    assert message_of(from_dict, settings) == words


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"rollout_is_batch_normalize": True}, NO_EFFECT_WITHOUT_WEIGHTS),
        ({"rollout_is_mode": "mask"}, NO_EFFECT_WITHOUT_WEIGHTS),
        ({"rollout_is": "none", "rollout_is_upper": 2.0}, NO_EFFECT_WITHOUT_WEIGHTS),
        (
            {"rollout_is": "token", "rollout_is_lower": 0.5, "rollout_is_upper": 2.0},
            "`rollout_is_threshold` lower bound 0.5 has no effect with `rollout_is_mode` truncate; "
            "use `rollout_is_mode` clip or mask, or give the upper bound alone",
        ),
        (
            {"rollout_is": "token", "rollout_is_mode": "clip", "rollout_is_threshold": 2.0},
            "`rollout_is_mode` clip needs both bounds, got only upper 2; "
            "give `rollout_is_threshold` as LOWER_UPPER, for example 0.5_5.0",
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_upper": 3.0},
            "`rollout_is_threshold` and `rollout_is_upper` both bound the weight; give one of them",
        ),
        (
            {"rollout_rs_threshold": 2.0},
            "`rollout_rs_threshold` 2.0 has no effect without `rollout_rs`; name the rules that it bounds",
        ),
        (
            {"rollout_rs": None, "rollout_rs_threshold": 2.0},
            "`rollout_rs_threshold` 2.0 has no effect without `rollout_rs`; name the rules that it bounds",
        ),
        (
            {"rollout_rs": [RejectionRule("token", "k2", upper=1.0)], "rollout_rs_threshold": 2.0},
            "`rollout_rs_threshold` 2.0 has no effect without `rollout_rs`; name the rules that it bounds",
        ),
        (
            {"loss": "reinforce", "clip_ratio_low": 0.2},
            "`clip_ratio_low` has no effect with `loss` reinforce, which does not clip; drop it, or "
            "use `loss` ppo_clip",
        ),
        (
            {"loss": "gspo", "clip_ratio_c": 4},
            "`clip_ratio_c` has no effect with `loss` gspo; drop it",
        ),
        (
            {"loss_scale_length": 512},
            "`loss_scale_length` has no effect with `loss_aggregation` token-mean; use "
            "seq-mean-token-sum-norm, or drop it",
        ),
        (
            {"loss": "dr_grpo"},
            "`loss_aggregation` seq-mean-token-sum-norm needs `loss_scale_length`; use the longest "
            "response, the value of `max_new_tokens`",
        ),
        (
            {"kl_loss_type": "k1"},
            "`kl_loss_type` k1 has no effect without `kl_loss_coef`; drop it, or add `kl_loss_coef`",
        ),
        (
            {"bypass_mode": True, "rollout_is": "token"},
            "`rollout_is` token in bypass mode would weigh twice: the ratio of `loss` ppo_clip is pi_theta / "
            "pi_rollout already; use `rollout_is` none, or `loss` reinforce",
        ),
        (
            {
                "bypass_mode": True,
                "loss": "reinforce",
                "rollout_is": "token",
                "rollout_is_batch_normalize": True,
            },
            "`rollout_is_batch_normalize` needs the whole batch, but bypass mode corrects one microbatch at "
            "a time, in the loss; drop it, or `bypass_mode`",
        ),
        *[
            (
                {"bypass_mode": True, **setting},
                f"{flag} needs the whole batch, but bypass mode corrects one microbatch at a time, in the "
                "loss; drop it, or `bypass_mode`",
            )
            for flag, setting in [
                ("`loss_denominator` kept", {"loss_denominator": "kept"}),
                ("`rollout_m2_threshold`", {"rollout_m2_threshold": 0.04}),
                ("`rollout_batch_filter_kl`", {"rollout_batch_filter_kl": 0.01}),
            ]
        ],
        (
            {"loss": "ppo_clip", "loss_type": "ppo_clip"},
            "loss and loss_type (verl's name) are the same setting; give one of them",
        ),
    ],
)
def test_settings_when_one_would_have_no_effect_then_refused(settings, words):
    assert message_of(from_dict, settings) == words


def test_flags_when_a_threshold_has_no_weights_to_bound_then_refused():
    assert message_of(from_flags, "--rollout-is-threshold", "3") == (
        "`rollout_is_threshold` 3 has no effect without weights; add `rollout_is` token, or drop it"
    )


def test_flags_when_a_preset_and_a_file_both_start_then_refused(tmp_path):
    words = message_of(
        from_flags, "--rollout-correction-preset", "disabled", "--rollout-correction-config", "x.yaml"
    )
    assert words == (
        "`rollout_correction_preset` and `rollout_correction_config` both start a configuration; "
        "give one (a YAML file may name a preset under the key `preset`)"
    )


@pytest.mark.parametrize(
    "level, divergence, lower, upper, words",
    [
        ("token", "opsm", None, 2.0, "`rollout_rs` token_opsm does not exist; use seq_mean_opsm"),
        (
            "token",
            "routing",
            0.1,
            0.5,
            "`rollout_rs_threshold` for token_routing takes one upper bound, got a lower bound of "
            "0.1: it is 0 where both sides route alike; leave the lower bound out",
        ),
        (
            "token",
            "routing",
            None,
            1.0,
            "`rollout_rs_threshold` for token_routing must be a share below 1, got 1; use 0.5, for example",
        ),
        ("token", "k2", None, None, "`rollout_rs` token_k2 needs a bound; give `rollout_rs_threshold`"),
        (
            "tokn",
            "k2",
            None,
            1.0,
            "`rollout_rs` level must be one of token, seq_sum, seq_mean, seq_max, turn_mean; got 'tokn'; "
            "did you mean 'token'?",
        ),
        (
            "token",
            "k1",
            None,
            1.0,
            "`rollout_rs` divergence must be one of ratio, k2, k3, abs_diff, exp_abs, rollout_prob, opsm, "
            "binary_kl, vaco, routing; got 'k1'",
        ),
    ],
)
def test_rule_when_made_in_python_and_wrong_then_the_same_words(level, divergence, lower, upper, words):
    assert message_of(RejectionRule, level, divergence, lower, upper) == words


def test_rule_when_one_sided_then_allowed_in_python():
    assert RejectionRule("token", "ratio", upper=2.0).name == "token_ratio"


def test_python_when_rules_are_names_then_refused():
    assert message_of(RolloutCorrectionConfig, rollout_rs=("token_k1",)) == (
        "`rollout_rs` takes RejectionRule objects, got 'token_k1'; from_dict takes their names"
    )
    assert message_of(RolloutCorrectionConfig, rollout_is="token") == (
        "`rollout_is` token needs `rollout_is_threshold`; 2.0 is usual"
    )


@pytest.mark.parametrize(
    "text, words",
    [
        ("- token\n", "must hold a mapping of settings, got list"),
        ("rollout_is: [token\n", "is not YAML: "),
        (
            "rollout_is: token\nrollout_is_treshold: 3\n",
            ": unknown key 'rollout_is_treshold'; did you mean 'rollout_is_threshold'?",
        ),
        (
            "rollout_is: token\nrollout_is_threshold: -1\n",
            ": `rollout_is_threshold` upper bound must be positive, got -1; ",
        ),
        ("!!python/object/apply:os.getcwd []\n", "is not YAML: could not determine a constructor"),
    ],
)
def test_from_yaml_when_the_file_is_wrong_then_its_name_and_the_reason(tmp_path, text, words):
    start = re.escape(f"`rollout_correction_config` {tmp_path / 'correction.yaml'}")
    assert re.match(f"{start} ?{re.escape(words)}", message_of(from_yaml, tmp_path, text))


def test_from_yaml_when_there_is_no_file_then_an_error_with_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        RolloutCorrectionConfig.from_yaml(str(tmp_path / "nowhere.yaml"))


@pytest.mark.parametrize("bounds", [{"lower": 1.5, "upper": 3.0}, {"upper": 0.9}, {"lower": 2.0}])
def test_veto_when_agreement_itself_is_out_of_bounds_then_refused(bounds):
    assert "seq_max_ratio must hold 1 between its bounds" in message_of(
        RejectionRule, "seq_max", "ratio", **bounds
    )
    assert RejectionRule("seq_max", "ratio", lower=1e-4).upper is None  # one side alone is a veto too
