"""docs/guides/collection.md names what there is: every option with its default, every count."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

from megatron_rl_corr.rollout import RolloutClient
from megatron_rl_corr.rollout.server_pool import Counts

PAGE = (Path(__file__).resolve().parents[2] / "docs/guides/collection.md").read_text()


def table(header):
    """Cells of the rows under a header."""
    rows = PAGE.split(f"| {header} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_options_of_the_page_then_those_of_the_client_with_their_defaults():
    parameters = list(inspect.signature(RolloutClient).parameters.values())[1:]
    expected = [(p.name, "" if p.default is p.empty else str(p.default)) for p in parameters]
    assert [(row[0].strip("`"), row[1]) for row in table("option")] == expected


def test_counts_of_the_page_then_those_that_are_counted():
    assert [row[0].strip("`") for row in table("count")] == [field.name for field in fields(Counts)]
    assert re.search(r"client\.counts\(\)", PAGE)
