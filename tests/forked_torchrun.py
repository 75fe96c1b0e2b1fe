"""torchrun whose ranks are forks of one process that has imported Megatron: a start takes one import, not five.

As a program it takes torchrun's command line and environment. The agent, its rendezvous, variables and signals, and how
it ends the other ranks when one has failed, are torchrun's own; what a rank runs is the same, module or script.
"""

import gc
import os
import runpy
import sys
from collections.abc import Sequence

TORCHRUN = ["-m", "torch.distributed.run"]


def forking(command: Sequence[str]) -> list[str]:
    """The command line of `python -m torch.distributed.run ...` with this program in torchrun's place.

    Raises:
        ValueError: it is no such command line.
    """
    interpreter, *given = command
    if given[:2] != TORCHRUN:
        raise ValueError(f"the command must begin with {[interpreter, *TORCHRUN]}, got {list(command)[:3]}")
    return [interpreter, __file__, *given[2:]]


def _rank(*words: str) -> None:
    """What `python *words` does: words are [-u] [-m] and a module or a script, then its arguments."""
    words = [word for word in words[:2] if word != "-u"] + list(words[2:])
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(words[0])
        runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    import megatron.training  # noqa: F401
    import transformers  # noqa: F401
    from torch.distributed import run
    from torch.distributed.launcher.api import elastic_launch

    import megatron_rl_corr.mcore.hooks  # noqa: F401

    config, _, words = run.config_from_args(run.parse_args(sys.argv[1:]))
    config.start_method = "fork"
    gc.freeze()  # as in tests/megatron_forks.py
    elastic_launch(config=config, entrypoint=_rank)(*words)


if __name__ == "__main__":
    main()
