r"""Values with names, such as x=1, y=2 or f(2)=4: which of them an answer without names stands for.

math-verify compares x=1, y=2 with (2, 1) as sets of numbers, and f(2)=4 with f(5)=4 by their right sides.
It reads R as r, so that R-r is 0.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_rl_corr.data.math_lists import elements

_NAMED = re.compile(r"\s*((?:[A-Za-z]|\\[a-z]+)(?:_(?:\w|\{\w+\}))?)\s*=\s*([^=<>]+?)\s*")

_LETTER = re.compile(
    r"\\(?:text|begin|end|mathbb)\s*\{[^{}]*\}|\\[A-Za-z]+|(?P<letter>[A-Za-z])"
    r"(?P<index>_(?:\{[^{}]*\}|[A-Za-z0-9]))?"
)


def cases_apart(*formulas: str) -> tuple[str, ...]:
    r"""The formulas with another name for each capital letter that one of them has beside the small letter.

    Example: cases_apart("R-r", "0") == ("x_{capitalr}-r", "0"); cases_apart("2R", "2r") stays: a
    habit of writing.
    """
    capitals = set()
    for formula in formulas:
        letters = {match["letter"] for match in _LETTER.finditer(formula)} - {None}
        capitals |= {letter for letter in letters if letter.isupper() and letter.lower() in letters}

    def renamed(match: re.Match) -> str:
        if match["letter"] not in capitals:
            return match[0]
        return f"x_{{capital{match['letter'].lower()}{(match['index'] or '').strip('_{}')}}}"

    return tuple(_LETTER.sub(renamed, formula) if capitals else formula for formula in formulas)


def without_names(label: str, answer: str) -> tuple[str, str]:
    r"""Two formulas for math-verify, both as a tuple where one has names for its values and
    the other has not.

    Example: without_names("x=1, y=2", "2, 1") == ("(1, 2)", "(2, 1)"). A label's values are in its own
    order; an answer's in that of its names, which a tuple without names is in by custom.
    """
    label_values, answer_values = _named(label), _named(answer)
    if (label_values is None) == (answer_values is None):
        return label, answer
    if label_values is not None:
        values = elements(answer)
        known = len(values) == len(label_values) and "=" not in answer
        return (_tuple(list(label_values.values())), _tuple(values)) if known else (label, answer)
    if not label.startswith("(") or len(elements(label)) != len(answer_values):
        return label, answer
    return label, _tuple([answer_values[name] for name in sorted(answer_values)])


def has_several_values(latex: str) -> bool:
    """True if a list gives a name two values and another name one too, so that it lacks which go together."""
    names = [match[1] for match in map(_NAMED.fullmatch, elements(latex)) if match]
    return 1 < len(set(names)) < len(names)


def function_values(label: Any, answer: Any) -> tuple[Any, Any] | None:
    """What to compare of two expressions of sympy: f(2)=4 is 4 beside a number; None for
    f(2)=4 beside f(5)=4.
    """
    if not _of_function(label):
        return label, answer
    if _of_function(answer) and label.lhs != answer.lhs:
        return None
    return label.rhs, answer.rhs if _of_function(answer) else answer


def _of_function(expression: Any) -> bool:
    import sympy
    from sympy.core.function import AppliedUndef

    return isinstance(expression, sympy.Equality) and isinstance(expression.lhs, AppliedUndef)


def _named(latex: str) -> dict[str, str] | None:
    """{"x": "1", "y": "2"} of x=1, y=2; None where one has no name, or two names have one
    letter, as x_1 and x_2.
    """
    found = [_NAMED.fullmatch(element) for element in elements(latex)]
    if len(found) < 2 or None in found:
        return None
    letters = {match[1].partition("_")[0] for match in found}
    return {match[1]: match[2] for match in found} if len(letters) == len(found) else None


def _tuple(values: list[str]) -> str:
    return f"({', '.join(values)})"
