r"""How `math` reads a text as one answer: common notations become LaTeX that math-verify reads
to its last sign.

math-verify multiplies letters that it does not know, leaves out subscripts of numbers and takes units off,
so that it reads "120_8" as 120 and "0x1F" as 0. Here a text either becomes LaTeX of which this can't be,
or is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from megatron_rl_corr.data.math_lists import elements
from megatron_rl_corr.data.math_names import has_several_values
from megatron_rl_corr.data.math_numbers import percentages, plain_numbers
from megatron_rl_corr.data.math_signs import plain_signs
from megatron_rl_corr.data.math_units import (
    COUNTS,
    CURRENCIES,
    NO_UNITS,
    NUMBERS,
    POWERS,
    SINGLE,
    canonical,
    is_known,
    is_spaced,
)
from megatron_rl_corr.data.unreadable import Unreadable

OPEN, CLOSE = "\x01", "\x02"
"""Around the words of a \\text{...}, once it is known that they are words."""
_FUNCTIONS = """
arcsin arccos arctan arccsc arcsec arccot sinh cosh tanh sin cos tan csc sec cot log ln exp sqrt pi theta
alpha beta gamma lambda gcd lcm
"""
FUNCTIONS = tuple(_FUNCTIONS.split())
_COMMANDS = """
frac binom infty cdot times div pm le leq ge geq lt gt ne neq in notin cup cap setminus emptyset varnothing
mathbb lfloor rfloor lceil rceil lvert rvert vert langle rangle text max min det sum prod int lim to
overline vec bar delta epsilon varepsilon zeta eta vartheta iota kappa mu nu xi rho sigma tau upsilon phi
varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega
"""
COMMANDS = frozenset((*FUNCTIONS, *_COMMANDS.split()))
"""Commands that math-verify reads as what they mean."""
_SHORT_WORDS = """
yes no odd even true none dne red
"""
SHORT_WORDS = frozenset(_SHORT_WORDS.split())
MOST_WORDS = 3
MOST_JOINED = 8
"""Inequalities with "or" between them: sympy takes seconds for a union of dozens."""
LONG_WORD = 4
"""Letters in a row from which on they are a word, not variables that are multiplied."""

_SPACE = re.compile(r"(?<!\\)\\(?:[,;:> ]|(?:quad|qquad|thinspace)(?![A-Za-z])|hspace\{[^{}]*\})|~|\s+")
_TEXT = re.compile(
    r"\\(?:text|textrm|textnormal|textit|textbf|textsf|texttt|mbox|mathrm|mathsf|rm|operatorname)"
    r"\s*\{([^{}]*)\}"
)
_UNIT_TEXT = re.compile(
    r"\\(?:text|mathrm|textrm|rm)\s*\{((?:[A-Za-z]++(?:\^(?:\{-?\d\}|-?\d))?"
    r"(?:\s|/|\\[,;:]|\\cdot(?![A-Za-z]))*+)++)\}"
)
_BOLD = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathcal|boxed|fbox|displaystyle|textstyle|phantom)"
    r"(?![A-Za-z])(?:\s*\{([^{}]*)\})?"
)
_MARK = re.compile(
    r"(?:\\(?:boxed|fbox|mathbf|boldsymbol|bm|displaystyle)\s*)?(?=\{)|\\displaystyle(?![A-Za-z])"
)
_AROUND = [(r"\(", r"\)"), (r"\[", r"\]"), *((sign, sign) for sign in ("$$", "$", "**", "`", "__"))]
"""What may stand around an answer, and is no part of it."""
_COLOR = re.compile(r"\\(?:text)?color\s*\{[^{}]*\}")
_NAMED = re.compile(
    r"^(?:\\text\s*\{(?P<text>[A-Za-z ]{2,})\}|(?=[ a-z]*[A-Za-z]{4})(?P<plain>[A-Za-z ]++))\s*[:=]+\s*"
    r"(?=\S)"
)
"""What names the value behind it: Area = 12, Answer: 72."""
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?")
_PERCENT = re.compile(
    rf"\s*(?:\\?%|{OPEN}\s*(?:percent|per cent|pct)\s*{CLOSE}|(?<![A-Za-z])(?:percent|per cent|pct)"
    r"(?![A-Za-z]))"
)
_DEGREES = re.compile(
    r"\^\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?|\^\s*\{?\s*°\s*\}?|\\degree(?![A-Za-z])"
)
_TH = "(?:st|nd|rd|th)"
_ORDINAL = re.compile(
    rf"(?<=\d)\s*(?:\^\s*\{{\s*{OPEN}?{_TH}{CLOSE}?\s*\}}|\^?\s*{OPEN}{_TH}{CLOSE}|{_TH}(?![A-Za-z]))"
)
_CURRENCY = re.compile(rf"([-+]?)\s*(?:US\s*)?([{re.escape(CURRENCIES)}]|USD|EUR|GBP)\s*([-+]?)(?=[\d.\\])")
_WORD = rf"(?:{OPEN}[^{CLOSE}]*{CLOSE}|[^\W\d_]++|[{re.escape(CURRENCIES)}°])"
_POWER = r"(?:\s*\^\s*(?:\{-?\d\}|-?\d)|(?<=[A-Za-z])\d(?!\d))?"
_UNIT = re.compile(
    rf"(?P<value>.*(?:[\d)}}\]!]|\\pi|[A-Za-z](?=\s*{OPEN})))(?P<space>\s*+)"
    rf"(?P<unit>(?>{_WORD}{_POWER})(?>\s*+(?:/|\\cdot|-)?\s*+(?>{_WORD}{_POWER}))*+)$"
)
_CHOICE = re.compile(r"(?:\(([A-Z])\)|([A-Z])[.):])\s*(?=[\d\\$(\w-])(?!\\c[ua]p|\\times|\\cdot|\\in)(.+)")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|csc|sec|cot)(?![A-Za-z])")
_BEFORE_BRACKET = re.compile(
    r"(?:\\(?:pi|theta|alpha|beta|lambda)|(?<![A-Za-z\\])[A-Za-z]*[a-eh-z]\^\{[^{}]*\}|\d[a-eh-z])\s*(?=\()"
)
"""What a bracket behind it multiplies, and does not make a function of: \\pi(3), x^2(3), 5x(2)."""
_CALLED = re.compile(r"(?<![A-Za-z\\])(?!O\()[A-Za-z]+(?:_\w|_\{\w+\})?\s*\(\s*-?\s*\d[\d./]*\s*\)(?!\s*=)")
_DIVISOR = re.compile(rf"/ ?\d+(?:\.\d+)?( ?)(?=[A-Za-z]|\\(?:{'|'.join(FUNCTIONS)}|frac|binom)(?![A-Za-z]))")
"""One with a factor behind it."""
_UNCERTAIN = (
    re.compile(r"-?(?:\\[dt]?frac(?![a-z])|[\d.,/{}%\\])+\s+\((?:\\[dt]?frac(?![a-z])|[-\d./^*%{}\\ ])+\)"),
    re.compile(r"\d+(?:\.\d+)?(?:-\d+(?:\.\d+)?)+"),
    re.compile(r"\d+(?:\.\d+)?\s*-\s*\d+(?:\.\d+)?\s*(?:\\?%|percent)"),
)
"""8 (2^3) is a value that is given again, or a product; 2-4 a range, a telephone's number or a difference."""
_ROMAN = re.compile(r"(?<![A-Za-z])(?:[ivx]{2,}|[IVX]{2,})(?![A-Za-z])")
_ROMANS = re.compile(r"\(?[IVXivx]+\)?(?:(?:\s*,\s*|\s+(?:and|or)\s+|\s*,\s*(?:and|or)\s+)\(?[IVXivx]+\)?)*")
_ROWS = re.compile(r"\[\s*(?:\[[^\[\]]*\]\s*,\s*)+\[[^\[\]]*\]\s*\]")
_BUILT = re.compile(
    r"\\\{\s*(?P<name>[A-Za-z])\s*(?:\\in\s*(?P<of>\S+?)\s*)?(?::|\||\\mid(?![A-Za-z]))(?P<where>.+)\\\}"
)
_ORDER = re.compile(r"(<|>|\\[lg](?:eq?|t)(?![A-Za-z]))")
_MATRIX = re.compile(r"\\(?:begin|end)\s*\{[pbvBV]?matrix\}")
_TOKEN = re.compile(
    rf"\\\\|\\[A-Za-z]+|\\[{{}}|%]|\d+(?:\.\d+)?|[A-Za-z]+|{OPEN}[^{CLOSE}]*{CLOSE}"
    r"|[-+*/^_=<>!|(){}\[\],;&: ]"
)


