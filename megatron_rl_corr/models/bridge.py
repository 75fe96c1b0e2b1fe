"""Families whose weights Megatron-Bridge gives: those that are proven, and those that are refused.

Bridge is never imported here; mcore/bridge_names.py has its mappings.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.models.architectures import UNPROVEN

FLAG = "--rollout-model-provider bridge"
PROVEN = (
    "deepseek_v2",
    "gemma",
    "gemma2",
    "gemma3_text",
    "minimax_m2",
    "mistral",
    "nemotron",
    "olmoe",
)
"""`model_type` of families that the table lacks, and whose logits by Bridge's model are transformers'."""
OTHER_MODEL = {
    "ernie4_5_moe": "Megatron-Bridge 0.6 scores its experts by sigmoids, and transformers by a softmax",
    "falcon_h1": "its layers are of Mamba too, which no run was proven with",
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "its indexer was compared with the table's names alone"),
    **{kind: UNPROVEN[kind] for kind in ("kimi_linear", "nemotron_h")},
}
"""`model_type` that Bridge knows and that is refused all the same -> why."""


def installed_version() -> str | None:
    """Megatron-Bridge's version, or None where it is not installed; nothing of it is imported."""
    try:
        return importlib.metadata.version("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_family(hf_config: Mapping[str, Any]) -> None:
    """Raise ValueError for a model whose weights Megatron-Bridge can't give, without importing it.

    Args:
        hf_config: the model's config.json.
    """
    kind = hf_config.get("model_type")
    if installed_version() is None:
        raise ValueError(
            f"{FLAG}: Megatron-Bridge is not installed; install megatron-bridge (make setup-bridge, or `pip "
            "install megatron-bridge` beside Transformer Engine), or use a model of the table"
        )
    if kind in OTHER_MODEL:
        raise ValueError(
            f"config.json: model_type {kind!r} is not supported through Megatron-Bridge either: "
            f"{OTHER_MODEL[kind]}; use another model"
        )
