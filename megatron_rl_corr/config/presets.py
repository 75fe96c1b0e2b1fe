"""Named corrections, as fields of RolloutCorrectionConfig.

Bounds that a peer puts on 1/rho ("0.999_1.001" of verl's *_k1) stand in rho's own direction.
"""

from __future__ import annotations

from typing import Any

from megatron_rl_corr.config.rules import RejectionRule

NO_BOUND = 1e9
"""An upper bound that no weight reaches: log-ratios are clamped at 20, and e^20 is 4.9e8."""

_GEO_RS = {"rollout_rs": (RejectionRule("seq_mean", "ratio", 1 / 1.001, 1 / 0.999),)}
_K3_RS = {"rollout_rs": (RejectionRule("seq_mean", "k3", upper=0.01),)}
_TOKEN_IS = {"rollout_is": "token", "rollout_is_upper": 2.0}
_SEQ_IS = {"rollout_is": "sequence", "rollout_is_upper": 2.0}
_ICEPOP = {"rollout_is": "token", "rollout_is_mode": "mask", "rollout_is_lower": 0.5, "rollout_is_upper": 5.0}
_BYPASS_CLIP = {"bypass_mode": True, "loss": "ppo_clip"}
_BYPASS_PG = {"bypass_mode": True, "loss": "reinforce"}

_VERL: dict[str, dict[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN_IS,
    "decoupled_seq_is": _SEQ_IS,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": _SEQ_IS | {"rollout_rs": (RejectionRule("seq_sum", "ratio", 0.5, 2.0),)},
    "decoupled_geo_rs": _GEO_RS,
    "decoupled_geo_rs_seq_tis": _SEQ_IS | _GEO_RS,
    "decoupled_geo_rs_token_tis": _TOKEN_IS | _GEO_RS,
    "decoupled_k3_rs": _K3_RS,
    "decoupled_k3_rs_seq_tis": _SEQ_IS | _K3_RS,
    "decoupled_k3_rs_token_tis": _TOKEN_IS | _K3_RS,
    "bypass_ppo_clip": _BYPASS_CLIP,
    "bypass_ppo_clip_geo_rs": _BYPASS_CLIP | _GEO_RS,
    "bypass_ppo_clip_k3_rs": _BYPASS_CLIP | _K3_RS,
    "bypass_pg_is": _BYPASS_PG | _SEQ_IS,
    "bypass_pg_token_icepop": _BYPASS_PG | _ICEPOP,
    "bypass_pg_geo_rs": _BYPASS_PG | _GEO_RS,
    "bypass_pg_geo_rs_seq_tis": _BYPASS_PG | _SEQ_IS | _GEO_RS,
    "bypass_pg_geo_rs_token_tis": _BYPASS_PG | _TOKEN_IS | _GEO_RS,
}

# Its "sequence" is the geometric mean, its mask has an upper bound only.
_MS_SWIFT: dict[str, dict[str, Any]] = {
    f"ms_swift_{name}_{mode}": {"rollout_is": level, "rollout_is_mode": mode, "rollout_is_upper": 2.0}
    for name, level in (("token", "token"), ("sequence", "geometric"))
    for mode in ("truncate", "mask")
}

_SLIME_VETO = RejectionRule("seq_max", "ratio", lower=1e-4)
_SLIME: dict[str, dict[str, Any]] = {
    "slime_tis": _TOKEN_IS,
    # --tis-clip-low is 0 by default: the mask has an upper bound only.
    "slime_icepop": _TOKEN_IS | {"rollout_is_mode": "mask"},
    # The settings of its mis.yaml, and the same at sequence level.
    "slime_mis": _TOKEN_IS
    | {
        "rollout_is_batch_normalize": True,
        "rollout_rs": (RejectionRule("token", "ratio", 0.5, 2.0), _SLIME_VETO),
    },
    "slime_mis_sequence": _SEQ_IS
    | {
        "rollout_is_batch_normalize": True,
        "rollout_rs": (RejectionRule("seq_sum", "ratio", 0.5, 2.0), _SLIME_VETO),
    },
    "slime_opsm": {"rollout_rs": (RejectionRule("seq_mean", "opsm", upper=1e-4),)},
    "slime_rollout_logprobs": _BYPASS_CLIP,
}

_NEMO_RL: dict[str, dict[str, Any]] = {
    "nemo_rl_tis": _TOKEN_IS,
    "nemo_rl_icepop": _ICEPOP,
    "nemo_rl_seq_mask_tis": {
        "rollout_is": "token",
        "rollout_is_upper": NO_BOUND,
        "rollout_rs": (RejectionRule("seq_mean", "ratio", 0.999, 1.002),),
    },
    "nemo_rl_seq_logprob_error": {"rollout_rs": (RejectionRule("seq_mean", "exp_abs", upper=1.5),)},
}

_BINARY_KL = 0.05
"""DPPO's bound on the binary KL of a token, as in verl's script: trust region masking comes
without a usual bound.
"""

_VACO_TV = 0.02
"""open-instruct's radius for VACO's filter, over a prompt's responses: half of the rule's mean |rho - 1|."""

_DRO_BETA = 0.05
"""The value that Tinker's documentation gives DRO as an example; the paper and verl leave it to the user."""

_PAPERS: dict[str, dict[str, Any]] = {
    "m2po": {"rollout_m2_threshold": 0.04},
    "vespo": {
        "bypass_mode": True,
        "loss": "reinforce",
        "rollout_is": "sequence",
        "rollout_is_mode": "gamma",
    },
    "trm": {"rollout_rs": (RejectionRule("seq_max", "binary_kl", upper=_BINARY_KL),)},
    "dppo_binary_kl": {"bypass_mode": True, "loss": "dppo_kl"},
    "vaco": {"rollout_rs": (RejectionRule("seq_mean", "vaco", upper=2 * _VACO_TV),)},
    "sapo": {"bypass_mode": True, "loss": "sapo"},
    "dro": {"bypass_mode": True, "loss": "dro", "dro_beta": _DRO_BETA},
    "otb": _TOKEN_IS | {"advantage": "otb"},
}

# prime-rl's default loss: DPPO's bound in probability around the servers' policy, and Kimi-K2.5's pull
# towards it. Its advantage is r - mean, undivided; its ratio has no cap, where dppo_tv's has one of 20.
_PRIME_RL: dict[str, dict[str, Any]] = {
    "prime_rl": {
        "bypass_mode": True,
        "loss": "dppo_tv",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "sampler_kl_coef": 1e-3,
        "sampler_kl_type": "squared",
        "advantage": "group_mean",
    },
}

PRESET_FIELDS: dict[str, dict[str, Any]] = {
    **_VERL,
    **_MS_SWIFT,
    **_SLIME,
    **_NEMO_RL,
    **_PRIME_RL,
    **_PAPERS,
}