@dataclass(frozen=True)
class Reading:
    """One way to read a text.

    Example: Reading("12", unit="cm^2") of "12 square centimeters", Reading(None, words="monday") of "Monday".
    """

    latex: str | None
    """For math-verify; None: words."""
    words: str | None = None
    """In lower case, where all is letters."""
    unit: str | None = None
    """Behind it, or the currency before it, as `math_units.canonical` writes it."""
    loose: bool = False
    """An answer may mean it, a label does not: 5m as five metres, 3,14 as a decimal."""


def readings(text: str) -> list[Reading]:
    """All ways to read a text, at least one.

    Raises:
        Unreadable: there is none; the message says what stands in the way.
    """
    text = _unwrapped(plain_signs(text))
    if not text:
        raise Unreadable("it is empty")
    choice = _CHOICE.fullmatch(_with_words(text).strip())
    if choice is not None:
        return _of_choice(choice[1] or choice[2], choice[3])
    found, problem = [], None
    for variant, loose in _variants(text):
        try:
            found += [replace(one, loose=one.loose or loose) for one in _read(variant)]
        except Unreadable as error:
            problem = problem or error
    if not found:
        raise problem or Unreadable("it can't be read")
    return found


def label_reading(text: str) -> Reading:
    """The one way to read a label.

    Raises:
        Unreadable: there is none, or more than one.
    """
    found = list(dict.fromkeys(one for one in readings(text) if not one.loose))
    if not found:
        raise Unreadable(f"{text.strip()[:40]!r} may mean several things; write it so that it means one")
    words = set(re.split("[- ]", found[0].words or ""))
    if words & NUMBERS and words <= NUMBERS | {"a", "an", "and"}:
        raise Unreadable(f"{text.strip()[:40]!r} is a number in words; write it in digits")
    if len(found) > 1:
        ways = " or ".join(repr(one.latex if one.words is None else one.words) for one in found[:2])
        raise Unreadable(f"it can be read as {ways}; write which")
    return found[0]


