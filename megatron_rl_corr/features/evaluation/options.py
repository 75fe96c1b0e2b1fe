"""Rollouts on held-out prompts while the policy is trained: which are asked, how often, and how
they are sampled.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from megatron_rl_corr.config.fields import Between, Options, Positive, option
from megatron_rl_corr.config.problems import Problems, check_each


@dataclass(frozen=True)
class EvaluationSet:
    """One set of held-out prompts. Example: EvaluationSet("gsm8k", "gsm8k.jsonl", 4)."""

    name: str
    """"" for the one that is given without a name."""
    path: str
    samples: int
    """Samples of each prompt."""

    @property
    def prefix(self) -> str:
        """What the names of its metrics begin with."""
        return f"eval/{self.name}/" if self.name else "eval/"


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Options):
    """Evaluation: which held-out prompts are asked, and how."""

    acts_in_replay = False

    eval_prompts: tuple[str, ...] = option((), metavar="[NAME=]PATH")
    """Held-out prompts, sampled after every --eval-interval steps and logged as eval/NAME/*; one set may
    go without a name, and is logged as eval/*. A path as in `prompts`; one with = in its first part is
    given as ./PATH.
    """

    eval_samples: tuple[str, ...] = option((), metavar="[NAME=]N", needs="eval_prompts")
    """Samples of each prompt, of all sets or of one (default: 1)."""

    eval_temperature: Annotated[float | None, Between(0)] = option(None, metavar="T", needs="eval_prompts")
    """Temperature of the evaluation, 0 for greedy (default: that of the training)."""

    eval_top_p: Annotated[float | None, Positive(), Between(0, 1)] = option(
        None, metavar="P", needs="eval_prompts"
    )
    """Its nucleus sampling, without a top-k too (default: that of the training; off for greedy)."""

    eval_top_k: int | None = option(None, metavar="K", needs="eval_prompts")
    """Its K likeliest ids, -1 for all (default: that of the training, off for greedy)."""

    eval_max_new_tokens: Annotated[int | None, Positive()] = option(None, metavar="N", needs="eval_prompts")
    """Its longest response, in tokens, which only the servers' context bounds (default: that
    of the training).
    """

    eval_pass_reward: float = option(1.0, metavar="R", needs="eval_prompts")
    """A sample passes with a reward of at least this, for pass@k."""

    def check(self) -> None:
        for name in ("eval_top_p", "eval_top_k"):
            if self.eval_temperature == 0 and getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` {getattr(self, name)} has no effect with `eval_temperature` 0; drop one"
                )

    def check_top_k(self) -> None:
        if self.eval_top_k is not None and self.eval_top_k != -1 and self.eval_top_k < 2:
            raise ValueError(
                f"`eval_top_k` must be -1 (off) or at least 2, got {self.eval_top_k}; `eval_temperature` 0 "
                "is greedy"
            )

    def check_pass_reward(self) -> None:
        if math.isnan(self.eval_pass_reward):
            raise ValueError("`eval_pass_reward` must be a number, got nan, which no reward reaches")

    def check_sets(self) -> None:
        for one in self.evaluation_sets():
            if self.eval_temperature == 0 and one.samples > 1:
                raise ValueError(
                    f"`eval_samples` {one.samples} with `eval_temperature` 0: greedy samples of a prompt are "
                    "all the same; use 1, or a temperature above 0"
                )

    def eval_prompt_files(self) -> list[str]:
        """Paths that `eval_prompts` names."""
        return [one.path for one in self.evaluation_sets()]

    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """The sets that the flags name. Raises ValueError for a name or a number that is
        wrong or given twice.
        """
        problems = Problems()
        paths = problems.check("paths", lambda: self._named("eval_prompts", self.eval_prompts))
        given = problems.check("names", lambda: self._named("eval_samples", self.eval_samples))
        numbers = problems.check("numbers", lambda: check_each(_positive, given.values()), needs=["names"])
        problems.raise_all()
        samples = dict(zip(given, numbers, strict=True))
        unknown = sorted(set(samples) - set(paths) - {""})
        if unknown:
            names = (
                f"the sets are {', '.join(filter(None, paths))}" if any(paths) else "give the number alone"
            )
            raise ValueError(f"`eval_samples` {unknown[0]}= names no set of `eval_prompts`; {names}")
        common = samples.get("", 1)
        return tuple(EvaluationSet(name, path, samples.get(name, common)) for name, path in paths.items())

    @staticmethod
    def _named(option_name: str, given: tuple[str, ...]) -> dict[str, str]:
        """Name -> value, "" for what has no name."""
        found: dict[str, str] = {}
        for text in given:
            match = re.fullmatch(r"([\w.-]+)=(.*)", str(text), re.DOTALL)
            name, value = match.groups() if match else ("", str(text))
            if not value:
                raise ValueError(f"`{option_name}` {text} has nothing after the =; give NAME=VALUE")
            if name in found:
                which = f"{name} twice" if name else "several without a name"
                raise ValueError(f"`{option_name}` has {which}; give each a name of its own, as NAME=VALUE")
            found[name] = value
        return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"`eval_samples` must be whole numbers of at least 1, got {text}")
    return int(text)


OPTIONS = EvaluationConfig
