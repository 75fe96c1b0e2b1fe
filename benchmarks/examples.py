"""The README's commands with many seeds: does each end with status 0, how long does it take,
and what is learnt?

python benchmarks/examples.py OUT [--seeds 0 1 ...] [--others 1 2 3]

`make arithmetic` with each of the seeds, then `make quickstart` in its four forms with each of the
others. OUT keeps the output and the result of each run; started again, only runs that it lacks are made.
Rewards are means over the first and the last five steps; of `make arithmetic` also the shares of
held-out questions that are answered rightly when sampled, of the model that the run began with and of
the exported one.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.quiet import only_tables  # noqa: E402

QUICKSTARTS = ("", "ENGINE=vllm", "COLOCATE=1", "ASYNC=1")
COLUMNS = (
    "command",
    "date",
    "exit status",
    "seconds",
    "reward: first steps",
    "last steps",
    "held-out before",
    "after",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(10)), help="of make arithmetic")
    parser.add_argument("--others", type=int, nargs="*", default=[1, 2, 3], help="seeds of make quickstart")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    commands = [("make", "arithmetic", f"SEED={seed}") for seed in options.seeds]
    commands += [
        ("make", "quickstart", f"SEED={seed}", *filter(None, [form]))
        for seed in options.others
        for form in QUICKSTARTS
    ]
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for command in commands:
        print("| " + " | ".join(map(str, row(command, options.out))) + " |", flush=True)


def row(command: tuple[str, ...], out: Path) -> list:
    """One row of the table, of a run that is made now or was made before."""
    name = "-".join(command[1:])
    kept, log = out / f"{name}.json", out / f"{name}.log"
    if not kept.exists():
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        started, date = time.monotonic(), time.strftime("%Y-%m-%d")
        with open(log, "w") as file:
            status = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file).returncode
        seconds = round(time.monotonic() - started)
        found = [" ".join(command), date, status, seconds, *learnt(log.read_text())]
        kept.write_text(json.dumps(found) + "\n")
    return json.loads(kept.read_text())


def learnt(said: str) -> list[str]:
    """The last four columns, from what a run said and the file of metrics that it names."""
    files = [(ROOT / page).with_name("metrics.jsonl") for page in re.findall(r"the run, drawn: (\S+)", said)]
    rewards = [[json.loads(line)["reward/mean"] for line in file.read_text().splitlines()] for file in files]
    held_out = re.findall(r"right when sampled: (\S+) before, (\S+) after", said)
    return [
        *(", ".join(f"{mean(each[part]):.2f}" for each in rewards) for part in (slice(5), slice(-5, None))),
        *(", ".join(each[at] for each in held_out) for at in range(2)),
    ]


if __name__ == "__main__":
    with only_tables():
        main()
