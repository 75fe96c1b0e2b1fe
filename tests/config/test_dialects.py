"""Peers' keys and values mean what they mean there: ms-swift's, slime's and NeMo-RL's."""

import pytest

from megatron_rl_corr.config.correction import PRESETS, RejectionRule, RolloutCorrectionConfig

from_dict = RolloutCorrectionConfig.from_dict
MIS = {
    "use_tis": True,
    "use_rs": True,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": 0.5,
    "tis_upper_bound": 2.0,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": 1.0e-4,
    "tis_batch_normalize": True,
}
NEMO = "truncated_importance_sampling_"


@pytest.mark.parametrize(
    "preset, settings",
    [
        ("ms_swift_token_truncate", {"rollout_importance_sampling_mode": "token_truncate"}),
        ("ms_swift_token_mask", {"rollout_importance_sampling_mode": "token_mask"}),
        # Its "sequence" is the mean of D over the sequence.
        ("ms_swift_sequence_truncate", {"rollout_importance_sampling_mode": "sequence_truncate"}),
        (
            "ms_swift_sequence_mask",
            {
                "rollout_importance_sampling_mode": "sequence_mask",
                "rollout_importance_sampling_threshold": 2.0,
            },
        ),
        (
            "disabled",
            {"rollout_importance_sampling_mode": None, "rollout_importance_sampling_threshold": 2.0},
        ),
        ("slime_tis", {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0}),
        ("slime_icepop", {"use_tis": True, "tis_mode": "mask"}),
        ("slime_mis", MIS),
        ("slime_mis_sequence", MIS | {"tis_level": "sequence", "rs_level": "sequence"}),
        (
            "disabled",
            {"use_tis": False, "tis_clip": 2.0, "use_rs": True, "use_opsm": False, "opsm_delta": 1e-4},
        ),
        ("slime_opsm", {"use_opsm": True, "opsm_delta": 1e-4}),
        ("slime_rollout_logprobs", {"use_rollout_logprobs": True}),
        (
            "nemo_rl_tis",
            {"use_importance_sampling_correction": True, f"{NEMO}ratio": 2.0, f"{NEMO}type": "tis"},
        ),
        ("nemo_rl_icepop", {f"{NEMO}ratio": 5.0, f"{NEMO}ratio_min": 0.5, f"{NEMO}type": "icepop"}),
        (
            "nemo_rl_seq_mask_tis",
            {f"{NEMO}ratio": 1.002, f"{NEMO}ratio_min": 0.999, f"{NEMO}type": "seq-mask-tis"},
        ),
        ("disabled", {"use_importance_sampling_correction": False, f"{NEMO}ratio": 2.0}),
        ("nemo_rl_seq_logprob_error", {"seq_logprob_error_threshold": 1.5}),
    ],
)
def test_peers_keys_when_given_then_the_preset_of_that_name(preset, settings):
    assert from_dict(settings) == PRESETS[preset]


