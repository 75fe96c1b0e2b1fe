"""Writes the table of what replay leaves of the mismatch into docs/guides/moe.md, from what
tests/matrix/test_replay_residual.py left in runs/replay_residual: python scripts/replay_residual.py
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS, PAGE = ROOT / "runs/replay_residual", ROOT / "docs/guides/moe.md"
BEGIN, END = "<!-- replay residual -->", "<!-- end of replay residual -->"
SUMS = {
    "": "Megatron's own",
    "rolled": "the routes' slots gone round by one",
    "slots": "summed in the server's slot order",
    "weights": "weights by the server's formula",
    "behind": "weights behind the second product",
    "behind+slots": "behind it, and in slot order",
    "behind+slots+weights": "all three",
}
"""What tests/matrix/moe_sums_pretrain.py changes, in words."""


def table(records: dict[str, dict]) -> list[str]:
    """The lines between BEGIN and END. records: family -> its record."""
    versions = {
        ", ".join(f"{name} {release}" for name, release in one["versions"].items())
        for one in records.values()
    }
    dates = sorted({one["date"] for one in records.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lines = [
        BEGIN,
        f"Measured {when} with {'; '.join(sorted(versions))}, in float32 on a CPU, 4 of 8 experts a token,",
        "the same samples for each row of a family:",
        "",
        "| family | experts' outputs | D = 0 | mean \\|D\\| | largest, ulps | square: rest | decode |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for family, record in records.items():
        for sums, words in SUMS.items():
            one = record["sums"][sums]
            cells = (
                f"`{family}`",
                words,
                f"{one['rollout_corr/exact_fraction']:.0%}",
                f"{one['rollout_corr/log_ratio_abs_mean']:.1e}",
                f"{one['exact/ulps_max']:g}",
                _share(one["ledger/rest/share"]),
                _share(one["ledger/decode/share"]),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, END]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"  # without any mismatch there is nothing to share


def main() -> None:
    records = {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, behind = rest.partition(END)
    PAGE.write_text(before + "\n".join(table(records)) + behind)
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
