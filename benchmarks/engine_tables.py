"""The tables of benchmarks/engines.py, from what it has measured; docs/reference/engines.md has them too."""

from collections.abc import Mapping
from statistics import median
from typing import Any

TITLES = {"sglang": "SGLang", "vllm": "vLLM"}


def tables(found: Mapping[str, Any]) -> list[str]:
    """Markdown: the machine, then distances, tokens a second and pushes.

    Args:
        found: what benchmarks/engines.py writes.
    """
    programs = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    model = found["model"]
    return [
        f"{found['date']}, {found['machine']}; load average {found['load'][0]:.1f} at the start, "
        f"{found['load'][1]:.1f} at the end. {programs}. A Qwen3-MoE of {model['parameters'] / 1e6:.1f} "
        f"million parameters: {model['layers']} layers, hidden size {model['hidden']}, 2 of "
        f"{model['experts']} experts.",
        "",
        *_distances(found["distance"]),
        "",
        *_speeds(found["speed"]),
        "",
        *_pushes(found["push"], model),
    ]


def _distances(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| server's dtype | log-probs | SGLang: mean, max | vLLM: mean, max |", "|---|---|---|---|"]
    for dtype, what in dict.fromkeys((row["dtype"], row["what"]) for row in rows):
        own = {row["engine"]: row for row in rows if (row["dtype"], row["what"]) == (dtype, what)}
        cells = [f"{own[engine]['mean']:.1e}, {own[engine]['max']:.1e}" for engine in TITLES]
        lines.append(_row(dtype, what, *cells))
    return lines


def _speeds(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| server's dtype | at a time | SGLang (tokens/s) | vLLM (tokens/s) | vLLM / SGLang |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        own = {engine: row[engine] for engine in TITLES}
        ratio = median(v / s for s, v in zip(own["sglang"], own["vllm"], strict=True))
        lines.append(
            _row(row["dtype"], row["concurrency"], *(f"{median(own[e]):.0f}" for e in TITLES), f"{ratio:.2f}")
        )
    return lines


def _pushes(rows: list[dict[str, Any]], model: Mapping[str, Any]) -> list[str]:
    lines = [
        "| transport | server | MB | push (s) | MB/s | of it checksums (s) | probe (ms) | max off after it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        push = median(row["seconds"])
        lines.append(
            _row(
                f"`{row['transport']}`",
                TITLES[row["engine"]],
                f"{model['bytes'] / 1e6:.0f}",
                f"{push:.2f}",
                f"{model['bytes'] / push / 1e6:.0f}",
                f"{median(row['verify_s']):.2f}",
                f"{median(row['probe_s']) * 1e3:.0f}",
                f"{max(row['probe_max']):.1e}",
            )
        )
    return lines


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
