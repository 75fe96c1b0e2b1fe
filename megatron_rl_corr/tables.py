"""Tables, numbers and foreign texts as plain text: what every command prints is aligned here, and
nothing in it acts on a terminal.
"""

import math
import re
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


def visible(text: str) -> str:
    """The text without characters that act on a terminal or a page: they are shown as escapes,
    \\x1b for example.

    New lines and tabs stay. Others that are not printable, such as those that turn the direction of
    writing, do not.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text
    )


def one_message(text: str) -> str:
    """`visible`, with every line behind the first indented: a text that a message quotes can't look like
    another message.
    """
    return re.sub(r"\n(?=\S)", "\n  ", visible(text))
