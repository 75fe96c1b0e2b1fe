"""Writes the table of accepted families into docs/reference/models.md, from what
tests/matrix/test_accept_families.py left in runs/accepted: python scripts/acceptance_table.py
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS, PAGE = ROOT / "runs/accepted", ROOT / "docs/reference/models.md"
NUMBER_TYPES = ("float32", "bfloat16")
"""A table for each, between two marks; where nothing is left of one, its table stays."""
BEGIN, END = "<!-- acceptance in {} -->", "<!-- end of acceptance in {} -->"
HEAD = (
    "model",
    "largest \\|D\\|",
    "mean k3",
    "D = 0",
    "to other experts",
    "weights after the pushes",
    "a rank on the host",
)


def row(name: str, found: dict) -> str:
    """A line of the table, of an accept.json: the trial with the servers' experts, if there is one."""
    numbers = found["numbers"]
    narrow = numbers.get("replayed", numbers["own"])
    apart = max((one["disagreement"] for one in numbers.values() if "disagreement" in one), default=None)
    [weights] = [one["found"] for one in found["rows"] if one["what"].startswith("weights that are not")]
    wrong, every = re.fullmatch(r"(\d+) of (\d+)", weights).groups()
    peaks = [float(one["found"].partition(" ")[0]) for one in found["rows"] if "on the host" in one["what"]]
    cells = (
        f"`{name}`",
        f"{narrow['d_max']:.1e}",
        f"{narrow['k3']:.1e}",
        f"{narrow['exact']:.0%}",
        "" if apart is None else f"{apart:.1%}",
        f"{every} of {every} are the checkpoint's" if wrong == "0" else weights,
        f"{max(peaks):.1f} GiB",
    )
    return f"| {' | '.join(cells)} |"


def table(number_type: str, records: dict[str, dict]) -> list[str]:
    """The lines from BEGIN to END.

    Args:
        number_type: of trainer and servers.
        records: name of a tiny model -> its accept.json.
    """
    versions = {
        ", ".join(f"{name} {release}" for name, release in one["versions"].items())
        for one in records.values()
    }
    dates = sorted({one["date"] for one in records.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return [
        BEGIN.format(number_type),
        f"Measured {when} with {'; '.join(sorted(versions))}, in {number_type} on a CPU, "
        f"{len(records)} tiny models:",
        "",
        f"| {' | '.join(HEAD)} |",
        "|---" * len(HEAD) + "|",
        *(row(name, one) for name, one in records.items()),
        END.format(number_type),
    ]


def main() -> None:
    for number_type in NUMBER_TYPES:
        records = {}
        for path in sorted((RECORDS / number_type).glob("*.json")):
            found = json.loads(path.read_text())
            assert found["accepted"], f"{path} is of a model that was not accepted"
            records[found["name"]] = found
        if records:
            before, _, rest = PAGE.read_text().partition(BEGIN.format(number_type))
            _, _, after = rest.partition(END.format(number_type))
            PAGE.write_text(before + "\n".join(table(number_type, records)) + after)
        print(f"wrote {len(records)} rows of {number_type} into {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