@pytest.mark.parametrize(
    "settings, expected",
    [
        # A lower clip of slime's weights is a clip on both sides.
        (
            {"use_tis": True, "tis_clip": 3.0, "tis_clip_low": 0.5},
            {
                "rollout_is": "token",
                "rollout_is_mode": "clip",
                "rollout_is_lower": 0.5,
                "rollout_is_upper": 3.0,
            },
        ),
        # A bound left out is the reciprocal of the other in its MIS example.
        (
            {"use_tis": True, "tis_level": "geometric", "tis_mode": "mask", "tis_upper_bound": 4.0},
            {
                "rollout_is": "geometric",
                "rollout_is_mode": "mask",
                "rollout_is_lower": 0.25,
                "rollout_is_upper": 4.0,
            },
        ),
        (
            {
                "use_tis": True,
                "tis_upper_bound": 4.0,
                "use_rs": True,
                "rs_level": "geometric",
                "rs_upper_bound": 1.01,
            },
            {
                "rollout_is": "token",
                "rollout_is_upper": 4.0,
                "rollout_rs": (RejectionRule("seq_mean", "ratio", 0.25, 1.01),),
            },
        ),
        ({"eps_clip": 0.1}, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
        (
            {"eps_clip": 0.1, "eps_clip_high": 0.3, "eps_clip_c": 5.0},
            {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 5.0},
        ),
        (
            {
                "ratio_clip_min": 0.1,
                "ratio_clip_max": 0.3,
                "ratio_clip_c": None,
                "token_level_loss": False,
                "reference_policy_kl_penalty": 0.01,
                "reference_policy_kl_type": "k2",
            },
            {
                "clip_ratio_low": 0.1,
                "clip_ratio_high": 0.3,
                "clip_ratio_c": None,
                "kl_loss_coef": 0.01,
                "kl_loss_type": "k2",
                "loss_aggregation": "seq-mean-token-mean",
            },
        ),
        ({"use_importance_sampling_correction": True}, {"rollout_is": "token", "rollout_is_upper": 1e9}),
        # verl's
        (
            {"loss_type": "reinforce", "bypass_mode": True, "rollout_is": "token"},
            {"loss": "reinforce", "bypass_mode": True, "rollout_is": "token", "rollout_is_upper": 2.0},
        ),
        ({"loss_mode": "vanilla", "tau_pos": 1.0, "tau_neg": 1.05, "dro_beta": None}, {}),
        ({"loss_mode": "gpg"}, {"loss": "reinforce"}),
        (
            {"loss_mode": "dppo_kl", "clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "bypass_mode": True},
            {"loss": "dppo_kl", "clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "bypass_mode": True},
        ),
        (
            {"loss_mode": "sapo", "tau_pos": 0.9, "tau_neg": 1.2, "loss_agg_mode": "seq-mean-token-mean"},
            {
                "loss": "sapo",
                "sapo_temperature_pos": 0.9,
                "sapo_temperature_neg": 1.2,
                "loss_aggregation": "seq-mean-token-mean",
            },
        ),
        ({"loss_mode": "dro", "dro_beta": 0.1}, {"loss": "dro", "dro_beta": 0.1}),
        ({"kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"}, {"kl_loss_coef": 0.001}),
        ({"adv_estimator": "optimal_token_baseline"}, {"advantage": "otb"}),
        (
            {"adv_estimator": "tir_optimal_token_baseline", "rollout_is": "token"},
            {"advantage": "otb", "rollout_is": "token", "rollout_is_upper": 2.0},
        ),
        ({"adv_estimator": "rloo"}, {"advantage": "rloo"}),
        ({"kl_loss_coef": 0.001, "kl_loss_type": "mse"}, {"kl_loss_coef": 0.001, "kl_loss_type": "k2"}),
    ],
)
def test_peers_keys_when_given_then_these_fields(settings, expected):
    assert from_dict(settings) == RolloutCorrectionConfig(**expected)


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {"rollout_importance_sampling_mode": "token"},
            "rollout_importance_sampling_mode must be one of token_truncate, token_mask, sequence_truncate, "
            "sequence_mask; got 'token'; did you mean 'token_mask'?",
        ),
        ({"use_tis": "yes"}, "use_tis must be true or false, got 'yes'"),
        (
            {"use_tis": True, "tis_level": "seq"},
            "tis_level must be one of token, sequence, geometric; got 'seq'",
        ),
        (
            {"use_tis": True, "rollout_is": "token"},
            "rollout_is and slime's use_tis set the same thing; give one of them",
        ),
        (
            {f"{NEMO}ratio": 5.0, f"{NEMO}type": "icepop"},
            f"{NEMO}type icepop needs {NEMO}ratio_min; 0.5 is usual for icepop",
        ),
        (
            {f"{NEMO}ratio": 5.0, f"{NEMO}type": "seq"},
            f"{NEMO}type must be one of tis, icepop, seq-mask-tis; got 'seq'",
        ),
        (
            {"opsm_delta": 1e-4, "rollout_opsm_delta": 1e-4},
            "rollout_opsm_delta and opsm_delta (slime's name) are the same setting; give one of them",
        ),
        (
            {"loss_mode": "vanilla", "loss_type": "ppo_clip"},
            "loss and loss_mode (verl's name) are the same setting; give one of them",
        ),
        ({"use_tsi": True}, "unknown key 'use_tsi'; did you mean 'use_tis'?"),
    ],
)
def test_peers_keys_when_wrong_or_twice_then_refused(settings, words):
    with pytest.raises(ValueError) as raised:
        from_dict(settings)
    assert str(raised.value) == words
