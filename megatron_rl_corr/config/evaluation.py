"""Rollouts on held-out prompts while the policy is trained."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl_corr.config.fields import Options, option


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Options):
    """Evaluation: which held-out prompts are asked, and how."""

    eval_prompts: str | None = option(None, metavar="JSONL")
    """Held-out prompts, sampled once each after every --eval-interval steps with the same settings and reward; logged
    as eval/*."""
