"""How many collected batches the quickstart needs to learn its task, by the updates that each batch makes.

python benchmarks/updates.py OUT [--seeds 0 1 2] [--updates 1 4] [--batches 40]  trains the tiny model for
every seed and every number of updates a batch, at equal samples a batch (64), and prints after how many
batches the mean reward of five in a row reaches 0.8. Other arguments go to the launcher.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.quiet import only_tables  # noqa: E402
from megatron_rl_corr.observability.metrics_file import FILE_NAME, read_metrics  # noqa: E402

SAMPLES = 64
"""Of a collected batch."""
WANTED, IN_A_ROW = 0.8, 5


def trained(out, seed, updates, batches, flags):
    """Rewards of the batches, in order."""
    folder = out / f"seed{seed}-updates{updates}"
    command = [
        sys.executable,
        ROOT / "examples/quickstart/run.py",
        "--out",
        folder,
        "--seed",
        seed,
        "--steps",
        updates * batches,
        "--",
        "--rollout-updates-per-batch",
        updates,
        "--global-batch-size",
        SAMPLES // updates,
        *flags,
    ]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    return [step["reward/mean"] for step in read_metrics(folder / FILE_NAME) if "reward/mean" in step]


def batches_needed(rewards):
    """Batches until the mean reward of IN_A_ROW reaches WANTED; None: it never does."""
    for end in range(IN_A_ROW, len(rewards) + 1):
        if sum(rewards[end - IN_A_ROW : end]) / IN_A_ROW >= WANTED:
            return end
    return None


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="a new folder for the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--batches", type=int, default=40)
    options, flags = parser.parse_known_args()
    print("seed  updates  batches to 0.8  reward of the last 5")
    for seed in options.seeds:
        for updates in options.updates:
            rewards = trained(options.out.resolve(), seed, updates, options.batches, flags)
            needed, last = batches_needed(rewards), sum(rewards[-IN_A_ROW:]) / len(rewards[-IN_A_ROW:])
            print(f"{seed:4}  {updates:7}  {needed or '-':>14}  {last:20.3f}", flush=True)


if __name__ == "__main__":
    with only_tables():
        main()
