"""Tables and numbers as plain text: what every command prints is aligned here."""

import math
from collections.abc import Sequence

GAP = "  "


def pad_cells(cells: Sequence[str], widths: Sequence[int], align: str = "") -> list[str]:
    """The cells of one row, each padded to its column's width.

    Args:
        align: a letter for each column, l (left) or r (right); columns beyond the last letter
            are left-aligned.
    """
    sides = align.ljust(len(cells), "l")
    return [
        cell.rjust(width) if side == "r" else cell.ljust(width)
        for cell, width, side in zip(cells, widths, sides, strict=True)
    ]


def text_table(rows: Sequence[Sequence[str]], *, align: str = "", indent: str = "") -> list[str]:
    """A line for each row, with columns as wide as their widest cell and two spaces between them.

    Example: `text_table([("a", "1"), ("bc", "10")], align="lr")` is `["a    1", "bc  10"]`.

    Args:
        rows: the rows' cells, all of the same number; a header is a row like any other.
        align: as in `pad_cells`.
        indent: put before every line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [(indent + GAP.join(pad_cells(row, widths, align))).rstrip() for row in rows]


def readable(value: float | None) -> str:
    """The number in at most nine characters and four significant digits; `-` for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(float(value))
    magnitude = abs(value)
    if isinstance(value, int) and magnitude < 10_000_000:
        return str(value)
    if magnitude and not 1e-3 <= magnitude < 1e6:
        return f"{value:.2e}"
    return f"{value:.0f}" if magnitude >= 1000 else f"{value:.4g}"
