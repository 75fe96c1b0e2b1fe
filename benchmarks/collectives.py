"""Collectives and bytes that a corrected step exchanges, by group; counted on real ranks and
projected to many.

python benchmarks/collectives.py [--latency-us 10] [--bandwidth-gb-s 25]

S sequences and T tokens of a replica, M microbatches, cp context-parallel ranks, P packed
values of the metrics.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.exchanges import bytes_sent
from benchmarks.quiet import only_tables
from tools.cpu import environment

WORKER = Path(__file__).with_name("collectives_worker.py")
GROUPS = ("tp", "cp", "dp_cp", "tp_cp", "pp", "world")
PURPOSES = {
    "_meet": "did a replica fail",
    "_share_failures": "samples that failed",
    "_broadcast_from_first": "counts and rows of the batch",
    "scatter_slices": "tokens of the batch",
    "forward": "log-probs of labels",
    "whole_unit_sums": "sums over sequences",
    "_totals_of_batch": "counts of the batch",
    "second_moment_mask": "M2PO's histogram",
    "gspo": "GSPO's ratios",
    "agreed_decision": "may the step update",
    "all_reduce_metrics": "metrics",
}
"""By the function that asks; one that is not here ends the run."""
SHOWN = ("tp 2, cp 2", "cp 2, dp 2", "dp 4")
"""Layouts whose counts are printed; the laws are of all."""
JOBS = {
    "tp 8, pp 8, cp 4, dp 64": {"tp": 8, "pp": 8, "cp": 4, "dp": 64},
    "tp 8, pp 8, cp 1, dp 256": {"tp": 8, "pp": 8, "cp": 1, "dp": 256},
    "tp 8, pp 1, cp 1, dp 2048": {"tp": 8, "pp": 1, "cp": 1, "dp": 2048},
    "tp 1, pp 1, cp 1, dp 16384": {"tp": 1, "pp": 1, "cp": 1, "dp": 16384},
}
SEQUENCES, LENGTH = 16, 8192
"""Of a replica in the projection; a row a microbatch."""

Key = tuple[str, str, str]
"""(group, what for, kind of collective)."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--latency-us", type=float, default=10.0, help="of a hop between ranks, for the formula"
    )
    parser.add_argument("--bandwidth-gb-s", type=float, default=25.0, help="a rank's, for the formula")
    options = parser.parse_args()
    found = run_worker()
    steps = [step for layout, ranks in found.items() for step in steps_of(layout, ranks)]
    laws = {
        config: laws_of([step for step in steps if step["config"] == config]) for config in configs(steps)
    }
    print_step(laws)
    print_growth(steps)
    print_ways(found)
    print_projection(laws, options)
    print_ways_projected(found, options)


