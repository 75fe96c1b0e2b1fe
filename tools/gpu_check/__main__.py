"""Show what only a GPU can show, one part after the other: python -m tools.gpu_check [--only PART
...] [--table FILE]

Needs one GPU and no network. Without a GPU it is a rehearsal: all code runs that can. Exit status: 0: all
parts ran and hold; 3: nothing failed, but something was not run; 1: something failed. Each is named.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tools.cpu import gpu_available
from tools.gpu_check.parts import PARTS, TOTAL_S
from tools.gpu_check.runner import FAILED, run_all
from tools.gpu_check.table import markdown


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n" + "\n".join(f"  {part.name:24} {part.shows}" for part in PARTS),
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PART",
        choices=[part.name for part in PARTS],
        help="run these parts alone",
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the Markdown table there, too")
    options = parser.parse_args()
    device = "cuda" if gpu_available() else "cpu"
    logs = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    _say(
        ("no GPU: a rehearsal" if device == "cpu" else f"at most {TOTAL_S // 60} minutes") + f"; logs: {logs}"
    )
    chosen = [part for part in PARTS if options.only is None or part.name in options.only]
    results = run_all(chosen, device, logs, _say)
    table = markdown(results, device)
    if options.table is not None:
        options.table.write_text(table)
    print("\n" + table)
    failed = [f"{result.part.name} ({result.reason})" for result in results if result.state == FAILED]
    left_out = [text for result in results if (text := result.left_out(device))]
    for text in failed:
        _say(f"FAILED: {text}")
    for text in left_out:
        _say(f"not run: {text}")
    if failed:
        return 1
    _say("nothing failed, but not all was run" if left_out else "all parts ran and hold")
    return 3 if left_out else 0


def _say(text: str) -> None:
    print(f"[gpu-check] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
