"""Arguments of `megatron-rl-corr incident`."""

from __future__ import annotations

import argparse

MOST_BATCHES = 50
"""Batches that a bundle has by default, from the checkpoint to the step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them to the subcommand's parser."""
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", nargs="?", help="the folder of --rollout-log-dir")
    add(
        "--step",
        metavar="N",
        type=int,
        help="the step (default: the last one with an alert, else that of the largest k3_kl)",
    )
    add("--out", metavar="DIR", help="a new folder (default: RUN_DIR/incident_step_N)")
    add(
        "--max-batches",
        metavar="N",
        type=int,
        default=MOST_BATCHES,
        help=f"batches between the checkpoint and the step's end, at most (default {MOST_BATCHES})",
    )
    add("--with-checkpoint", action="store_true", help="copy the checkpoint into the bundle, weights and all")
    add("--check", metavar="BUNDLE", help="verify the hashes of a bundle's files, and write nothing")
    add(
        "--replayed",
        metavar="LOG_DIR",
        help="with --check: compare the metrics of a replay, in its --rollout-log-dir, bit for bit",
    )
