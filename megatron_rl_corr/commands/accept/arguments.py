"""The command's arguments, without what it needs to run."""

import argparse

NUMBER_TYPES = ("bfloat16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="a new folder, for logs, metrics and the page"
    )
    parser.add_argument("--steps", metavar="N", type=int, default=40, help="steps of a trial (default: 40)")
    parser.add_argument(
        "--bar",
        choices=NUMBER_TYPES,
        help="the number type that the bar is of (default: bfloat16 if the command has --bf16, else float32)",
    )
    parser.add_argument(
        "run_command", metavar="COMMAND", nargs="+", help="behind --: the whole command that starts the run"
    )
