"""The optional parts of a run by name, and their options: a folder of megatron_rl_corr/features each.

Without the folder and its name here a run starts and trains, and does not know the flags.
"""

from __future__ import annotations

from importlib import import_module

FEATURES = (
    "indexer_replay",
    "router_replay_effect",
    "filtered_mismatch",
    "ledger",
    "exact",
    "samples",
    "export",
    "trace",
    "push_probe",
    "peak_memory",
    "evaluation",
    "agent",
)
"""In the order in which all ranks call them."""


def feature_options() -> tuple[type, ...]:
    """The dataclass OPTIONS of features/NAME/options.py of each feature, a group of flags."""
    return tuple(import_module(f"megatron_rl_corr.features.{name}.options").OPTIONS for name in FEATURES)
