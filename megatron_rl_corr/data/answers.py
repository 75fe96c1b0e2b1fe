r"""Finds the answer within a response: in its last box, between its last tags, or as its last formula.

The answer is what stands in the last \boxed{...} or \fbox{...}, else between the last <answer> and
</answer>, else all.
"""

from __future__ import annotations

import re

from megatron_rl_corr.data.math_signs import plain_signs
from megatron_rl_corr.data.math_units import FRACTIONS, POWERS, SCALES, is_known

TAIL = 1000
"""Characters of a response without a marked answer that are searched for a formula, from its end."""
BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)

_DIGITS = r"\d[0-9A-Za-z_]*(?:[.,']\d[0-9A-Za-z_]*)*(?:\{,\}\d+|_\{\d+\}|\\,\d{3})*!?"
_ATOM = (
    rf"(?:√?(?:{_DIGITS}|\.\d+)|\\frac\{{[^{{}}]*\}}\{{[^{{}}]*\}}|\\sqrt\{{[^{{}}]*\}}|\\pi(?![A-Za-z])\s?)"
)
_JOIN = r"(?:[ \t]*(?:\*\*|[-+*/^:]|\\times|\\cdot|\\div)[ \t]*\(*[-+]?|[ \t]+(?=\d|\\frac)|(?=\\|√))"
_TERM = rf"[-+]?(?:\\?[$£€¥]\s?)?[-+]?\(*[-+]?{_ATOM}(?:\)*{_JOIN}{_ATOM})*\)*"
_FORMULA = re.compile(
    r"\$\$(?P<a>.+?)\$\$|\\\[(?P<b>.+?)\\\]|\\\((?P<c>.+?)\\\)|(?<![\\\d$])\$(?P<d>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)"
    rf"|(?P<e>[(\[]\s*{_TERM}(?:\s*,\s*{_TERM})+\s*[)\]]|(?<![0-9A-Za-z_.\\^{{]){_TERM})",
    re.DOTALL,
)
_SUFFIX = re.compile(
    r"\s*(?:\\?%|\^\s*\{?\\circ\}?|°[CF]?)|[ \t]*[-~]?(?P<word>[A-Za-z]{2,}|[万亿])(?:/[A-Za-z]+|\^?\d)?"
)
_COMMAND = (
    r"(?:\\(?:d?frac|pi|cdot|times|div|pm|binom)"
    r"|(?<![A-Za-z])\\?(?:sqrt|log|ln|exp|(?:arc)?(?:sin|cos|tan)h?))(?![A-Za-z])"
)
_GOES_ON = re.compile(
    rf"[ \t]*(?:{_COMMAND}|√|\^|[*/][ \t]*(?:[A-Za-z](?![A-Za-z])|[(\\]|{_COMMAND}))"
    r"|[ \t]*[-+][ \t]*[b-hj-z](?![A-Za-z])"
    r"|[ \t]+(?:(?:times|plus|minus|over|divided by|choose|mod|modulo|base)[ \t]+[-\d(\\$]|(?:squared|cubed"
    rf"|or (?:more|less|fewer)|and (?:a|one) (?:half|third|quarter)|{'|'.join(sorted(FRACTIONS))})\b)"
)
"""What makes another value of the one before it."""
_IS_WITHIN = re.compile(
    rf"(?:{_COMMAND}(?:[_^]\{{?-?\w+\}}?)?[ \t]*[({{\[]?|[<>!]=|(?:(?<![<\w/])\w+|[)}}\]])[ \t]*[<>]"
    r"|\\(?:[lg]eq?|neq?)(?![A-Za-z]))[ \t]*$"
)
"""What stands before a value of which it makes another, or a bound."""
_MINUS = re.compile(
    r"(?:(?:^|[^\d\s)]\s+)(?:minus|negative)\s+|(?:\b(?:is|are|be)|[:=])[ \t]*-[ \t]+)$", re.IGNORECASE
)
_SAYS = re.compile(
    r"answers?\b[^.\n]{0,60}?(?:\bis\b|\bare\b|\bbe\b|:|=)|答案[^.\n]{0,20}?(?:是|为|:|=)", re.IGNORECASE
)
_LETTER = re.compile(r"[\s:*]*\(?([A-Z])\)?(?![A-Za-z'])")
NEAR = 50
"""Characters behind "the answer is" that are searched for a formula first."""
NO_SUFFIX = ("in", "mi", "mo", "rs")
"""Units that are words of a sentence more often."""


