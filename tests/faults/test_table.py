"""The table of drills itself: a verdict for each row, whatever its tests say."""

from tests.faults.table import Row, markdown


def row(*verdicts, seen=()):
    return Row("server | killed", "goes on", list(verdicts), list(seen), 1.4).cells()


def test_row_when_a_case_fails_is_skipped_or_interrupted_then_it_is_no_pass():
    assert row("passed")[2:] == ("as promised", "PASS", "1")
    assert row("passed", "passed", seen=["x", "x"])[2:4] == ("x", "PASS (2 of 2)")
    assert row("passed", "failed")[3] == "FAIL (1 of 2)" and row("failed", "skipped")[3] == "FAIL (0 of 2)"
    assert row("passed", "skipped")[3] == "PASS (1 of 2)"
    assert row("skipped")[3] == "skipped" and row()[3] == "FAIL: it was interrupted"


def test_markdown_then_cells_hold_no_bars_and_passes_are_counted():
    text = markdown([Row("a | b", "c", ["passed"], [], 1.0), Row("d", "e", ["failed"], ["f\ng"], 2.0)], 3.0)
    assert (
        text.startswith("1 of 2 drills passed in 3 s") and "| a \\| b | c | as promised | PASS | 1 |" in text
    )
    assert "| d | e | f g | FAIL | 2 |" in text
