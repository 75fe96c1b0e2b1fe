"""Chooses what gives the names and layouts of a model's weights: this package's table, or Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.models.architectures import has_table, parts_of
from megatron_rl_corr.models.bridge import check_family, installed_version


def takes_bridge(hf_config: Mapping[str, Any], choice: str) -> bool:
    """True where Megatron-Bridge gives the names, False where the table does.

    Args:
        hf_config: the model's config.json.
        choice: of --rollout-model-provider: "auto", "table" or "bridge".

    Raises:
        ValueError: neither has the model, or Bridge is chosen and not installed.
    """
    if choice == "table" or (choice == "auto" and has_table(hf_config)):
        parts_of(hf_config)
        return False
    if choice == "auto" and installed_version() is None:
        parts_of(hf_config)  # which says what is missing
    check_family(hf_config)
    return True
