"""Named corrections, as fields of RolloutCorrectionConfig.

Bounds that a peer puts on 1/rho ("0.999_1.001" of verl's *_k1) stand in rho's own direction.
"""

from __future__ import annotations

from typing import Any

from megatron_rl_corr.config_rules import RejectionRule

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

PRESET_FIELDS: dict[str, dict[str, Any]] = {**_VERL}
