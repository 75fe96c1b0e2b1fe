"""torchrun ... -m megatron_rl_corr.launch SCRIPT <its flags> <ours>: a pretrain script with corrected steps.

The script is not changed and need not know of this package.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_rl_corr import plugin
from megatron_rl_corr.config.flags import HelpFormatter, add_flags

USAGE = "torchrun [...] -m megatron_rl_corr.launch SCRIPT.py [its and Megatron's flags] [rollout flags]"
DESCRIBE = "--rollout-corr-describe"


def main(argv: list[str] | None = None) -> int:
    """Exit status 2 for a wrong command line; otherwise the script's own."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        _print_help()
        return 0 if argv else 2
    if DESCRIBE in argv:
        return _describe()
    script, arguments = argv[0], argv[1:]
    if not Path(script).is_file():
        return _refuse(f"there is no script {script}; the first argument names a Megatron pretrain script")
    if "-h" in arguments or "--help" in arguments:
        _print_help()
        print("\nThe script's own flags and Megatron's: run it without the launcher, with --help.")
        return 0
    try:
        install = plugin.prepare(arguments)
    except ValueError as error:
        return _refuse(error)
    return _run(script, arguments, install)


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
        prog="megatron_rl_corr.launch", usage=USAGE, description=__doc__, add_help=False, formatter_class=HelpFormatter
    )
    parser.add_argument(DESCRIBE, action="store_true",
                        help="print what is replaced in this Megatron, and where it is bound; nothing is run")
    add_flags(parser).print_help()


def _refuse(message: object) -> int:
    plugin.refuse("megatron_rl_corr.launch", message)
    return 2


if __name__ == "__main__":
    sys.exit(main())
