"""Checks the flags of a recipe with the parsers that would read them; starts no server and no training.

python dry_run.py server FLAGS...            SGLang's own parser python dry_run.py train N SCRIPT FLAGS...
the launcher's check for N processes: Megatron's validation, and ours
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
INSIDE = "RECIPE_SERVER_FLAGS"
"""Set in the process that has SGLang's environment."""


def parse_server_flags(words):
    """End with status 2 and argparse's message for a flag that SGLang does not have, or a wrong value."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang.launch_server", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args(words)
    print(f"sglang: {args.model_path} in {args.dtype}, {args.tp_size} GPUs, port {args.port}")


def main(words):
    if os.environ.pop(INSIDE, None):
        parse_server_flags(words[1:])
        return
    from tools.cpu import environment  # with a GPU it changes nothing

    if words[0] == "server":
        variables = environment("sglang") | {INSIDE: "1"}
        command = [__file__, *words]
    else:
        variables = environment("megatron")
        command = ["-m", "megatron_rl_corr.launch", "--rollout-corr-check", *words[1:]]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-W", "ignore", *command], variables)


if __name__ == "__main__":
    main(sys.argv[1:])