def _of_choice(letter: str, rest: str) -> list[Reading]:
    """Readings of "(C) 12": the letter, and what stands behind it."""
    found = [Reading(letter, words=letter.lower())]
    try:
        # "A) B" is A: who names two letters has chosen the first.
        return found + [one for one in readings(rest) if not re.fullmatch("[A-Z]", one.latex or "")]
    except Unreadable:
        return found


def _variants(text: str) -> list[tuple[str, bool]]:
    """The text, once for each thing that it may mean; with whether only an answer may."""
    text = re.sub(
        r"(?<=\d)\s*(?:\\text\s*\{\s*)?\(\s*([A-Za-z][A-Za-z ]+)\)(?:\s*\})?$", r"\\text{ \1}", text
    )
    if (about := re.fullmatch(r"(?:\\approx(?![A-Za-z])|≈)\s*(.*)", text)) is not None:
        return [(about[1], True)]
    if (ratio := re.fullmatch(r"(\d+)\s*(?:to|\\text\s*\{\s*to\s*\})\s*(\d+)", text)) is not None:
        return [(f"{ratio[1]}:{ratio[2]}", True)]
    if any(form.fullmatch(_SIZES.sub("", text)) for form in _UNCERTAIN):
        return [(text, True)]
    if (date := re.fullmatch(r"\d{4}([-/])\d\d?\1\d\d?|\d\d?/\d\d?/\d{4}", text)) is not None:
        raise Unreadable(f"{date[0]!r} may be a date")
    euler = re.fullmatch(r"(-?\d+)e([+-]\d)", text)
    if euler and euler[1].lstrip("-") != "1":  # 5e-3 is 0.005, or 5e - 3
        return [(text.replace("e", "E"), False), (f"{euler[1]} e {euler[2]}", False)]
    comma = re.fullmatch(r"(-?\d+),(\d+)", text)
    if re.fullmatch(r"-?\d+,\d+[eE][-+]?\d+", text):
        raise Unreadable(f"{text!r} may be a list or a decimal")
    if comma and not re.fullmatch(r"-?[1-9]\d{0,2},\d{3}", text):  # 3,14 is a list, or a decimal
        decimal = f"{comma[1]}.{comma[2]}"
        if re.match(r"0\d", comma[2]):
            return [(decimal, True)]
        return [(f"{comma[1]}, {comma[2]}", False), (decimal, comma[1].lstrip("-") != "0")]
    if re.fullmatch(r"-?[1-9]\d{0,2}(?:,\d{3})+", text):  # 100,200 is a number; in an answer perhaps a list
        return [(text, False), (text.replace(",", ", "), True)]
    point = re.fullmatch(r"([A-Z])\s*(\([^()]*,[^()]*\))", text)
    if point and point[1] in "CP":
        raise Unreadable(f"{text!r} may be a point or a number of choices")
    return [(point[2], False)] if point else [(text, False)]


