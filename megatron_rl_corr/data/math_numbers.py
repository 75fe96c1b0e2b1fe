r"""Writes numbers as digits or fractions: thousands, mixed numbers, e-notation, other bases,
repeating decimals.

Example: plain_numbers("1 1/2") == r"\frac{3}{2}", plain_numbers("10{,}000") == "10000",
plain_numbers("0x1F") == "31".
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from megatron_rl_corr.data.math_units import SCALES
from megatron_rl_corr.data.unreadable import Unreadable

MOST_DIGITS = 40
"""Digits of a number that is written out; larger ones keep their power of ten."""
_NAMES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "eleven": 11,
    "twelve": 12,
    "sixteen": 16,
}
_BASE_NUMBER = rf"(\d+|{'|'.join(_NAMES)})"
_THIN = r"(?:\\[,;:!> ]|~|\{\\,\}|\\thinspace\s*|,\\!\s*|\{,\}|'|_| )"
_THOUSANDS = re.compile(rf"(?<![\d.,_A-Za-z])[1-9]\d{{0,2}}(?:({_THIN})\d{{3}})(?:\1\d{{3}})*(?!\d)")
_COMMAS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?!\.?\d|,\d)")
_POINTS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:\.\d{3}){2,}(?![\d.,]\d|\d)")
_UNCLEAR = re.compile(
    r"(?<![\d.,])(?:\d{1,2}(?:,\d{2})+,\d{3}|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:,\d{3})+\.\d+\.\d+)(?![\d.,]\d|\d)"
)
_FRACTION = r"(?:(\d+)\s*/\s*(\d+)(?![\d.]*\d)|\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\})"
_MIXED = re.compile(rf"(?<![\w.^_}}\\/)])(\d+)(?:\s+(?=\d)|\s*(?=\\frac)){_FRACTION}")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d+)(?![\w.])")
_POWER_OF_TEN = re.compile(
    r"(?<![\w.^_}/])(\d+(?:\.\d+)?)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\{\s*([+-]?\d+)\s*\}(?!\s*[\d^!])"
)
_PREFIXED = re.compile(r"(?<![\w.])0([xX][0-9A-Fa-f]+|[bB][01]+|[oO][0-7]+)(?![\w.])")
_BASE = re.compile(
    r"(?<![A-Za-z0-9.\\}_^])(?:\(\s*([0-9A-Za-z]*\d[0-9A-Za-z]*|[A-Z]{2,})\s*\)"
    r"|([0-9A-Za-z]*\d[0-9A-Za-z]*|[A-Z]{2,}))\s*"
    rf"(?:_\s*(?:\{{\s*\(?\s*(?:\\text\s*\{{)?\s*(?:base\s*)?{_BASE_NUMBER}\s*\}}?\s*\)?\s*\}}|{_BASE_NUMBER})"
    rf"|\s\(?(?:in )?base[ -]*{_BASE_NUMBER}\)?)"
)
_REPEATING = re.compile(r"(\d+)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_SCALE = re.compile(rf"(\d+(?:\.\d+)?)\s*(\x01?)\s*({'|'.join(SCALES)})s?(?![A-Za-z])")


def plain_numbers(text: str) -> str:
    """The text with its numbers in digits, fractions as \\frac{a}{b}.

    Raises:
        Unreadable: a number has two meanings, or a digit that its base does not have.
    """
    text = _fractions(_joined(text))
    text = _SCIENTIFIC.sub(lambda match: _written(match[1], int(match[2])), text)
    text = _PREFIXED.sub(lambda match: str(int("0" + match[1], 0)), text)
    text = _BASE.sub(_of_base, text)
    text = _REPEATING.sub(_of_repeating, text)
    text = re.sub(r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))|(?<=\d)\s+[xX]\s+(?=\d)", r"\\times ", text)
    text = re.sub(r"(?:\^|\*\*)\s*([+-]?\d+)(?![\d.])", r"^{\1}", text)
    text = _POWER_OF_TEN.sub(lambda match: _written(match[1], int(match[2])), text)
    text = _MIXED.sub(_of_mixed, text)
    text = _SCALE.sub(lambda match: _times(match[1], SCALES[match[3]]) + match[2], text).replace(
        "\x01\x02", ""
    )
    return text


def percentages(text: str) -> str:
    r"""The text with 12.5\% for \frac{25}{2}\% and 25/2\%, which math-verify can't read, and \frac{1}{3} for
    \frac{100}{3}\%.

    Raises:
        Unreadable: another quotient ends in a percent sign, which may be the divisor's own.
    """

    def written(match: re.Match) -> str:
        value = Fraction(int(match[1]), int(match[2]))
        if 10**20 % value.denominator == 0:
            return _plain(Decimal(value.numerator) / Decimal(value.denominator)) + r"\%"
        return f"\\frac{{{value.numerator}}}{{{value.denominator * 100}}}"

    text = re.sub(r"(?<![\w.^)}\]/])(\d+)\s*/\s*(\d+)\s*(?=\\%)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*([1-9]\d*)\s*\}\s*\\%", written, text)
    if (quotient := re.search(r"(?:/|\\div)[^,=]*\\%", text)) is not None:
        raise Unreadable(f"the percent sign in {quotient[0]!r} may belong to all or to the divisor")
    return text


def _joined(text: str) -> str:
    """The text with numbers of several groups of thousands in one piece."""
    if (unclear := _UNCLEAR.search(text)) is not None and not _in_brackets(text, unclear.start()):
        raise Unreadable(f"{unclear[0]!r} may be a list or a number")
    for match in reversed(list(_THOUSANDS.finditer(text))):
        rest = text[match.end() :]
        if re.match(r"\s*(?:/|\\[dtc]?frac|,\d)", rest):
            raise Unreadable(f"{(match[0] + rest[:4])!r} may be a mixed number or thousands")
        text = text[: match.start()] + re.sub(rf"{_THIN}(?=\d{{3}})", "", match[0]) + rest
    text = re.sub(r"(?<=\d)\{,\}(?=\d)", ".", text)
    for pattern, sign in ((_COMMAS, ","), (_POINTS, ".")):
        for match in reversed(list(pattern.finditer(text))):
            if not _in_brackets(text, match.start()):
                text = text[: match.start()] + match[0].replace(sign, "") + text[match.end() :]
    for zeros in re.finditer(r"\d,0\d+,\d", text):
        if not _in_brackets(text, zeros.start()):
            raise Unreadable(f"{zeros[0]!r} may be a list or a number")
    return text


def _in_brackets(text: str, place: int) -> bool:
    """True if a place is within ( ), [ ] or \\{ \\}, where commas part the elements of a list."""
    before = text[:place]
    return any(
        before.count(left) > before.count(right) for left, right in (("(", ")"), ("[", "]"), (r"\{", r"\}"))
    )


def _fractions(text: str) -> str:
    r"""The text with \frac and both braces, for \dfrac12 and \frac1{2}."""
    text = re.sub(r"\\[dtc](frac|binom)(?![A-Za-z])", r"\\\1", text)
    text = re.sub(r"\\binom\s*(\d)\s*(\d)(?!\d)", r"\\binom{\1}{\2}", text)
    text = re.sub(
        r"(?:\{|^)\s*([^{}]*?)\s*\\over(?![A-Za-z])\s*([^{}]*?)\s*(?:\}|$)", r"\\frac{\1}{\2}", text
    )
    text = re.sub(r"\\frac\s*(\\pi|[A-Za-z])\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    if re.search(r"\\frac\s*\d\s*\d\d", text):
        raise Unreadable(r"\frac has no braces, and so its parts no end")
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*(?=\{)", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d)(?!\d)", r"\1{\2}", text)
    if re.search(r"\d\s*(?:and|\\text\s*\{\s*and\s*\})\s*(?:\d+\s*/|\\frac)", text):
        raise Unreadable("it may be a mixed number or two numbers")
    return text


def _of_mixed(match: re.Match) -> str:
    whole, top, bottom = int(match[1]), int(match[2] or match[4]), int(match[3] or match[5])
    if top >= bottom:
        raise Unreadable(f"{match[0]!r} may be a mixed number or a product")
    return f"\\frac{{{whole * bottom + top}}}{{{bottom}}}"


def _of_base(match: re.Match) -> str:
    digits, name = match[1] or match[2], match[3] or match[4] or match[5]
    base = _NAMES.get(name) or int(name)
    if match[1] is None and match[5] is None and not digits.isdigit():  # 2a_{12} may be a times 2
        if any(int(digit, 36) >= base for digit in digits):
            return match[0]
        if not digits.isupper() or digits.isalpha() and base != 16:
            raise Unreadable(f"{match[0]!r} may be a number of base {base} or a product")
    if not 2 <= base <= 36:
        raise Unreadable(f"{match[0]!r} is not a number of a base from 2 to 36")
    try:
        return str(int(digits, base))
    except ValueError:
        raise Unreadable(f"{digits!r} has a digit that base {base} does not have") from None


def _of_repeating(match: re.Match) -> str:
    whole, once, again = match[1], match[2], match[3]
    value = Fraction(int(whole + once + again) - int(whole + once), 10 ** len(once) * (10 ** len(again) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _written(mantissa: str, exponent: int) -> str:
    if abs(exponent) + len(mantissa) > MOST_DIGITS:
        return f"{mantissa} \\cdot 10^{{{exponent}}}"
    return _plain(Decimal(mantissa).scaleb(exponent))


def _times(number: str, factor: int) -> str:
    return _plain(Decimal(number) * factor)


def _plain(number: Decimal) -> str:
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
