"""The built-in reward `math`: math-verify decides whether an answer equals the label, both read
whole or not at all.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megatron_rl_corr.data import math_units
from megatron_rl_corr.data.answers import TAIL, answer_of, last_formula
from megatron_rl_corr.data.labels import math_texts
from megatron_rl_corr.data.math_lists import both_signs, counted, same_kind
from megatron_rl_corr.data.math_names import cases_apart, function_values, without_names
from megatron_rl_corr.data.math_text import MOST_WORDS, Reading, label_reading, readings
from megatron_rl_corr.data.reward_input import RewardInput
from megatron_rl_corr.data.unreadable import Unreadable

KEPT_LABELS = 64
"""Labels that are kept as they were read: a group's samples all have one."""
TOLERANCE = 5e-6
"""Relative to the size of the label: math-verify rounds to 6 decimals, which makes 1e-7 of 2e-7."""
SMALLEST = 1e-30
"""What is smaller is 0, the label of which no size is."""
DIGITS = 40
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?")


class MathReward:
    """1 where the answer equals a label as mathematics, else 0.

    A response without a marked answer is searched for its last formula or number. A label may be a number,
    LaTeX, or a worked solution that ends in ####, then the answer, or in a box.
    """

    def __init__(self):
        try:
            from math_verify import LatexExtractionConfig, parse, verify  # it loads sympy
        except ModuleNotFoundError as error:
            if error.name != "math_verify":
                raise
            raise ValueError(
                "`reward_function` math needs math-verify: pip install 'megatron_rl_corr[math]'; or use "
                "exact or f1"
            ) from None

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
        normalization = replace(LatexExtractionConfig().normalization_config, units=False)  # 3t would be 3
        latex = LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)
        # Its limits are alarms, which only a main thread can set; ours ends the process.
        how = {"extraction_config": [latex], "extraction_mode": "first_match", "fallback_mode": "no_fallback"}
        self._parse = lambda text: _with_imaginary_unit(
            parse(f"\\boxed{{{both_signs(text)}}}", parsing_timeout=None, **how)
        )
        self._verify = lambda right, given: verify(
            right, given, timeout_seconds=None, allow_set_relation_comp=True
        )
        self._parse_label = lru_cache(KEPT_LABELS)(self._parse)
        self._right = lru_cache(KEPT_LABELS)(self._read_label)
        self._verify(self._parse("1"), self._parse("\\frac{2}{2}"))  # what it loads late is loaded now

    def __call__(self, sample: RewardInput) -> float:
        """The reward. Raises ValueError for a label that can't be read."""
        try:
            right = [self._right(text) for text in math_texts(sample.label, sample.row)]
        except Unreadable as error:
            raise ValueError(
                f"row {sample.row} of the data set has the label {sample.label!r}, which `math` can't read: "
                f"{error}; mend it, or use exact or f1"
            ) from None
        given = _answers(sample)
        return float(any(self._equal(one, answer) for one in right for answer in given))

    def label_problem(self, label: Any) -> str | None:
        """Why a row's label can't be read; None where it can."""
        try:
            for text in math_texts(label):
                self._right(text)
        except ValueError as error:
            return str(error)
        return None

    def _read_label(self, label: str) -> Reading:
        text = answer_of(label.rpartition("####")[2])
        if text is None:
            raise Unreadable("its box is not closed")
        last = max((box.start() for box in re.finditer(r"\\(?:boxed|fbox)\s*\{", label)), default=0)
        if re.search(r"\\(?:boxed|fbox)\s*\{", label[:last]) and answer_of(label[:last]) not in (None, text):
            raise Unreadable("it has several boxes with different answers; keep one")
        reading = label_reading(text)
        if reading.latex is None:
            return reading
        parsed = self._parse_label(reading.latex)
        if not parsed:
            raise Unreadable(f"math-verify can't parse {reading.latex[:80]!r}")
        self._check_whole(reading.latex, parsed)
        if not self._verify(parsed, parsed):
            raise Unreadable(f"math-verify does not find {reading.latex[:80]!r} equal to itself")
        return reading

    def _check_whole(self, latex: str, parsed: list[Any]) -> None:
        """Raises Unreadable where math-verify leaves out a digit, so that another in its place
        makes no difference.
        """
        if _PLAIN.fullmatch(latex):
            return
        for digit in re.finditer(r"\d", latex):
            others = (str((int(digit[0]) + step) % 10) for step in (1, 4))
            changed = (latex[: digit.start()] + other + latex[digit.end() :] for other in others)
            if all(self._parse(one) == parsed for one in changed):
                raise Unreadable(f"math-verify leaves out the digit {digit[0]} in {latex[:80]!r}")

    def _equal(self, own: Reading, answer: Reading) -> bool:
        if not math_units.fit(own.unit, answer.unit):
            return False
        if own.words is not None and own.words == answer.words:
            return True
        if own.latex is None or answer.latex is None:
            return False
        if self._equal_formulas(own.latex, answer.latex):
            return True
        of_hundred = ("%" in own.latex) != ("%" in answer.latex)  # 12.5 is 12.5%, as 0.125 is
        return of_hundred and self._equal_formulas(
            own.latex.replace(r"\%", ""), answer.latex.replace(r"\%", "")
        )

    def _equal_formulas(self, label: str, answer: str) -> bool:
        label, answer = cases_apart(*without_names(label, answer))
        if not same_kind(label, answer):
            return False
        label, answer = counted(label, answer)
        right, given = self._parse_label(label), self._parse(answer)
        values = function_values(right[0], given[0]) if right and given else None
        if values is None or not self._verify([values[0], *right[1:]], [values[1], *given[1:]]):
            return False
        if not same_size(*values, _tolerance(label), percent="%" in label or "%" in answer):
            return False
        try:
            self._check_whole(answer, given)
        except Unreadable:
            return False
        return True