def _unwrapped(text: str) -> str:
    """The text without what only marks or ends it: $...$, **...**, a box, spaces, a full stop."""
    previous, text = None, re.sub(r"^\s*~\s*=", "≈", text)
    while text != previous:
        previous = text
        text = re.sub(rf"^(?:{_SPACE.pattern})++|(?:{_SPACE.pattern})++$", "", text).strip()
        text = re.sub(r"(?<!\.)[.,;:]$|\\\\$", "", _COLOR.sub("", text))
        text = _NAMED.sub(
            lambda match: match[0] if _says_more(match) else "", text.removeprefix("="), count=1
        )
        for left, right in _AROUND:
            inner = text[len(left) : len(text) - len(right)]
            if (
                len(text) > len(left + right)
                and text.startswith(left)
                and text.endswith(right)
                and left not in inner
            ):
                text = inner if not inner.endswith("\\") else text
        marked = _MARK.match(text)
        if marked and text[marked.end() :].startswith("{") and group_end(text, marked.end()) == len(text):
            text = text[marked.end() + 1 : -1]
        elif marked and not text[marked.end() :].startswith("{"):
            text = text[marked.end() :]
    return text.removeprefix("+")


def _says_more(name: re.Match) -> bool:
    """True if the words before a value are a part of what it means: "not: 5", "sinh x = 5"."""
    words = set((name["text"] or name["plain"]).casefold().split())
    return bool(words & (NO_UNITS - {"a", "an", "the", "of", "and"} | set(FUNCTIONS)))


def group_end(text: str, start: int) -> int | None:
    """The place behind the bracket that closes the one at `start`, ( or {; None where nothing does."""
    left, depth = text[start], 0
    right = ")" if left == "(" else "}"
    for place in range(start, len(text)):
        if text[place] in left + right and text[place - 1 : place] != "\\":
            depth += 1 if text[place] == left else -1
            if depth == 0:
                return place + 1
    return None


def _with_words(text: str) -> str:
    r"""The text with markers around the words of \text{...}; numbers, single letters and
    "or" stand without.
    """

    def marked(match: re.Match) -> str:
        inner = match[1].strip()
        if re.fullmatch(r",?\s*(?:and|or)\s*,?", inner):
            return f" {inner.strip(' ,')} "
        if _ROMANS.fullmatch(inner):
            return f" {inner} "
        if inner in FUNCTIONS:
            return f"\\{inner} "
        if re.fullmatch(r"[A-Za-z]", inner) and inner not in SINGLE or re.fullmatch(r"[A-Z][.):]", inner):
            return f" {inner} "  # a variable, i, e; or the name of a choice
        letters = re.fullmatch(r"[^\W\d_][^\d_\\(){}=+]*", inner)
        return f"{OPEN}{match[1]}{CLOSE}" if letters else f" {match[1]} "

    text = re.sub(r"\{\s*\\rm\s+([^{}]*)\}", r"\\text{\1}", text)
    text = _TEXT.sub(marked, text)
    while (plain := _BOLD.sub(lambda match: match[1] or "", text)) != text:
        text = plain
    return _SPACE.sub(" ", _SIZES.sub("", plain.replace(r"\!", ""))).strip()


