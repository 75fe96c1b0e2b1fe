"""Where prompts are read from, and how a row becomes one."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl_corr.config.fields import Options, option


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(Options):
    """Prompts: where they are read from, and how a row becomes one."""

    prompts: str = option(metavar="JSONL")
    """One JSON object a line: {"input_ids": [...]} or {"prompt": "text"}, with further keys for the reward."""