def answer_of(response: str) -> str | None:
    r"""What the response gives as its answer: see the module. None: its last mark is not closed.

    A box that is not closed, as where the response was cut, takes the place of those before it. It may be
    around a later one, \boxed{2 + \boxed{3}, unless a blank line lies between: then it was forgotten.
    """
    opened: list[int | None] = []
    box, marked = None, False
    for brace in BRACES.finditer(response):
        if len(brace[0]) > 2:
            opened.append(brace.end())
            box, marked = None, True
        elif brace[0] == "{":
            opened.append(None)
        elif brace[0] == "}" and opened:
            start = opened.pop()
            box = box if start is None else (start, brace.start())
    if box is not None:
        around = [start for start in opened if start is not None and start < box[0]]
        return None if around and "\n\n" not in response[around[-1] : box[0]] else response[slice(*box)]
    tagged = response.rfind("<answer>")
    close = response.find("</answer>", tagged) if tagged >= 0 else -1
    if marked or tagged >= 0 > close:
        return None
    return response if tagged < 0 else response[tagged + len("<answer>") : close]


def last_formula(response: str, *, cut: bool = False) -> str | None:
    """The formula or number of a response without a marked answer: behind "the answer is", else the last one.

    Args:
        response: of which the last TAIL characters are searched.
        cut: it reached its longest length, so that a number at its very end may lack digits.
    """
    text = plain_signs(response)[-TAIL:]
    text = re.sub(r"(?<![\d)])\*\*|\*\*(?![\d(])", "", text).rstrip() + ("" if cut else " ")
    skipped = 1 if len(response) > TAIL else 0  # a number there may lack its beginning
    found = [match for match in _FORMULA.finditer(text) if match.start() >= skipped]
    for said in reversed(list(_SAYS.finditer(text))):
        rest = text[said.end() :]
        sentence = re.match(r"[\s:*#]*(?:[^.!?\n]|[.!?](?!\s))*", rest)[0]
        behind = [match for match in found if said.end() <= match.start() < said.end() + len(sentence)]
        equal = [match for match in behind if re.search(r"=\s*$", text[: match.start()])]
        near = [match for match in behind if match.start() < said.end() + NEAR]
        if equal or near:
            return _complete((equal or near[:1])[-1], text)
        if (letter := _LETTER.match(rest)) is not None and not near:
            return letter[1]
    return _complete(found[-1], text) if found else None


def _complete(match: re.Match, text: str) -> str | None:
    """What was found, with the sign before and the percent sign, scale or unit behind it; None where the
    text ends in the middle of it, or what stands around makes another value of it.
    """
    before = text[max(0, match.start() - NEAR) : match.start()]
    sign = "-" if _MINUS.search(before) else ""
    if match.end() == len(text) and match["e"] is not None:
        return None
    if _GOES_ON.match(text, match.end()) or _IS_WITHIN.search(before):
        return None
    if match["e"] is None:
        return sign + (match["a"] or match["b"] or match["c"] or match["d"])
    found, end = sign + match["e"].strip(), match.end()
    while found.count(")") > found.count("(") and found.endswith(")") and not found.startswith("["):
        found = found[:-1]
    while found.count("(") > found.count(")") and found.startswith("(") and not found.endswith("]"):
        found = found[1:]
    if not found.endswith(match["e"].strip()[-1]):  # a bracket of the sentence closed behind it
        return found
    while (suffix := _SUFFIX.match(text, end)) is not None and (
        suffix["word"] is None or _belongs(suffix["word"])
    ):
        found, end = found + suffix[0], suffix.end()
    return found


def _belongs(word: str) -> bool:
    """True if a word of a sentence is a part of the number before it."""
    lower = word.casefold()
    if lower in NO_SUFFIX:
        return False
    scale = lower in SCALES or lower.removesuffix("s") in SCALES
    return scale or lower in ("percent", "pct", *POWERS) or is_known(lower)