def run_worker() -> dict[str, list[list[dict]]]:
    """By layout and rank, the steps with all that they exchanged."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "exchanges.json"
        command = [sys.executable, "-W", "ignore", WORKER, out]
        # Counts are of gloo's ranks, with a GPU too.
        variables = environment("megatron", os.environ | {"CUDA_VISIBLE_DEVICES": ""})
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        return json.loads(out.read_text())


def steps_of(layout: str, ranks: list[list[dict]]) -> list[dict]:
    """Each step with, by Key, [collectives, bytes given, bytes sent] of the rank that has most of it."""
    steps = []
    for of_ranks in zip(*ranks, strict=True):
        most: dict[Key, list[float]] = {}
        for one in of_ranks:
            for key, values in totals(one["exchanges"]).items():
                most[key] = max(most.get(key, values), values)
        sizes = dict(part.split() for part in layout.split(", "))
        steps.append(
            of_ranks[-1]["case"]
            | {
                "layout": layout,
                "cp": int(sizes.get("cp", 1)),
                "totals": most,
                "values": of_ranks[-1]["values"],
            }
        )
    return steps


def totals(exchanges: list[dict]) -> dict[Key, list[float]]:
    found: dict[Key, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for one in exchanges:
        if one["caller"] not in PURPOSES:
            raise SystemExit(f"{one['caller']} exchanges something that PURPOSES has no words for: {one}")
        key = one["group"], PURPOSES[one["caller"]], one["kind"]
        sent = bytes_sent(one["kind"], one["ranks"], one["payload"])
        found[key] = [have + more for have, more in zip(found[key], (1, one["payload"], sent), strict=True)]
    return dict(found)


def configs(steps: list[dict]) -> list[str]:
    return list(dict.fromkeys(step["config"] for step in steps))


def laws_of(steps: list[dict]) -> dict[Key, tuple[list[int], list[int]]]:
    """By Key: the number of collectives as [1, M] and the bytes a rank gives as [1, S, T,
    T/cp], least squares.

    Ends the run unless every step, of which there are more than unknowns, is met exactly.
    """
    laws = {}
    for key in dict.fromkeys(key for step in steps for key in step["totals"]):
        rows = [step for step in steps if key in step["totals"]]
        numbers = fit(
            [[1, row["microbatches"]] for row in rows], [row["totals"][key][0] for row in rows], key
        )
        laws[key] = numbers, fit([sizes(row) for row in rows], [row["totals"][key][1] for row in rows], key)
    return laws


def sizes(step: dict) -> list[float]:
    tokens = step["sequences"] * step["length"]
    return [1, step["sequences"], tokens, tokens / step["cp"]]


def fit(features: list[list[float]], values: list[float], key: Key) -> list[int]:
    x, y = torch.tensor(features, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)
    law = torch.linalg.lstsq(x, y, driver="gelsd").solution.round()
    if not torch.equal(x @ law, y):
        raise SystemExit(f"{key}: {values} is not linear in {features}")
    return [int(coefficient) for coefficient in law]


def as_formula(law: list[int], names: tuple[str, ...]) -> str:
    terms = [
        f"{c if c > 1 or not name else ''} {name}".strip() for c, name in zip(law, names, strict=True) if c
    ]
    return " + ".join(terms) or "0"


def print_step(laws: dict[str, dict]) -> None:
    by_row = defaultdict(list)
    for config, law in laws.items():
        for (group, purpose, kind), (numbers, payload) in law.items():
            row = (
                GROUPS.index(group),
                purpose,
                kind,
                as_formula(numbers, ("", "M")),
                as_formula(payload, ("", "S", "T", "T/cp")),
            )
            by_row[row].append(config)
    print("\nOne step: collectives, and the bytes that a rank gives in all of them together\n")
    print("| over | for | kind | collectives | bytes given | configurations |\n|---|---|---|---|---|---|")
    for row in sorted(by_row):
        which = "all" if len(by_row[row]) == len(laws) else "; ".join(by_row[row])
        print(f"| {GROUPS[row[0]]} | {' | '.join(row[1:])} | {which} |")


def print_growth(steps: list[dict]) -> None:
    print("\nWhat was counted: collectives, and bytes that a rank sends in them\n")
    print(f"| layout | configuration | S | T | M | P | {' | '.join(GROUPS)} |")
    print("|---" * (6 + len(GROUPS)) + "|")
    for layout in SHOWN:
        mine = [step for step in steps if step["layout"] == layout]
        first = configs(mine)[0]
        # Every size for one configuration; the others as they differ from it at the first of them.
        others = {
            config: next(step for step in mine if step["config"] == config) for config in configs(mine)[1:]
        }
        for step in [step for step in mine if step["config"] == first] + list(others.values()):
            count, sent = Counter(), Counter()
            for (group, _, _), values in step["totals"].items():
                count[group] += values[0]
                sent[group] += values[2]
            cells = [f"{count[group]}, {sent[group]:,.0f}" if count[group] else "-" for group in GROUPS]
            tokens = step["sequences"] * step["length"]
            shape = f"{step['sequences']} | {tokens} | {step['microbatches']} | {step['values']}"
            print(f"| {layout} | {step['config']} | {shape} | {' | '.join(cells)} |")


def ways_of(ranks: list[list[dict]]) -> dict[str, list[dict]]:
    """The exchanges of each way to bring one step's metrics together, on a rank of the last stage."""
    return next(step["ways"] for step in ranks[-1] if step["ways"])


