"""The flags of `megatron-rl-corr gateway`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    add(
        "--url",
        metavar="URL",
        action="append",
        required=True,
        help="a server's address; once for each server",
    )
    add(
        "--hf-checkpoint",
        metavar="HF_DIR",
        required=True,
        help="the model that they serve, with its template",
    )
    add("--api-key-env", metavar="NAME", help="environment variable that holds the servers' API key")
    add("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    add("--port", type=int, default=8400, help="0: a free one (default 8400)")
    add("--out", metavar="DIR", help="write ended episodes there, a sample file each (default: none)")
    add("--max-new-tokens", metavar="N", type=int, default=4096, help="longest answer (default 4096)")
    add("--seq-length", metavar="N", type=int, default=32768, help="longest conversation (default 32768)")
    add("--max-turns", metavar="N", type=int, default=1000, help="requests of an episode (default 1000)")
    add("--temperature", metavar="T", type=float, default=1.0, help="of all answers (default 1)")
    add("--top-p", metavar="P", type=float, default=1.0, help="of all answers (default 1, off)")
    add("--top-k", metavar="K", type=int, default=-1, help="of all answers (default -1, off)")
    add(
        "--tool-parser", metavar="NAME", default="auto", help="how the model writes tool calls (default auto)"
    )
    add("--reasoning", choices=["content", "separate"], default="content", help="where thoughts are told")
    add("--strict", action="store_true", help="refuse requests that ask for other sampling")
