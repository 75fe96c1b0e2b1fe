"""On-policy distillation: how strongly the policy is pulled to a frozen teacher, and who serves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl_corr.config.fields import Between, Options, Positive, option


@dataclass(frozen=True)
class Distillation(Options):
    """On-policy distillation: the pull to a teacher, as a part of the loss.

    Example: Distillation(distill_coef=1.0, distill_top_k=32)
    """

    distill_coef: Annotated[float, Between(0, remedy="0 turns it off", finite=True)] = option(
        0.0, metavar="X"
    )
    """On-policy distillation: the coefficient of the reverse KL to the teacher of `teacher_urls`. X (log
    pi_teacher - log pi_theta) of each sampled token is added to its advantage, which is neither summed over
    the sample nor compared within its group; 0 turns it off.
    """

    distill_top_k: Annotated[int | None, Positive("32, for example")] = option(
        None, metavar="K", needs="distill_coef"
    )
    """The reverse KL over the K likeliest ids of the teacher and the rest as one more outcome, exactly and as
    a term of the loss; only a sampled token among the rest then has an advantage by the teacher, relative to
    the rest.
    """


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Options):
    """Teacher: the frozen policy that on-policy distillation trains towards."""

    teacher_urls: tuple[str, ...] = option((), flag="--rollout-teacher-url", metavar="URL")
    """Servers of one frozen model with the tokenizer of `hf_checkpoint`, which score the sampled tokens for
    `distill_coef`; nothing is ever pushed to them. With them `reward_function` may be left out.
    """