def _read(text: str) -> list[Reading]:
    """Readings of a text that means one thing, but for units."""
    if "matrix" in text:
        # The space between rows would be multiplied in.
        text = re.sub(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|ex|em|mm|cm|in)\s*\]", r"\\\\", text)
    else:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    text = _arranged(text)
    text = plain_numbers(_UNIT_TEXT.sub(_word_by_word, text))  # it needs to see \, and the like
    text = _with_words(text.replace(r"\$", "$"))
    if (words := _words(text)) is not None:
        return [words]
    if _ROMANS.fullmatch(text) and _ROMAN.search(text):  # as products I, III and (iv), (vi) would have others
        text = re.sub(r"[IVXivx]+", rf"{OPEN}\g<0>{CLOSE}", text)
    text = _PERCENT.sub(r"\%", re.sub(r"^(?:minus|negative)\s+(?=[\d.\\])", "-", text))
    text = _named_functions(_ORDINAL.sub("", _DEGREES.sub("°", text)))
    text = percentages(plain_numbers(text))  # those that words had hidden
    unit = None
    if (money := _CURRENCY.match(text)) is not None:
        unit, text = canonical(money[2]), (money[1] or money[3]) + text[money.end() :]
    found = []
    for value, own, loose in _split_unit(text):
        if unit is not None and own is not None:
            own = f"{unit}/{own.removeprefix('/')}" if own.startswith("/") else None if own == unit else own
        latex = _latex(value)
        if r"\ne" in latex and not all(
            re.search(r"\\neq?(?![a-z])|[=<>]|\\[lgi]", one) for one in elements(latex)
        ):
            raise Unreadable("a value in a list with \\ne may be one that is left out, or one that is not")
        if has_several_values(latex):
            raise Unreadable("a name has several values beside that of another; write (1, 2), (2, 1)")
        latex = _DIVISOR.sub(lambda match: match[0] + (r"\cdot " if match[1] else ""), latex)  # half of x
        apart = _DIVISOR.sub(r"\g<0> \\cdot ", latex)  # 1/2x: half of x, or of its inverse
        loose = loose or apart != latex
        found += [Reading(one, unit=own or unit, loose=loose) for one in dict.fromkeys((latex, apart))]
    return found


def _arranged(text: str) -> str:
    r"""The text with a matrix for [[1,2],[3,4]], a condition for \{x : x > 2\}, and units of \Omega and \mu.

    Raises:
        Unreadable: a set is given by what is no inequality.
    """
    text = re.sub(r"(?<=[\d}])(?:\\[,;: ]|~|\s)+\\Omega$", r"\\text{ ohm}", text)
    text = re.sub(r"\\mu\s*\\(?:text|mathrm)\s*\{\s*([A-Za-z]+)\s*\}", r"\\text{ μ\1}", text)
    rows = re.findall(r"\[([^\[\]]*)\]", text)
    if _ROWS.fullmatch(text) and len({row.count(",") for row in rows}) == 1:
        return r"\begin{pmatrix}" + r" \\ ".join(row.replace(",", " & ") for row in rows) + r"\end{pmatrix}"
    if (built := _BUILT.fullmatch(_SIZES.sub("", text))) is not None:
        of_real = built["of"] in (None, r"\mathbb{R}")
        if not of_real or built["name"] not in built["where"] or not _ORDER.search(built["where"]):
            raise Unreadable(f"{text[:40]!r} is a set by a condition, which math-verify can't read")
        return built["where"]
    return text


def _word_by_word(unit: re.Match) -> str:
    r"""\text{m}/\text{s}^2 for \mathrm{m/s^2}, which is no text without numbers."""
    written = "^" in unit[1] or "\\" in unit[1]
    return re.sub(r"(?<!\\)\b[A-Za-z]+", r"\\text{\g<0>}", unit[1]) if written else unit[0]


def _words(text: str) -> Reading | None:
    """The reading of a text without mathematics; None for any other.

    Raises:
        Unreadable: it is a sentence.
    """
    bare = text.replace(OPEN, " ").replace(CLOSE, " ").strip()
    bare = re.sub(r"^\(\s*([ivx]{2,}|[IVX]{2,})\s*\)$", r"\1", bare)
    single = re.fullmatch(r"\(?\s*([A-Za-z])\s*\)?\.?", bare)
    if single:
        return Reading(single[1], words=single[1].lower())
    if not re.fullmatch(r"[^\W\d_][^\d_\\^{}()=+*/<>|&%$£€]*", bare):
        return None
    plain = re.sub(rf"{OPEN}[^{CLOSE}]*{CLOSE}", " ", text)
    joined = " ".join(bare.rstrip(".").split()).casefold()
    runs = re.findall(r"[^\W\d_]+", plain)
    if len(bare) > 1 and bare.isalpha() and (bare.isupper() or _ROMAN.fullmatch(bare)):
        return Reading(None, words=joined)  # IV and BAC are names: as products they would be VI and ABC
    if re.fullmatch(r"[TF](?:\s*,\s*[TF])+", bare):
        return Reading(None, words=re.sub(r"\s", "", bare).lower())  # a list would be of any order
    short = bare.isascii() and bare.isalpha() and len(bare) < LONG_WORD and bare not in FUNCTIONS
    if short and _looks_like_a_word(bare.lower()) and not set(bare) <= set("abc"):
        return Reading(None, words=joined)  # tea is not eat
    if OPEN not in text and joined not in SHORT_WORDS and not any(len(run) >= LONG_WORD for run in runs):
        return (
            Reading(bare, words=joined)
            if bare.isalpha() and bare.isascii() and bare not in FUNCTIONS
            else None
        )
    if any(run in FUNCTIONS or run in ("infinity",) for run in runs):
        return None
    if len(joined.split()) > MOST_WORDS:
        raise Unreadable(f"{bare[:40]!r} is a sentence")
    return Reading(None, words=joined)


