r"""The built-in rewards: functions of a `RewardInput`, made from a spec with its parameters.

The answer of a response is what stands in its last \boxed{...}, else between its last <answer> and </answer>, else all.
"""

from __future__ import annotations

import logging
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from math import isfinite
from typing import Any

from megatron_rl_corr.config.reward_specs import RewardSpec
from megatron_rl_corr.data.reward_input import RewardInput

TAIL = 1000
"""Characters of a response without a marked answer that `math` searches, from its end; a longer marked one is wrong."""
BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def builtin_reward(spec: RewardSpec) -> Callable[[RewardInput], float]:
    """The function of a built-in reward, with its parameters. Raises ValueError for a `max` that nobody knows."""
    if spec.parameters.get("max", 0) is None:
        raise ValueError(f"`reward_function` {spec.source} needs max where there is no run: give {spec.source}:max=N")
    make = {
        "math": _math, "exact": lambda: exact, "f1": lambda: f1, "format": _format, "overlong": _overlong,
        "length": _length,
    }[spec.source]  # fmt: skip
    return make(**spec.parameters)


def answer_of(response: str) -> str:
    r"""What the response gives as its answer: see the module. A \boxed{ that is not closed is none."""
    opened: list[int | None] = []
    box = None
    for brace in BRACES.finditer(response):
        if brace[0].endswith("{") and brace[0] != "\\{":
            opened.append(brace.end() if len(brace[0]) > 1 else None)
        elif brace[0] == "}" and opened:
            start = opened.pop()
            box = box if start is None else response[start : brace.start()]
    if box is not None:
        return box
    tagged = response.rfind("<answer>")
    close = response.find("</answer>", tagged) if tagged >= 0 else -1
    return response[tagged + len("<answer>") : close] if close >= 0 else response


def labels_of(sample: RewardInput) -> list[str]:
    """The row's label as texts: a list is several right answers, a whole number has no point.

    Raises:
        ValueError: the row has no label, or one that is neither text nor number.
    """
    given = sample.label if isinstance(sample.label, (list, tuple)) else [sample.label]
    if not given or not all(isinstance(one, (str, int)) or _is_finite(one) for one in given):
        raise ValueError(
            f"row {sample.row} of the data set has the label {sample.label!r}; it must be text, a number, or a list of "
            "right ones: is `label_key` the right one?"
        )
    return [_plain(one) if isinstance(one, float) else str(one) for one in given]


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and isfinite(value)


def _plain(number: float) -> str:
    """0.00001, where str() writes 1e-05, which is 1 x e - 5 to math-verify; whole numbers without their .0."""
    return "0" if number == 0 else format(Decimal(repr(float(number))), "f").removesuffix(".0")


def exact(sample: RewardInput) -> float:
    """1 where the answer is a label's text, both in Unicode's NFKC, in lower case, with single spaces; else 0."""
    answer = _normal(answer_of(sample.response))
    return float(any(answer == _normal(label) for label in labels_of(sample)))


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def f1(sample: RewardInput) -> float:
    """The largest F1 of the answer's words and a label's: 2 x common / (words of one + words of the other).

    Words are those of SQuAD's evaluation: in lower case, without punctuation and articles. Where one has none, 1 if the
    other has none too, else 0 (SQuAD 2.0). Source: arXiv:1606.05250, arXiv:1806.03822.
    """
    answer = _words(answer_of(sample.response))
    return max(_f1(answer, _words(label)) for label in labels_of(sample))


def _f1(answer: list[str], label: list[str]) -> float:
    if not answer or not label:
        return float(answer == label)
    common = sum((Counter(answer) & Counter(label)).values())
    return 2 * common / (len(answer) + len(label))


def _words(text: str) -> list[str]:
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _format(pattern: str | None) -> Callable[[RewardInput], float]:
    """1 where the whole response matches the pattern (a point matches line ends too), else 0."""
    if pattern is not None:
        wanted = re.compile(pattern, re.DOTALL)
        return lambda sample: float(wanted.fullmatch(sample.response) is not None)
    tagged = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)

    def thinks_and_answers(sample: RewardInput) -> float:
        response = sample.response
        once = all(response.count(tag) == 1 for tag in TAGS)
        return float(once and tagged.fullmatch(response) is not None)

    return thinks_and_answers


def _overlong(cache: int, max: int, penalty: float) -> Callable[[RewardInput], float]:
    """0 up to max - cache tokens, then (max - cache - tokens) / cache, -1 above max; times penalty.

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """

    def overlong(sample: RewardInput) -> float:
        above = len(sample.output_ids) - (max - cache)
        return -penalty * min(above / cache, 1.0) if above > 0 else 0.0

    return overlong


def _length(max: int, penalty: float) -> Callable[[RewardInput], float]:
    """-penalty x tokens / max."""
    return lambda sample: -penalty * len(sample.output_ids) / max


def _math() -> Callable[[RewardInput], float]:
    """1 where the answer equals a label as mathematics, else 0, as math-verify has it.

    A response without a marked answer is searched for its last formula or number, in its last TAIL characters. A label
    may be a number, LaTeX, or a worked solution that ends in ####, then the answer, or in a box.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # it loads sympy

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    how = {
        "extraction_config": [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        # Its limits are alarms, which only a main thread can set; ours ends the process.
        "parsing_timeout": None,
    }

    def read(text: str) -> list[Any]:
        # With the end of its sentence, "13." would be no number to math-verify, and equal nothing.
        return parse(f"\\boxed{{{text.strip().removesuffix('.')}}}", **how)

    def right_answer(label: str, row: int) -> list[Any]:
        text = answer_of(label.rpartition("####")[2]).strip().strip("$")
        found = read(text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d*)?", text) else text)
        if not found:
            raise ValueError(f"row {row} of the data set has the label {label!r}, no mathematics; use exact or f1")
        return found

    def math(sample: RewardInput) -> float:
        if isinstance(sample.label, bool):  # "True" would be T x r x u x e
            raise ValueError(f"row {sample.row} of the data set has the label {sample.label}; use exact for it")
        right = [right_answer(label, sample.row) for label in labels_of(sample)]
        response, answer = sample.response, answer_of(sample.response)
        if answer == response:
            given = parse(response[-TAIL:], **how)
        else:
            given = read(answer) if len(answer) <= TAIL else []
        return float(any(verify(one, given, timeout_seconds=None) for one in right))

    verify(read("1"), read("\\frac{2}{2}"), timeout_seconds=None)  # what it loads late is loaded now
    return math
