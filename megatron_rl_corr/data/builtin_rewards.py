"""The built-in rewards: functions of a `RewardInput`, made from a spec with its parameters.

What is the answer of a response, `answers` says; `math` has a file of its own.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable

from megatron_rl_corr.config.reward_specs import RewardSpec
from megatron_rl_corr.data.answers import answer_of
from megatron_rl_corr.data.labels import labels_of
from megatron_rl_corr.data.math_reward import MathReward
from megatron_rl_corr.data.reward_input import RewardInput

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def builtin_reward(spec: RewardSpec) -> Callable[[RewardInput], float]:
    """The function of a built-in reward, with its parameters. Raises ValueError for a `max`
    that nobody knows.
    """
    if spec.parameters.get("max", 0) is None:
        raise ValueError(
            f"`reward_function` {spec.source} needs max where there is no run: give {spec.source}:max=N"
        )
    make = {
        "math": MathReward,
        "exact": lambda: exact,
        "f1": lambda: f1,
        "format": _format,
        "overlong": _overlong,
        "length": _length,
    }[spec.source]
    return make(**spec.parameters)


def exact(sample: RewardInput) -> float:
    """1 where the answer is a label's text, both in Unicode's NFKC, in lower case, with
    single spaces; else 0.
    """
    labels, answer = labels_of(sample), answer_of(sample.response)
    return float(answer is not None and any(_normal(answer) == _normal(label) for label in labels))


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def f1(sample: RewardInput) -> float:
    """The largest F1 of the answer's words and a label's: 2 x common / (words of one + words of the other).

    Words are those of SQuAD's evaluation: in lower case, without punctuation and articles. Where one has
    none, 1 if the other has none too, else 0 (SQuAD 2.0). Source: arXiv:1606.05250, arXiv:1806.03822.
    """
    labels, answer = labels_of(sample), answer_of(sample.response)
    return 0.0 if answer is None else max(_f1(_words(answer), _words(label)) for label in labels)


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