def _named_functions(text: str) -> str:
    """The text with commands in the place of plain words and signs that name functions and operators."""
    text = re.sub(r"(?<![A-Za-z])\\?log(2|10)\s*(?=\()", r"\\log_{\1}", text)
    text = re.sub(rf"(?<![\\A-Za-z])({'|'.join(FUNCTIONS)})(?![A-Za-z])", r"\\\1 ", text)
    text = re.sub(r"(?<![\\A-Za-z])(?:infinity|infty|inf|oo)(?![A-Za-z])", r"\\infty ", text)
    text = re.sub(r"(?<=[\])])\s*(?:U|union)\s*(?=[\[(])", r"\\cup ", text)
    for plain, command in (("<=", r"\le "), (">=", r"\ge "), ("!=", r"\ne "), ("==", "="), ("**", "^")):
        text = text.replace(plain, command)
    return _without_joins(text)


def _without_joins(text: str) -> str:
    r"""The text with commas in the place of "and" and "or"; inequalities are joined to one.

    Example: "1 or 2" becomes "1, 2", and "x < 1 or x > 3" becomes r"x \in (-\infty, 1) \cup (3, \infty)".

    Raises:
        Unreadable: what the words join is not certain.
    """
    parts = re.split(r"(?:\s*,)?\s+(and|or)\s+(?:,\s*)?", text)
    sides, words = parts[::2], set(parts[1::2])
    if sides[-1].strip() == "so" and words:
        raise Unreadable("'or so' makes it no certain value")
    if not words or not (_ORDER.search(text) or "or" in words and re.search(r"\\neq?(?![A-Za-z])", text)):
        return ", ".join(sides)
    found = [_bounds(side) for side in sides]
    if len(words) > 1 or None in found or len({name for name, *_ in found}) > 1 or len(found) > MOST_JOINED:
        raise Unreadable(
            f"what {' and '.join(map(repr, sorted(words)))} joins in {text[:40]!r} is not certain"
        )
    if words == {"or"}:
        intervals = [
            f"{'[' if closed[0] else '('}{low}, {high}{']' if closed[1] else ')'}"
            for _, low, high, closed in found
        ]
        return rf"{found[0][0]} \in " + r" \cup ".join(intervals)
    lows = [(low, closed[0]) for _, low, _, closed in found if low != r"-\infty"]
    highs = [(high, closed[1]) for _, _, high, closed in found if high != r"\infty"]
    if len(lows) != 1 or len(highs) != 1:
        raise Unreadable(f"which bounds {text[:40]!r} leaves is not certain; write them as one interval")
    signs = ["\\le" if closed else "<" for _, closed in (*lows, *highs)]
    return f"{lows[0][0]} {signs[0]} {found[0][0]} {signs[1]} {highs[0][0]}"


def _bounds(inequality: str) -> tuple[str, str, str, list[bool]] | None:
    r"""("x", "1", r"\infty", [True, False]) of x \ge 1: the name, both ends, and which of them belong to it.

    None where it bounds not one name alone.
    """
    parts = [part.strip() for part in _ORDER.split(inequality)]
    if len({sign.startswith((">", r"\g")) for sign in parts[1::2]}) != 1:
        return None
    parts = parts if parts[1].startswith(("<", r"\l")) else parts[::-1]
    if len(parts) == 3:
        parts = (
            [r"-\infty", "<", *parts]
            if len(parts[0]) == 1 and parts[0].isalpha()
            else [*parts, "<", r"\infty"]
        )
    if len(parts) != 5 or len(parts[2]) != 1 or not parts[2].isalpha() or set(inequality) & set(",="):
        return None
    return parts[2], parts[0], parts[4], ["e" in sign for sign in parts[1::2]]