def _with_imaginary_unit(parsed: list[Any]) -> list[Any]:
    """What was parsed with i as the root of -1, where math-verify has a variable."""
    import sympy

    def with_unit(one: Any) -> Any:
        if not isinstance(one, (sympy.Expr, sympy.FiniteSet, sympy.Tuple)) or one.has(sympy.Equality):
            return one  # i=5 is a variable
        names = {symbol: sympy.I for symbol in one.free_symbols if symbol.name == "i"}
        found = one.xreplace({**names, sympy.Pow(-1, sympy.S.Half, evaluate=False): sympy.I})
        return one if found == one else found.doit()

    return [with_unit(one) for one in parsed]


def _answers(sample: RewardInput) -> Sequence[Reading]:
    """All that the response's answer may mean; nothing where it has none, or one that can't be read."""
    answer = answer_of(sample.response)
    if answer is None:
        return ()
    if answer == sample.response:
        cut = sample.finish_reason == "length"
        answer = last_formula(answer, cut=cut)
        if answer is None and not cut and len(sample.response.split()) <= MOST_WORDS:
            answer = sample.response
    if answer is None or len(answer) > TAIL:
        return ()
    try:
        return readings(answer)
    except Unreadable:
        return ()


def _tolerance(latex: str) -> float:
    """Half of the last digit of the label's longest number, and at most TOLERANCE; of its size."""
    longest = max((int(number.replace(".", "")) for number in re.findall(r"\d+(?:\.\d+)?", latex)), default=0)
    return min(TOLERANCE, 0.5 / max(1, longest))


def same_size(right: Any, given: Any, tolerance: float, *, percent: bool = False) -> bool:
    """True if the numbers of two expressions that math-verify calls equal are, relative to their size.

    True also where they are not numbers, or in another arrangement: it then judged by other
    means than rounding.

    Args:
        right, given: what math-verify read.
        tolerance: largest difference, as a part of the label's number.
        percent: one of them is a percentage, which may stand for a hundredth.
    """
    numbers, others = _values(right), _values(given)
    if numbers is None or others is None or len(numbers) != len(others):
        return True
    pairs = list(zip(numbers, others, strict=True))
    scales = (1, 100, 0.01) if percent else (1,)
    return any(
        all(a == b or abs(a - scale * b) <= (tolerance * abs(a) if a else SMALLEST) for a, b in pairs)
        for scale in scales
    )


def _values(expression: Any) -> list[complex] | None:
    """The numbers of an expression, set, tuple, interval, matrix or equation, sorted; None where
    there are others.
    """
    import sympy

    found = []
    for part in _parts(expression):
        if not isinstance(part, sympy.Expr):
            return None
        # Variables have a value, the same in both expressions.
        symbols = sorted(part.free_symbols, key=str)
        known = {symbol: sympy.Rational(7 * sum(map(ord, str(symbol))), 1009) for symbol in symbols}
        try:
            found.append(complex(sympy.N(part.subs(known), DIGITS)))
        except (TypeError, ValueError, AttributeError, NotImplementedError, ArithmeticError, RecursionError):
            return None
    return sorted(found, key=lambda number: (number.real, number.imag))


def _parts(expression: Any) -> list[Any]:
    import sympy

    if (
        isinstance(expression, sympy.Equality)
        and expression.lhs.is_Symbol
        and not expression.rhs.free_symbols
    ):
        return _parts(expression.rhs)
    if isinstance(expression, sympy.Interval):
        return [expression.start, expression.end]
    if isinstance(expression, (sympy.FiniteSet, sympy.Tuple, sympy.Union)):
        return [part for one in expression.args for part in _parts(one)]
    return list(expression.flat()) if isinstance(expression, sympy.MatrixBase) else [expression]
