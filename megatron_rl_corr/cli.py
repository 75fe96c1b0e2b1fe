"""The command line `megatron-rl-corr`: writes a run's report, lists the presets."""

import argparse
import dataclasses
import sys
import textwrap
from collections.abc import Sequence

from megatron_rl_corr import __version__

# Packages are imported by the subcommand that needs them, so that --help answers at once.

PROGRAM = "megatron-rl-corr"
TABLE_WIDTH = 110


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 on success, 2 with a message on stderr for anything the user can mend."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"{PROGRAM} {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Tools around a megatron_rl_corr run.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    report = commands.add_parser("report", help="write report.html and overview.png into a run's folder")
    report.add_argument("run_dir", metavar="RUN_DIR", help="folder that holds the run's metrics.jsonl")
    report.set_defaults(run=_report)

    presets = commands.add_parser("presets", help="list the correction presets and what each one sets")
    presets.set_defaults(run=_presets)
    return parser


def _report(arguments: argparse.Namespace) -> None:
    from megatron_rl_corr.report.page import write_page

    print(f"report: {write_page(arguments.run_dir)}")


def _presets(arguments: argparse.Namespace) -> None:
    from megatron_rl_corr.config import PRESETS

    width = max(map(len, PRESETS))
    print(f"{'preset':<{width}}  sets (everything else is at its default)")
    for name, config in PRESETS.items():
        settings = ", ".join(f"{field}={text}" for field, text in differences(config).items()) or "nothing"
        first, further = f"{name:<{width}}  ", " " * (width + 2)
        print(textwrap.fill(settings, TABLE_WIDTH, initial_indent=first, subsequent_indent=further,
                            break_long_words=False, break_on_hyphens=False))


def differences(config) -> dict[str, str]:
    """The fields of a configuration that differ from its class's defaults, with their values as text."""
    default = type(config)()
    return {
        field.name: _as_text(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(default, field.name)
    }


def _as_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return " and ".join(map(_as_text, value))
    if dataclasses.is_dataclass(value):
        return _rule_as_text(value)
    return str(value)


def _rule_as_text(rule) -> str:
    """A rejection rule as the interval it keeps."""
    if rule.lower is None:
        return f"{rule.name}<={_as_text(rule.upper)}"
    if rule.upper is None:
        return f"{rule.name}>={_as_text(rule.lower)}"
    return f"{rule.name}[{_as_text(rule.lower)},{_as_text(rule.upper)}]"


if __name__ == "__main__":
    sys.exit(main())
