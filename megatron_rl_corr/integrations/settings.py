"""The settings of a correction that acts inside another trainer's loss, one microbatch at a time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.config.rules import RULE_INPUTS

WHOLE_BATCH = ("rollout_is_batch_normalize", "rollout_m2_threshold", "rollout_batch_filter_kl")
ACT = (
    "rollout_is",
    "rollout_is_mode",
    "rollout_is_lower",
    "rollout_is_upper",
    "rollout_rs",
    "diagnostics_only",
)


@functools.cache
def read_settings(path: str, trainer: str) -> RolloutCorrectionConfig:
    """The file of --rollout-correction-config, read once. ValueError for a setting without
    effect in `trainer`.
    """
    config = RolloutCorrectionConfig.from_yaml(path)
    check_settings(config, trainer)
    return config


def check_settings(config: RolloutCorrectionConfig, trainer: str) -> None:
    """ValueError for a setting that acts on a whole batch, on turns, or on the loss, which is
    the trainer's own.
    """
    problems = Problems()
    checks = [lambda: _check_turns(config, trainer), lambda: _check_inputs(config, trainer)]
    checks += [
        lambda name=field.name, usual=field.default: _check_acts(config, name, usual, trainer)
        for field in dataclasses.fields(config)
        if field.name not in ACT
    ]
    for check in checks:
        with problems.catch():
            check()
    problems.raise_all()


def _check_turns(config: RolloutCorrectionConfig, trainer: str) -> None:
    if by_turn := config.decided_by_turn:
        raise ValueError(
            f"{by_turn[0]}: {trainer} do not tell turns; use a token, sequence or geometric level"
        )


def _check_inputs(config: RolloutCorrectionConfig, trainer: str) -> None:
    for name, asker in config.needed_inputs.items():
        asker, what = (asker, "mode") if " " in asker else (f"rollout_rs {asker}", "rule")
        raise ValueError(
            f"{asker} needs {name}, {RULE_INPUTS[name].doc}, which {trainer} do not give; use another {what}"
        )


def _check_acts(config: RolloutCorrectionConfig, name: str, usual: Any, trainer: str) -> None:
    """ValueError for a setting that is not its default, and has no effect."""
    value = getattr(config, name)
    if value == usual:
        return
    why = f"the loss is {trainer}'s own, with its own flags"
    if name in WHOLE_BATCH:
        why = f"it needs the whole batch, and {trainer} correct one microbatch at a time"
    raise ValueError(f"{name} {value} has no effect in {trainer}: {why}; drop it")
