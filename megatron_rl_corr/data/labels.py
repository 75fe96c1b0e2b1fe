"""A row's label as the texts that built-in rewards compare with."""

from __future__ import annotations

from decimal import Decimal
from math import isfinite
from typing import Any

from megatron_rl_corr.data.reward_input import RewardInput


def labels_of(sample: RewardInput) -> list[str]:
    """The row's label as texts: a list is several right answers, a whole number has no point.

    Raises:
        ValueError: the row has no label, or one that is neither text nor number.
    """
    given = sample.label if isinstance(sample.label, (list, tuple)) else [sample.label]
    if not given or not all(isinstance(one, (str, int)) or _is_finite(one) for one in given):
        raise ValueError(
            f"row {sample.row} of the data set has the label {sample.label!r}; it must be text, a number, or "
            "a list of right ones: is `label_key` the right one?"
        )
    return [_plain(one) if isinstance(one, float) else str(one) for one in given]


def math_texts(label: Any, row: int = 0) -> list[str]:
    """A label of `math` as texts. Raises ValueError as `labels_of`, and for True or False within."""
    given = label if isinstance(label, (list, tuple)) else [label]
    if any(isinstance(one, bool) for one in given):  # "True" would be T x r x u x e
        raise ValueError(f"row {row} of the data set has the label {label}; use exact for it")
    return labels_of(RewardInput("", "", label, row=row))


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and isfinite(value)


def _plain(number: float) -> str:
    """0.00001, where str() writes 1e-05, which is 1 x e - 5 to math-verify; whole numbers
    without their .0.
    """
    return "0" if number == 0 else format(Decimal(repr(float(number))), "f").removesuffix(".0")
