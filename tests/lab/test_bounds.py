"""No bound is below the bias that enumeration finds, and some are not far above it."""

import math
from collections import Counter

import pytest
import torch

from lab.bounds import (
    BOUNDS,
    CERTIFIED_ARMS,
    MEASURED,
    WORLDS,
    Shown,
    broken,
    certificate,
    looseness,
    random_cases,
    rows_of_cases,
    table_of_bounds,
)
from lab.estimators import all_arms
from lab.map import DRAWN, Cell, cases_of, enumerable_arms
from lab.mismatch import KINDS
from lab.run import make_bounds
from tests.tiers import long, matrix

pytestmark = matrix


@pytest.fixture(scope="module")
def rows():
    return [row for seed in range(12) for row in rows_of_cases(seed)]


def test_bounds_when_cases_are_random_then_none_is_below_the_bias(rows):
    assert [(row["case"], row["arm"], broken(row)) for row in rows if broken(row)] == []
    assert len({row["case"] for row in rows}) > 100


def test_bounds_when_compared_then_more_knowledge_is_no_worse(rows):
    for row in rows:
        assert row["limit"] <= row["normed"] * (1 + 1e-9) + 1e-12
        assert row["normed"] <= row["sampled"] * (1 + 1e-9) + 1e-12
        assert row["normed"] <= row["trivial"] * (1 + 1e-9) + 1e-12
        assert row["distributions"] <= row["top"] * (1 + 1e-9) + 1e-12
        assert not row["worst"] > row["limit"] + MEASURED * row["furthest"]


def test_bounds_when_cases_are_random_then_some_are_close(rows):
    # so that a bound that is too small by a third would be seen
    for bound in ("sampled", "normed", "limit", "distributions"):
        assert looseness(rows, bound)[0] < 1.5


def test_row_when_its_bound_is_too_small_then_it_is_told():
    fine = dict.fromkeys(BOUNDS, 1.0) | {"bias": 0.5, "furthest": 1.0}
    assert broken(fine) == [] and broken(fine | {"limit": 0.4}) == ["limit"]


def test_cases_when_drawn_then_of_all_kinds_and_many_worlds():
    cases = [shown for seed in range(40) for shown in random_cases(seed)]
    assert {shown.kind for shown in cases} == set(KINDS)
    lengths = Counter(shown.case.world.length for shown in cases)
    assert set(lengths) >= {1, 2, 3, 4, 5, 6}
    assert {world.length for world in WORLDS} == set(range(1, 9))


@long
def test_bounds_when_cases_are_10000_then_none_is_below_the_bias():
    cases, arms, seed, failures = set(), set(), 0, []
    while len(cases) < 10_000:
        for row in rows_of_cases(seed):
            cases.add(row["case"])
            arms.add(row["arm"])
            if broken(row):
                failures.append((row["case"], row["arm"], broken(row)))
        seed += 1
    assert failures == []
    assert arms == {arm.name for arm in enumerable_arms()}


@pytest.mark.parametrize("arm", CERTIFIED_ARMS)
def test_certificate_when_batches_are_drawn_then_above_the_bias(arm):
    cell = Cell("outcome", "rounding", 1.0, 4)
    shown = Shown(cell.kind, cell.size, next(cases_of(cell, 1)), torch.empty(0), torch.empty(0))
    small, large = (
        certificate(shown, all_arms()[arm], largest=CERTIFIED_ARMS[arm], batch=batch, batches=100)
        for batch in (64, 16384)
    )
    assert small.below <= 5 and large.below <= 5
    assert large.bias < large.enumerated < large.certified < 1.1 * large.enumerated < small.certified
    assert large.certified < large.trivial


def test_table_when_made_then_a_row_an_arm_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.run.CERTIFIED_CELLS", (Cell("outcome", "rounding", 1.0, 1),))
    make_bounds(tmp_path, 2, 1)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"bounds.md", "bounds.svg", "certificates.md"}
    text = (tmp_path / "bounds.md").read_text(encoding="utf-8")
    assert text.count("\n| none |") == 2 and "in 0 of them a bound was below" in text
    assert (tmp_path / "certificates.md").read_text(encoding="utf-8").count("| rounding 1, 1 |") == 9
    rows = [dict.fromkeys(BOUNDS, 1.0) | {"bias": 2.0, "furthest": 1.0, "worst": math.nan}]
    rows = [rows[0] | {"case": (0, 0), "arm": arm, "length": 1} for arm in DRAWN]
    assert "1 random cases; in 1 of them" in table_of_bounds(rows)
