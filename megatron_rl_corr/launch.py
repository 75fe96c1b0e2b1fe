"""torchrun ... -m megatron_rl_corr.launch SCRIPT <its flags> <ours>: a pretrain script with corrected steps.

The script is not changed and need not know of this package.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from megatron_rl_corr.mcore.arguments import add_rollout_arguments, parse

USAGE = "torchrun [...] -m megatron_rl_corr.launch SCRIPT.py [its and Megatron's flags] [rollout flags]"

TIME_TO_TELL_S = 1.0
"""torchrun ends all ranks when the first exits: the one that knows what went wrong must be faster."""


def main(argv: list[str] | None = None) -> int:
    """Exit status 2 for a wrong command line; otherwise the script's own."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        _print_help()
        return 0 if argv else 2
    script, arguments = argv[0], argv[1:]
    if not Path(script).is_file():
        return _refuse(f"there is no script {script}; the first argument names a Megatron pretrain script")
    if "-h" in arguments or "--help" in arguments:
        _print_help()
        print("\nThe script's own flags and Megatron's: run it without the launcher, with --help.")
        return 0
    try:
        config, options = parse(arguments)
    except ValueError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"--rollout-correction-config {error.filename} cannot be read: {error.strerror}")
    return _run(script, arguments, config, options)


def _run(script: str, arguments: list[str], config, options) -> int:
    # From here on it is heavy: torch, Megatron, and the user's script.
    import runpy

    from megatron_rl_corr.mcore import hooks
    from megatron_rl_corr.mcore.refusal import Refusal
    from megatron_rl_corr.parallel.failure import PeerFailure
    from megatron_rl_corr.report.run_log import RunLog
    from megatron_rl_corr.rollout.errors import RolloutError

    settings = {"rollout_correction": config, "rollout": options}
    logs: list[RunLog] = []

    def report(metrics: dict, writer) -> None:
        if not logs:  # only the rank that reports opens files
            logs.append(RunLog(options.log_dir, settings, writer))
        logs[0].write(metrics)

    leave_servers = hooks.install(config, options, report)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit:  # --exit-interval, --exit-duration-in-mins, a signal: all ranks end here
            leave_servers()
            raise
        leave_servers()
    except PeerFailure:
        time.sleep(TIME_TO_TELL_S)
        return _leave(1)
    except (RolloutError, Refusal) as error:
        notes = getattr(error, "__notes__", ())
        print(f"\nmegatron_rl_corr: {error}", *notes, sep="\n  ", file=sys.stderr, flush=True)
        return _leave(1)
    return 0


def _leave(status: int) -> int:
    """End at once: the other ranks may be gone, and an orderly shutdown would wait for them."""
    import multiprocessing

    for child in multiprocessing.active_children():  # checkpoint writers: os._exit would leave them behind
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _print_help() -> None:
    import argparse

    parser = argparse.ArgumentParser(
        prog="megatron_rl_corr.launch", usage=USAGE, description=__doc__, add_help=False
    )
    add_rollout_arguments(parser).print_help()


def _refuse(message: str) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"megatron_rl_corr.launch: {message}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
