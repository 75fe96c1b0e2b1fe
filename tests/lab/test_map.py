"""A small map has the order that the theory gives it, and its tables and figures are made."""

import csv

import pytest

from lab.estimators import all_arms
from lab.exact import Moments
from lab.map import DRAWN, Cell, cells_of, means_of, rows_of
from lab.run import main, show_map
from lab.verdicts import MEASURES, best, table_of_best, table_of_order


@pytest.fixture(scope="module")
def rows():
    arms = [arm for arm in all_arms().values() if arm.name in DRAWN]
    cells = [Cell("parity", "rounding", size, length) for size in (0.1, 1.0) for length in (1, 4)]
    return [row for cell in cells for row in rows_of(cell, arms, 2)]


def test_bias_when_lengths_grow_then_tokens_keep_some_and_sequences_none(rows):
    means = means_of(rows)
    one, four = (means[Cell("parity", "rounding", 1.0, length)] for length in (1, 4))
    assert one["token_unbounded"].bias2 < 1e-12 < 1e-3 < one["none"].bias2
    assert four["sequence_unbounded"].bias2 < 1e-12 < 1e-3 < four["token_unbounded"].bias2
    assert four["token_unbounded"].bias2 < four["none"].bias2
    assert four["sequence_truncate"].bias2 < four["sequence_mask"].bias2


def test_variance_when_weights_multiply_then_the_longer_product_has_more(rows):
    four = means_of(rows)[Cell("parity", "rounding", 1.0, 4)]
    assert four["sequence_unbounded"].variance > 1.5 * four["token_unbounded"].variance
    assert four["sequence_truncate"].variance < four["sequence_unbounded"].variance


def test_best_when_batches_grow_then_bias_decides(rows):
    four = means_of(rows)[Cell("parity", "rounding", 1.0, 4)]
    assert best(four, DRAWN, Moments.error, 10**6) == "sequence_unbounded"
    assert best(four, DRAWN, Moments.error, 1) != "sequence_unbounded"
    small = means_of(rows)[Cell("parity", "rounding", 0.1, 4)]
    least = small[best(small, DRAWN, Moments.error, 64)]
    assert small["none"].error(64) < 1.1 * least.error(64)
    assert small["none"].error(10**6) > 100 * small["sequence_unbounded"].error(10**6)


def test_best_when_errors_are_alike_then_the_plainest():
    arms = {"token_truncate": Moments(0.0, 1.0, 1.0), "none": Moments(0.0, 1.01, 1.0)}
    assert best(arms, ("none", "token_truncate"), Moments.error, 10) == "none"
    arms["none"] = Moments(0.0, 1.1, 1.0)
    assert best(arms, ("none", "token_truncate"), Moments.error, 10) == "token_truncate"


def test_tables_when_made_then_a_row_a_cell(rows):
    means = means_of(rows)
    for measure in MEASURES:
        assert table_of_best(means, measure).count("| parity |") == 4
    # of the four cells two are of one token, where both weights are the same
    order = table_of_order(means, "parity", "error", (1,))
    assert "| 0/2/0 |" in order


def test_figures_when_drawn_then_files(rows, tmp_path):
    show_map(tmp_path, rows)
    for name in ("map_parity_error.svg", "map_parity_direction.svg", "laws.svg"):
        assert (tmp_path / name).read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_command_when_run_then_a_row_an_arm_and_policy(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.map.POLICIES", {1: 1})
    main(["--out", str(tmp_path), "--parts", "map", "--kinds", "top_p", "--lengths", "1", "--workers", "1"])
    with (tmp_path / "map.csv").open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    single = [arm for arm in all_arms().values() if not arm.couples_samples]
    # five sizes and a policy; two tasks have the drawn arms alone
    assert len(found) == 5 * (len(single) + 2 * len(DRAWN))
    assert {row["arm"] for row in found} == {arm.name for arm in single}


def test_cells_when_listed_then_the_longest_first():
    lengths = [cell.length for cell in cells_of(["dense"], ["lag"])]
    assert lengths == sorted(lengths, reverse=True) and len(lengths) == 25
