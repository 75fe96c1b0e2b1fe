"""The Markdown of a whole check, for docs/explanation/benchmarks.md."""

import datetime
from collections.abc import Sequence

from tools.gpu_check.runner import Result


def markdown(results: Sequence[Result], device: str) -> str:
    """A heading with machine and date, a row a finding, what was not run or failed, and the
    benchmarks' own tables.
    """
    machines = [result.outcome.machine for result in results if result.outcome is not None]
    lines = [f"## GPU check: {machines[0] if machines else 'no part ran'}, {datetime.date.today()}", ""]
    if device == "cpu":
        lines += ["A rehearsal: there is no GPU here.", ""]
    lines += ["| part | what | found | bound |", "|---|---|---|---|"]
    for result in results:
        if result.reason:
            lines.append(f"| {result.part.name} | {_cell(result.state)}: {_cell(result.reason)} | | |")
        for one in result.outcome.findings if result.outcome else ():
            lines.append(
                f"| {result.part.name} | {_cell(one.what)} | {_cell(one.found)} | {_cell(one.bound)} |"
            )
        if result.outcome and result.outcome.tables:
            lines.append(
                f"| {result.part.name} | ran in {result.seconds:.0f} s, its results were right | below | |"
            )
    left_out = [text for result in results if (text := result.left_out(device))]
    if left_out:
        lines += ["", "Not run: " + "; ".join(left_out) + "."]
    for result in results:
        if result.outcome and result.outcome.tables:
            lines += ["", f"### {result.part.name}", "", result.outcome.tables]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
