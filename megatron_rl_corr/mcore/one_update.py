"""A batch of samples makes one optimizer step: what that makes of pi_old, and which flags it leaves without effect.

Only the standard library and config.py, as in arguments.py.
"""

from __future__ import annotations

import argparse

from megatron_rl_corr.config.correction import RolloutCorrectionConfig

UPDATES_PER_BATCH = 1
"""Optimizer steps that a batch of samples makes. With one, pi_old is the policy that is trained: r = 1."""


def check_one_update(config: RolloutCorrectionConfig, values: argparse.Namespace) -> None:
    """ValueError for what has no effect while a batch makes one update (UPDATES_PER_BATCH).

    With three policies pi_old is then the policy that is trained, r = 1, and no bound on r acts. Clip values of a YAML
    file pass, as a peer's file describes its whole run, where they always stand; `idle_clips` names them.
    """
    clips = ("rollout_clip_ratio_low", "rollout_clip_ratio_high", "rollout_clip_ratio_c")
    for name in clips if not config.bypass_mode else ():
        given = getattr(values, name)
        if given is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} {given} has no effect: a batch makes one update, so pi_old is the policy "
                "that is trained, its ratio is 1 and nothing is clipped. Drop it; --rollout-bypass-mode clips the "
                "ratio to pi_rollout, and --rollout-is with --rollout-is-threshold bounds the weights"
            )
    if values.router_replay == "R2":
        raise ValueError(
            "--router-replay R2 has no effect: it repeats the routes of the pass for old log-probs, and with one "
            "update a batch those are of the very weights that train; use R3, the servers' routes, or "
            "--router-replay off"
        )
    corrected = config.changes_gradient or (config.bypass_mode and config.kind.has_ratio)
    if values.rollout_max_lag > 0 and not corrected:
        raise ValueError(
            f"--rollout-max-lag {values.rollout_max_lag} trains on samples of older weights, and nothing corrects "
            "them; add --rollout-is token, --rollout-rs, or a --rollout-correction-preset such as decoupled_token_is "
            "(and leave --rollout-diagnostics-only out), or use --rollout-max-lag 0"
        )


def idle_clips(config: RolloutCorrectionConfig) -> str | None:
    """One line for the user about clip values of a YAML file that can't act; None where there are none."""
    names = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    usual = RolloutCorrectionConfig()
    given = [f"{name} {getattr(config, name)}" for name in names if getattr(config, name) != getattr(usual, name)]
    if config.bypass_mode or not given:
        return None
    return f"{', '.join(given)} of the configuration can't act: with one update a batch r = 1, and nothing is clipped"