def print_ways(found: dict[str, list[list[dict]]]) -> None:
    print("\nThe same metrics over dp_cp in other ways: collectives, and bytes that a rank sends\n")
    layouts = {name: ways_of(found[name]) for name in ("dp 2", *SHOWN)}
    print(f"| way | {' | '.join(layouts)} |\n|---{'|---' * len(layouts)}|")
    for way in next(iter(layouts.values())):
        cells = []
        for ways in layouts.values():
            sent = sum(bytes_sent(one["kind"], one["ranks"], one["payload"]) for one in ways[way])
            cells.append(f"{len(ways[way])}, {sent:,.0f}")
        print(f"| {way} | {' | '.join(cells)} |")


def seconds(kind: str, ranks: int, number: float, given: float, options: argparse.Namespace) -> float:
    """`number` collectives in which a rank gives `given` bytes in all: hops x latency + bytes / bandwidth.

    Rings; an all-reduce as the quicker of a ring and a tree of 2 ceil(log2 n) hops, each of all its bytes.
    """
    latency, bandwidth = options.latency_us * 1e-6, options.bandwidth_gb_s * 1e9
    hops = {"broadcast": ranks - 1, "all-gather": ranks - 1, "all-reduce": 2 * (ranks - 1), "receive": 1}
    hops = hops[kind]
    ring = number * hops * latency + bytes_sent(kind, ranks, given) / bandwidth
    if kind != "all-reduce":
        return ring
    hops = 2 * math.ceil(math.log2(ranks))
    return min(ring, hops * (number * latency + given / bandwidth))


def print_projection(laws: dict[str, dict], options: argparse.Namespace) -> None:
    print(
        f"\nProjected to 16,384 ranks, {SEQUENCES} rows of {LENGTH} tokens a replica, a row a microbatch: "
        f"collectives, bytes that a rank sends;\nmilliseconds of the formula with {options.latency_us:g} us "
        f"a hop and {options.bandwidth_gb_s:g} GB/s, which are given, not measured\n"
    )
    print(f"| job | configuration | {' | '.join(GROUPS)} |\n|---|---{'|---' * len(GROUPS)}|")
    for job, split in JOBS.items():
        ranks = split | {
            "dp_cp": split["dp"] * split["cp"],
            "tp_cp": split["tp"] * split["cp"],
            "world": math.prod(split.values()),
        }
        step = {"sequences": SEQUENCES, "length": LENGTH, "cp": split["cp"]}
        for config in [
            name for name in laws if name in ("token weights, 4 rules", "M2PO", "two policies, 1 rule")
        ]:
            cells = {group: [0, 0.0, 0.0] for group in GROUPS}
            for (group, _, kind), (numbers, payload) in laws[config].items():
                if ranks[group] == 1 or kind == "receive" and split["pp"] * split["cp"] == 1:
                    continue
                number = numbers[0] + numbers[1] * SEQUENCES
                given = sum(c * size for c, size in zip(payload, sizes(step), strict=True))
                time = 1000 * seconds(kind, ranks[group], number, given, options)
                more = (number, bytes_sent(kind, ranks[group], given), time)
                cells[group] = [have + one for have, one in zip(cells[group], more, strict=True)]
            shown = [f"{c[0]}, {amount(c[1])}, {c[2]:.2f} ms" if c[0] else "-" for c in cells.values()]
            print(f"| {job} | {config} | {' | '.join(shown)} |")


def print_ways_projected(found: dict[str, list[list[dict]]], options: argparse.Namespace) -> None:
    print(
        "\nThe metrics over more ranks of dp_cp: collectives, bytes that a rank sends, milliseconds of the "
        "formula\n"
    )
    counts = (4, 16, 256, 2048, 16384)
    print(f"| way | {' | '.join(f'{count:,} ranks' for count in counts)} |\n|---{'|---' * len(counts)}|")
    for way, exchanges in ways_of(found["dp 4"]).items():
        kind, number, given = exchanges[0]["kind"], len(exchanges), sum(one["payload"] for one in exchanges)
        cells = []
        for ranks in counts:
            time = 1000 * seconds(kind, ranks, number, given, options)
            cells.append(f"{number}, {amount(bytes_sent(kind, ranks, given))}, {time:.2f}")
        print(f"| {way} | {' | '.join(cells)} |")


def amount(size: float) -> str:
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


if __name__ == "__main__":
    with only_tables():
        main()
