"""Writes the signs of Unicode as ASCII and LaTeX: full-width digits, minus signs, powers,
fractions, roots, Greek.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import groupby

_SIGNS = {
    "−": "-",
    "‐": "-",
    "‑": "-",
    "﹣": "-",
    "⁄": "/",
    "∕": "/",
    "∗": "*",
    "。": ".",
    "、": ",",
    "′": "'",
    "’": "'",
    "‘": "'",
    "“": '"',
    "”": '"',
    "º": "°",
    "×": r"\times ",
    "÷": r"\div ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∙": r"\cdot ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "±": r"\pm ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∉": r"\notin ",
    "∅": r"\emptyset ",
    "∖": r"\setminus ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "∛": r"\sqrt[3]√",
}
_GREEK = {"lamda": "lambda", "final sigma": "varsigma"}


def plain_signs(text: str) -> str:
    r"""The text with ASCII and LaTeX in the place of other signs that mean the same; others stay,
    such as √, ° and £.

    Example: plain_signs("１２½ x²") == r"12\frac{1}{2} x^{2}", and "120₈" becomes "120_{8}".
    """
    found, text = [], re.sub(r"(?:^|(?<=[(\[,{=$]))\s*–(?=\s*[\d.\\])|(?<=[^\d\s]\s)–(?=[\d.])", "-", text)
    for kind, group in groupby(text, key=_kind):
        signs = "".join(group)
        if kind in ("<super>", "<sub>"):
            inner = "".join(_plain(sign) for sign in unicodedata.normalize("NFKC", signs))
            found.append(f"{'^' if kind == '<super>' else '_'}{{{inner}}}")
        else:
            found += [_plain(sign) for sign in signs]
    return "".join(found)


def _kind(sign: str) -> str:
    kind = unicodedata.decomposition(sign).partition(" ")[0]
    return kind if kind in ("<super>", "<sub>") and sign not in _SIGNS else ""


def _plain(sign: str) -> str:
    if sign.isascii():
        return sign if sign.isprintable() or sign.isspace() else ""
    if sign in _SIGNS:
        return _SIGNS[sign]
    category = unicodedata.category(sign)
    if category in ("Cf", "Cc"):
        return ""
    if category == "Nd":
        return str(unicodedata.decimal(sign))
    if unicodedata.decomposition(sign).startswith("<fraction>"):
        top, _, bottom = unicodedata.normalize("NFKC", sign).partition("⁄")
        return f"\\frac{{{top}}}{{{bottom}}}" if bottom else sign
    name = unicodedata.name(sign, "").lower()
    if name.startswith("greek small letter ") and name != "greek small letter mu":  # that is micro in units
        word = name.removeprefix("greek small letter ")
        return f"\\{_GREEK.get(word, word)} " if word.isalpha() or word in _GREEK else sign
    plain = unicodedata.normalize("NFKC", sign)
    return plain if plain == sign else "".join(_plain(one) for one in plain)
