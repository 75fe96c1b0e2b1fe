"""Text tables and numbers, character by character."""

import math

import pytest

from megatron_rl_corr.tables import pad_cells, readable, text_table


def test_table_when_columns_are_aligned_then_to_their_widest_cell_and_without_trailing_blanks():
    rows = [("metric", "a", "note"), ("kept", "0.5", ""), ("x", "12345", "ok")]
    assert text_table(rows, align="lr", indent="> ") == [
        "> metric      a  note",
        "> kept      0.5",
        "> x       12345  ok",
    ]
    assert text_table([]) == []


def test_table_when_rows_have_unlike_lengths_then_an_error():
    with pytest.raises(ValueError):
        text_table([("a", "b"), ("c",)])


def test_cells_when_wider_than_their_column_then_whole():
    assert pad_cells(["abc", "d"], [2, 3], "rr") == ["abc", "  d"]


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "-"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (12, "12"),
        (12_345_678, "1.23e+07"),
        (0.0, "0"),
        (0.00012345, "1.23e-04"),
        (0.0012345, "0.001234"),
        (2 / 3, "0.6667"),
        (1234.5, "1234"),
        (2.5e6, "2.50e+06"),
    ],
)
def test_readable_when_written_then_at_most_nine_characters(value, text):
    assert readable(value) == text and len(text) <= 9