def _split_unit(text: str) -> list[tuple[str, str | None, bool]]:
    """(value, unit or None, whether only an answer may mean it) of a text, in one or two ways.

    Raises:
        Unreadable: the words behind the value are not a unit.
    """
    match = _UNIT.fullmatch(text)
    if match is None:
        return [(text, None, False)]
    plain = re.findall(
        r"[^\W\d_]+", re.sub(rf"{OPEN}[^{CLOSE}]*{CLOSE}", " ", match["unit"]).replace(r"\cdot", " ")
    )
    words = match["unit"].replace(OPEN, " ").replace(CLOSE, " ").strip()
    spaced = bool(match["space"]) or OPEN in match["unit"] or "/" in words or "°" in words
    if plain and re.fullmatch(rf"[{SINGLE}]|[ms]\s*\^?\s*\{{?[234]\}}?", words):
        split, whole = (match["value"], canonical(words)), (text, None)
        return [(*split, False), (*whole, True)] if spaced else [(*whole, False), (*split, True)]
    with_others = any(sign in match["unit"] for sign in ("/", "°", OPEN)) or not POWERS.keys().isdisjoint(
        plain
    )
    of_words = spaced and any(len(word) >= LONG_WORD for word in plain)  # 5 red apples
    plain = [word for word in plain if not (of_words and len(word) > 1)]
    if not all(_may_be_unit(word, with_others) or spaced and is_spaced(word) for word in plain):
        if spaced and all(len(word) > 1 for word in plain) and any(map(_looks_like_a_word, plain)):
            raise Unreadable(f"the words {words!r} may be a unit, or letters that are multiplied")
        return [(text, None, False)]
    unit = canonical(words)
    if unit is None:
        raise Unreadable(f"the words {words!r} behind a number say something else of it")
    if "degree" in unit and _TRIGONOMETRIC.search(match["value"]):
        raise Unreadable("degrees within a function are left out by math-verify")
    return [(match["value"].rstrip(), unit, False)]


def _may_be_unit(word: str, with_others: bool) -> bool:
    if not word.isascii() or is_known(word) and (len(word) > 1 or with_others):
        return True
    return (
        len(word) >= LONG_WORD
        or word in ("per", *POWERS, *NO_UNITS, *COUNTS)
        or (with_others and word in SINGLE)
    )


def _looks_like_a_word(letters: str) -> bool:
    """True if letters read as a word rather than a product: with a vowel, and not in the order
    of the alphabet.
    """
    of_variables = list(letters) == sorted(set(letters))
    return (
        len(letters) >= LONG_WORD
        or len(letters) == 3
        and not of_variables
        and not set(letters).isdisjoint("aeiou")
    )


def _latex(text: str) -> str:
    """The text as LaTeX of signs that math-verify knows. Raises Unreadable for any other."""
    text = _roots(text.replace(r"\varnothing", r"\emptyset"))
    if "°" in text:
        raise Unreadable("degrees within a formula are left out by math-verify")
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text)
    text = re.sub(r"(?<!matrix\})\^\s*(?:T|\{\s*T\s*\})", "^{(T)}", text)  # ^T alone would be left out
    text = re.sub(r"\s*,\s*", ", ", text.strip())
    bare, place, previous = _MATRIX.sub("", text), 0, ""
    while place < len(bare):
        token = _TOKEN.match(bare, place)
        if token is None:
            raise Unreadable(f"math-verify does not know the sign {bare[place]!r} in {bare[:40]!r}")
        _check(token[0], previous, bare[:place], bare[token.end() :])
        previous, place = token[0], token.end()
    sides = re.sub(r"\\[{}]", "", bare)
    if sides.count("{") != sides.count("}") or len(re.findall(r"[(\[]", bare)) != len(
        re.findall(r"[)\]]", bare)
    ):
        raise Unreadable("a bracket is not closed")
    if re.search(r"\d\s*:\s*\d\d(?!\d)", bare) or bare.count(":") > 1:
        raise Unreadable("it may be a time or a ratio")
    if "\\\\" in bare and bare == text:
        raise Unreadable("it has lines, and is not a matrix")
    text, words = _products(text), re.compile(rf"{OPEN}\s*([^{CLOSE}]*?)\s*{CLOSE}")
    return words.sub(lambda match: match[1] if len(match[1]) == 1 else f"\\text{{{match[1]}}}", text)


