"""torchrun whose ranks are forks of one process that has imported Megatron: a start takes one
import, not five.

As a program it takes torchrun's command line and environment. Agent, rendezvous and variables are
torchrun's own, and what a rank runs is the same. Not the same: ranks are in the agent's session, they end
without Python's finalisation, and Megatron is there before the module or script is read. Tests of starts
and ends use torchrun itself.
"""

import faulthandler
import gc
import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.managers import SyncManager

from tools.process_group import die_with_parent

TORCHRUN = ["-m", "torch.distributed.run"]


def forking(command: Sequence[str]) -> list[str]:
    """The command line of `python -m torch.distributed.run ...` with this program in torchrun's place.

    Raises:
        ValueError: it is no such command line.
    """
    interpreter, *given = command
    if given[:2] != TORCHRUN:
        raise ValueError(f"the command must begin with {[interpreter, *TORCHRUN]}, got {list(command)[:3]}")
    return [interpreter, "-u", __file__, *given[2:]]  # -u: as torchrun starts its ranks


def _rank(*words: str) -> None:
    """What `python *words` does: words are [-u] [-m] and a module or a script, then its arguments."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the agent's own handlers are inherited
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1)
    words = [word for word in words[:2] if word != "-u"] + list(words[2:])
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, os.path.dirname(words[0])
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as left:
        if left.code:
            raise
        # The agent waits for what a rank that has succeeded returns.


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # tests/preloaded.run_preloaded asks where it hangs
    import megatron.core.tokenizers.text
    import megatron.training  # noqa: F401
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from torch.distributed import run

    import megatron_rl_corr.mcore.hooks  # noqa: F401

    # Each rank that saves would start an interpreter, which imports torch, for its queue of
    # what it has written.
    queues = None
    if "--save" in sys.argv:
        queues = SyncManager(ctx=get_context("fork"))
        queues.start(initializer=die_with_parent())
    launch = run.elastic_launch
    # The attempt whose last rank is there. A rank that is forked while the agent's store looks up the address
    # of an earlier one, on a thread, inherits glibc's lock of that, and waits for it for ever.
    all_forked = get_context("fork").Value("i", -1, lock=False)

    def rank(*words):
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["LOCAL_RANK"] == str(int(os.environ["LOCAL_WORLD_SIZE"]) - 1):
            all_forked.value = attempt
        while all_forked.value < attempt:
            time.sleep(0.001)
        if queues is not None:
            filesystem_async._results_queue = queues.Queue()
        _rank(*words)

    def launch_forks(config, entrypoint):
        config.start_method = "fork"
        return launch(config=config, entrypoint=rank)

    run.elastic_launch = launch_forks
    gc.freeze()  # as in tests/preloaded.py
    run.main()


if __name__ == "__main__":
    main()
