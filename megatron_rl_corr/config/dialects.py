"""Settings as ms-swift, slime and NeMo-RL name them, in our names; verl's differ only by name.

Each part takes its keys out of the mapping and returns ours. What a peer bounds on rho stays on rho.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl_corr.config.checks import check_bool, one_of
from megatron_rl_corr.config.presets import NO_BOUND
from megatron_rl_corr.config.rules import RejectionRule

# The same setting under a peer's name.
RENAMED = {
    "loss_type": ("loss", "verl"),
    "loss_mode": ("loss", "verl"),
    "tau_pos": ("sapo_temperature_pos", "verl"),
    "tau_neg": ("sapo_temperature_neg", "verl"),
    "adv_estimator": ("advantage", "verl"),
    "loss_agg_mode": ("loss_aggregation", "verl"),
    "loss_scale_factor": ("loss_scale_length", "verl"),
    "entropy_coeff": ("entropy_coef", "verl"),
    "off_policy_sequence_mask_delta": ("rollout_opsm_delta", "ms-swift"),
    "opsm_delta": ("rollout_opsm_delta", "slime"),
    "use_rollout_logprobs": ("bypass_mode", "slime"),
    "eps_clip_c": ("clip_ratio_c", "slime"),
    "seq_logprob_error_threshold": ("rollout_seq_logprob_error_threshold", "NeMo-RL"),
    "ratio_clip_min": ("clip_ratio_low", "NeMo-RL"),
    "ratio_clip_max": ("clip_ratio_high", "NeMo-RL"),
    "ratio_clip_c": ("clip_ratio_c", "NeMo-RL"),
    "reference_policy_kl_penalty": ("kl_loss_coef", "NeMo-RL"),
    "reference_policy_kl_type": ("kl_loss_type", "NeMo-RL"),
}
_KL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"}
_LOSS_NAMES = {"vanilla": "ppo_clip", "gpg": "reinforce"}
_ADVANTAGE_NAMES = {"optimal_token_baseline": "otb", "tir_optimal_token_baseline": "otb"}
_WORDS = {"loss": _LOSS_NAMES, "advantage": _ADVANTAGE_NAMES, "kl_loss_type": _KL_NAMES}
_SWIFT = "rollout_importance_sampling_mode"
_SLIME_LEVELS = {"token": "token", "sequence": "seq_sum", "geometric": "seq_mean"}
_NEMO = "truncated_importance_sampling_ratio"


def in_our_words(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings; a peer's word for a value that is ours is replaced."""
    return {key: _WORDS[key].get(value, value) if key in _WORDS else value for key, value in mapping.items()}


def in_our_names(mapping: dict[str, Any]) -> dict[str, Any]:
    """The same settings under our names.

    Args:
        mapping: settings under our names and those of peers.

    Raises:
        ValueError: two keys set the same thing, or a peer's value is none that the peer has.
    """
    ours = dict(mapping)
    if ours.get("use_opsm") is False:
        ours.pop("opsm_delta", None)
    for theirs, (name, peer) in RENAMED.items():
        if theirs in ours:
            if name in ours:
                raise ValueError(
                    f"{name} and {theirs} ({peer}'s name) are the same setting; give one of them"
                )
            ours[name] = ours.pop(theirs)
    ours = in_our_words(ours)
    for peer, (translate, keys) in _PEERS.items():
        given = {key: ours.pop(key) for key in keys if key in ours}
        for key, value in translate(given).items():
            if key in ours:
                raise ValueError(
                    f"{key} and {peer}'s {', '.join(given)} set the same thing; give one of them"
                )
            ours[key] = value
    return ours