def _products(text: str) -> str:
    r"""The text with \cdot before a bracket, or a binomial, behind a number or a bracket, and behind a
    binomial: else they would be added.
    """
    text = re.sub(r"(?<=[\d)}!])\s*(?=\\binom)", r" \\cdot ", text)
    text = _BEFORE_BRACKET.sub(r"\g<0> \\cdot ", text)
    start = text.rfind("=") + 1
    if (called := _CALLED.search(text, start)) is not None:
        raise Unreadable(f"{called[0]!r} may be a product or the value of a function")
    for found in reversed(list(re.finditer(r"\\binom\s*(?=\{)", text))):
        end = group_end(text, found.end())
        end = group_end(text, end) if end is not None and text[end : end + 1] == "{" else None
        if end is not None and re.match(r"\s*(?:\(|\\frac)", text[end:]):
            text = f"{text[:end]} \\cdot {text[end:]}"
    for found in reversed(list(re.finditer(r"(?<=[\d)!])\s*(?=\()", text))):
        end = group_end(text, found.end())
        before = text[: found.start()]
        of_list = before.endswith(")") and "," in before[before.rfind("(") :]
        if end is not None and "," not in text[found.end() : end] and not of_list:
            text = f"{text[: found.start()]} \\cdot {text[found.end() :]}"
    return text


def _check(token: str, previous: str, before: str, after: str) -> None:
    """Raises Unreadable where math-verify reads a token of a formula as something else, or leaves it out."""
    if token[0] == "\\" and token[1:].isalpha() and token[1:] not in COMMANDS:
        raise Unreadable(f"math-verify does not know {token}")
    if token[0].isdigit() and previous.isascii() and previous[:1].isalpha():
        raise Unreadable(f"a digit stands behind a letter in {(previous + token)[:40]!r}")
    if token[0].isdigit() and re.search(r"(?<![\\A-Za-z])[A-Za-z]+\s+$", before):
        raise Unreadable(f"nothing says what {token} behind {before.split()[-1]!r} does")
    if token[0].isdigit() and re.search(r"\d\s*$", before):
        raise Unreadable(f"there is nothing between the numbers {before[-8:].strip()!r} and {token!r}")
    if token[0].isdigit() and re.search(r"\}\s*$", before) and not re.search(r"\\log_\{\d+\}\s*$", before):
        raise Unreadable(f"nothing says what {token} behind a bracket does")
    if token[0].isdigit() and re.match(r"\s*\)?\s*_", after):
        raise Unreadable(f"the subscript of the number {token} is left out by math-verify")
    if token[0].isdigit() and "." in token and re.match(r"\s*\(\s*\d", after):
        raise Unreadable(f"{token}(...) may be a product or a repeating decimal")
    if token.isalpha() and (len(token) >= LONG_WORD or len(token) > 1 and is_known(token)):
        raise Unreadable(f"the letters {token!r} would be multiplied")
    words = token[1:-1].strip() if token[0] == OPEN else ""
    if token[0] == OPEN and (len(words.split()) != 1 or (len(words) > 1 and is_known(words))):
        raise Unreadable(f"the words {words[:40]!r} stand within a formula")
    between = re.search(r"[\w)}]\s*$", before) and re.match(r"\s*[\w(\\]", after)
    if token[0] == OPEN and len(words) > 1 and between:
        raise Unreadable(f"the word {words[:40]!r} stands between values")
    if token == "^" and re.search(r"\^\{[^{}]*\}\s*$", before):
        raise Unreadable("an exponent has an exponent without brackets")
    if token == "!" and previous == "!" or token == ">" and previous in ("-", "="):
        raise Unreadable(f"math-verify does not know {previous + token}")


def _roots(text: str) -> str:
    """The text with braces around what is under a root or in an exponent."""
    text = re.sub(
        r"(\\sqrt\[3\])?√\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|(?=[({]))",
        lambda m: (m[1] or "\\sqrt") + (f"{{{m[2]}}}" if m[2] else ""),
        text,
    )
    text = re.sub(r"\\log\s*_\s*(\d+)", r"\\log_{\1}", text)
    text = re.sub(r"\\sqrt\s*(\[\d+\])?\s*(\d)(?![\d.])", r"\\sqrt\1{\2}", text)
    if re.search(r"\\sqrt\s*\d", text):
        raise Unreadable("a root has no braces, and so no end")
    while (found := re.search(r"(?:\\sqrt|\^)\s*(?=\()", text)) is not None:
        end = group_end(text, found.end())
        if end is None:
            raise Unreadable("a bracket is not closed")
        text = f"{text[: found.end()].rstrip()}{{{text[found.end() + 1 : end - 1]}}}{text[end:]}"
    return text
