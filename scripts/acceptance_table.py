"""Writes the tables of accepted families into docs/reference/models.md, and what replay leaves of their
mismatch into docs/guides/moe.md, from what tests/matrix/test_accept_families.py left in runs/accepted:
python scripts/acceptance_table.py
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS, PAGE = ROOT / "runs/accepted", ROOT / "docs/reference/models.md"
MOE_PAGE = ROOT / "docs/guides/moe.md"
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
LEFT_BEGIN, LEFT_END = "<!-- left by replay -->", "<!-- end of left by replay -->"
LEFT_HEAD = (
    "model",
    "k3, own experts",
    "k3, replayed",
    "of the first: routing",
    "of the second: head",
    "rest",
    "decode",
)
TERMS = (("own", "routing"), ("replayed", "head"), ("replayed", "rest"), ("replayed", "decode"))
"""Of which trial which term of the ledger stands in the table."""


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


def left_row(name: str, found: dict) -> str:
    """A line of what replay leaves, of a model with experts."""
    shares = {}
    for note in found["notes"]:
        trial, _, words = note.partition(": ")
        if "parts: " in words:
            of_trial = re.findall(r"(\w+) (\d+) %", words.partition("parts: ")[2])
            shares |= {(trial, term): f"{percent}%" for term, percent in of_trial}
    numbers = found["numbers"]
    cells = (
        f"`{name}`",
        f"{numbers['own']['k3']:.1e}",
        f"{numbers['replayed']['k3']:.1e}",
        *(shares[one] for one in TERMS),
    )
    return f"| {' | '.join(cells)} |"


def left_table(records: dict[str, dict]) -> list[str]:
    """The lines from LEFT_BEGIN to LEFT_END. records: as for `table`, of bfloat16."""
    of_experts = {name: one for name, one in records.items() if "replayed" in one["numbers"]}
    return [
        LEFT_BEGIN,
        f"{_measured(of_experts)}, in bfloat16 on a CPU:",
        "",
        f"| {' | '.join(LEFT_HEAD)} |",
        "|---" + "|---:" * (len(LEFT_HEAD) - 1) + "|",
        *(left_row(name, one) for name, one in of_experts.items()),
        LEFT_END,
    ]


def table(number_type: str, records: dict[str, dict]) -> list[str]:
    """The lines from BEGIN to END.

    Args:
        number_type: of trainer and servers.
        records: name of a tiny model -> its accept.json.
    """
    return [
        BEGIN.format(number_type),
        f"{_measured(records)}, in {number_type} on a CPU, {len(records)} tiny models:",
        "",
        f"| {' | '.join(HEAD)} |",
        "|---" * len(HEAD) + "|",
        *(row(name, one) for name, one in records.items()),
        END.format(number_type),
    ]


def _measured(records: dict[str, dict]) -> str:
    versions = {
        ", ".join(f"{name} {release}" for name, release in one["versions"].items())
        for one in records.values()
    }
    dates = sorted({one["date"] for one in records.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Measured {when} with {'; '.join(sorted(versions))}"


def _replace(page: Path, lines: list[str]) -> None:
    """Between the first line's mark and the last one's."""
    before, _, rest = page.read_text().partition(lines[0])
    _, _, after = rest.partition(lines[-1])
    page.write_text(before + "\n".join(lines) + after)


def main() -> None:
    for number_type in NUMBER_TYPES:
        records = {}
        for path in sorted((RECORDS / number_type).glob("*.json")):
            found = json.loads(path.read_text())
            assert found["accepted"], f"{path} is of a model that was not accepted"
            records[found["name"]] = found
        if records:
            _replace(PAGE, table(number_type, records))
            print(f"wrote {len(records)} rows of {number_type} into {PAGE.relative_to(ROOT)}")
            if number_type == "bfloat16":
                _replace(MOE_PAGE, left_table(records))
                print(f"wrote what replay leaves into {MOE_PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
