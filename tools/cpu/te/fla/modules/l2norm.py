"""Vectors over their lengths."""

from tools.cpu.delta_rule import normalised as l2norm  # noqa: F401