def _swift(given: dict[str, Any]) -> dict[str, Any]:
    """ms-swift: token or sequence, truncate or mask; its sequence is the geometric mean,
    its mask one-sided.
    """
    mode, threshold = given.get(_SWIFT), given.get("rollout_importance_sampling_threshold", 2.0)
    if mode is None:
        # ms-swift carries its default threshold beside a mode that is off.
        return {}
    one_of(_SWIFT, mode, ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"))
    level, bounding = mode.split("_")
    return {
        "rollout_is": {"token": "token", "sequence": "geometric"}[level],
        "rollout_is_mode": bounding,
        "rollout_is_upper": threshold,
    }


def _slime(given: dict[str, Any]) -> dict[str, Any]:
    """slime: --use-tis with its clip, or the levels, modes and bounds of its MIS example."""
    for switch in ("use_tis", "use_rs", "use_opsm", "tis_batch_normalize"):
        if switch in given:
            check_bool(switch, given[switch])
    ours: dict[str, Any] = {}
    if "eps_clip" in given:
        ours["clip_ratio_low"] = given["eps_clip"]
        ours["clip_ratio_high"] = given.get("eps_clip_high") or given["eps_clip"]
    elif "eps_clip_high" in given:
        ours["clip_ratio_high"] = given["eps_clip_high"]
    if not given.get("use_tis", False):
        # slime carries its default bounds beside a switch that is off, and rejects only where it weighs.
        return ours
    upper = given.get("tis_upper_bound", given.get("tis_clip", 2.0))
    lower = given.get("tis_lower_bound", given.get("tis_clip_low"))
    mode, level = given.get("tis_mode", "clip" if lower else "truncate"), given.get("tis_level", "token")
    one_of("tis_level", level, _SLIME_LEVELS)
    if "tis_upper_bound" in given:
        lower = 1.0 / upper if lower is None else lower
    ours |= {
        "rollout_is": level,
        "rollout_is_mode": mode,
        "rollout_is_upper": upper,
        "rollout_is_lower": None if mode == "truncate" else lower or None,
        "rollout_is_batch_normalize": given.get("tis_batch_normalize", False),
    }
    if given.get("use_rs", False):
        ours["rollout_rs"] = _slime_rules(given, lower, upper)
    return ours


def _slime_rules(given: dict[str, Any], lower: float | None, upper: float) -> tuple[RejectionRule, ...]:
    """Bounds left out are those of the weights; the veto has a lower bound only."""
    level = given.get("rs_level", "token")
    one_of("rs_level", level, _SLIME_LEVELS)
    own_lower, own_upper = given.get("rs_lower_bound"), given.get("rs_upper_bound")
    lower, upper = lower if own_lower is None else own_lower, upper if own_upper is None else own_upper
    rules = [RejectionRule(_SLIME_LEVELS[level], "ratio", lower, upper)]
    if given.get("rs_veto_threshold") is not None:
        rules.append(RejectionRule("seq_max", "ratio", lower=given["rs_veto_threshold"]))
    return tuple(rules)


def _nemo(given: dict[str, Any]) -> dict[str, Any]:
    """NeMo-RL: tis truncates, icepop masks, seq-mask-tis gates by the geometric mean and weighs
    without a bound.
    """
    ours: dict[str, Any] = {}
    if "token_level_loss" in given:
        check_bool("token_level_loss", given["token_level_loss"])
        ours["loss_aggregation"] = "token-mean" if given["token_level_loss"] else "seq-mean-token-mean"
    upper, lower = given.get(_NEMO), given.get(f"{_NEMO}_min")
    if not given.get("use_importance_sampling_correction", upper is not None):
        return ours
    kind = given.get("truncated_importance_sampling_type", "tis")
    one_of("truncated_importance_sampling_type", kind, ("tis", "icepop", "seq-mask-tis"))
    if upper is None:
        return ours | {"rollout_is": "token", "rollout_is_upper": NO_BOUND}
    if kind != "tis" and lower is None:
        raise ValueError(
            f"truncated_importance_sampling_type {kind} needs {_NEMO}_min; 0.5 is usual for icepop"
        )
    if kind == "seq-mask-tis":
        gate = RejectionRule("seq_mean", "ratio", lower, upper)
        return ours | {"rollout_is": "token", "rollout_is_upper": NO_BOUND, "rollout_rs": (gate,)}
    if kind == "icepop":
        ours |= {"rollout_is_mode": "mask", "rollout_is_lower": lower}
    return ours | {"rollout_is": "token", "rollout_is_upper": upper}


_PEERS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], tuple[str, ...]]] = {
    "ms-swift": (_swift, (_SWIFT, "rollout_importance_sampling_threshold")),
    "slime": (
        _slime,
        (
            "use_tis",
            "tis_clip",
            "tis_clip_low",
            "tis_level",
            "tis_mode",
            "tis_lower_bound",
            "tis_upper_bound",
            "tis_batch_normalize",
            "use_rs",
            "rs_level",
            "rs_lower_bound",
            "rs_upper_bound",
            "rs_veto_threshold",
            "use_opsm",
            "eps_clip",
            "eps_clip_high",
        ),
    ),
    "NeMo-RL": (
        _nemo,
        (
            "use_importance_sampling_correction",
            "truncated_importance_sampling_type",
            _NEMO,
            f"{_NEMO}_min",
            "token_level_loss",
        ),
    ),
}
PEER_KEYS = (*RENAMED, *(key for _, keys in _PEERS.values() for key in keys))


def keys_by_trainer() -> dict[str, list[str]]:
    """The keys of each peer; all of verl's other keys have our names."""
    found: dict[str, list[str]] = {}
    for key, (_, peer) in RENAMED.items():
        found.setdefault(peer, []).append(key)
    for peer, (_, keys) in _PEERS.items():
        found[peer] += keys
    return found
