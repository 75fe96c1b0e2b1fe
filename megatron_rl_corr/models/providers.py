"""Chooses what gives the names and layouts of a model's weights: this package's table, or Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.models.architectures import has_table, parts_of
from megatron_rl_corr.models.bridge import BridgeNames, check_family, installed_version
from megatron_rl_corr.models.names import NameTable, ParameterNames


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


def parameter_names(hf_config: Mapping[str, Any], choice: str, *, padded_vocab_size: int) -> ParameterNames:
    """The rules of a model's parameters.

    Args:
        hf_config, choice: as `takes_bridge`.
        padded_vocab_size: rows of Megatron's embedding.

    Raises:
        ValueError: as `takes_bridge`, `NameTable` and `BridgeNames`.
    """
    kind = BridgeNames if takes_bridge(hf_config, choice) else NameTable
    return kind(hf_config, padded_vocab_size=padded_vocab_size)
