"""torchrun ... -m megatron_rl_corr.launch SCRIPT <its flags> <ours>: a pretrain script with corrected steps.

The script is not changed and need not know of this package.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_rl_corr import plugin
from megatron_rl_corr.config.flags import HelpFormatter, add_flags
from megatron_rl_corr.config.problems import Problems, numbered

USAGE = "torchrun [...] -m megatron_rl_corr.launch SCRIPT.py [its and Megatron's flags] [rollout flags]"
DESCRIBE = "--rollout-corr-describe"
CHECK = "--rollout-corr-check"


def main(argv: list[str] | None = None) -> int:
    """Exit status 2 for a wrong command line; otherwise the script's own."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        _print_help()
        return 0 if argv else 2
    if DESCRIBE in argv:
        return _describe()
    processes = None
    if CHECK in argv:
        place = argv.index(CHECK)
        processes, argv = "".join(argv[place + 1 : place + 2]), [*argv[:place], *argv[place + 2 :]]
        if not processes.isdecimal() or not int(processes) or not argv:
            return _refuse(
                f"{CHECK} takes the number of processes that would train, and a script; got {processes!r}"
            )
    problems = Problems()
    script, arguments = argv[0], argv[1:]
    if not Path(script).is_file():
        problems.add(f"there is no script {script}; the first argument names a Megatron pretrain script")
    if script.startswith("--"):  # it was left out
        arguments = argv
    if "-h" in arguments or "--help" in arguments:
        _print_help()
        print("\nThe script's own flags and Megatron's: run it without the launcher, with --help.")
        return 0
    if processes is not None:
        # Before anything is read: Megatron, and our own checks, take the place in the job from these.
        os.environ.update({"WORLD_SIZE": processes, "RANK": "0", "LOCAL_RANK": "0"})
    install = None
    try:
        install = plugin.prepare(arguments, for_all_ranks=processes is not None, script=script)
    except plugin.RefusedHere as error:
        return _refuse(error)
    except ValueError as error:
        problems.add(error)
    if problems:
        return _refuse(numbered(problems.found))
    if processes is not None:
        return _check(script, arguments, install)
    return _run(script, arguments, install)


def _check(script: str, arguments: list[str], install: plugin.Install) -> int:
    """Run the script up to where it would train, and check everything that can be known by then.

    What it prints is left out: Megatron's table of all its arguments.
    """
    import contextlib
    import io
    import runpy

    from megatron_rl_corr.mcore.versions import UnsupportedMegatron

    try:
        install()
        from megatron_rl_corr.config.flags import parse
        from megatron_rl_corr.mcore.checks import check_only

        check_only.install(*parse(arguments))
    except UnsupportedMegatron as error:
        return _refuse(str(error))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(script, run_name="__main__")
    except check_only.Finished as finished:
        print("\n".join(f"[rollout] {line}" for line in finished.lines))
        return 0
    except (AssertionError, ValueError, OSError) as error:
        return _refuse(str(error) or repr(error))
    return _refuse(f"{script} ended without a call of Megatron's pretrain; name the script that trains")


def _run(script: str, arguments: list[str], install: plugin.Install) -> int:
    # From here on it is heavy: torch, Megatron, and the user's script.
    import runpy

    from megatron_rl_corr.mcore.versions import UnsupportedMegatron

    try:
        leave_servers = install()
    except UnsupportedMegatron as error:
        return _refuse(str(error))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    plugin.run_to_the_end(runpy.run_path, leave_servers)(script, run_name="__main__")
    return 0


def _describe() -> int:
    """Print what would be replaced in this Megatron; the script is not run, and no other flag is needed."""
    from megatron_rl_corr.mcore import versions

    try:
        versions.check_version()
        versions.check_training()
        from megatron_rl_corr.mcore import hooks

        text = hooks.describe()
    except versions.UnsupportedMegatron as error:
        return _refuse(str(error))
    if os.environ.get("RANK", "0") == "0":
        print(text)
    return 0


def _print_help() -> None:
    import argparse

    parser = argparse.ArgumentParser(
        prog="megatron_rl_corr.launch",
        usage=USAGE,
        description=__doc__,
        add_help=False,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        DESCRIBE,
        action="store_true",
        help="print what is replaced in this Megatron, and where it is bound; nothing is run",
    )
    parser.add_argument(
        CHECK,
        metavar="N",
        help="check the command line for N processes, folders, data and rewards too, and end: without "
        "torchrun, servers or weights",
    )
    add_flags(parser).print_help()


def _refuse(message: object) -> int:
    plugin.refuse("megatron_rl_corr.launch", message)
    return 2


if __name__ == "__main__":
    sys.exit(main())
