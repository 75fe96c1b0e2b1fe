"""What a reward function is given of a sample, and which of the three forms a function has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from megatron_rl_corr.data.prompt import Prompt
    from megatron_rl_corr.engines.trajectory import Trajectory

Form = Literal["sample", "group", "ids"]
FORMS = (
    "write reward(sample), which sees the text of one sample, rewards(samples), which sees a whole group "
    "and returns a list, or reward(prompt, output_ids, finish_reason), which sees ids; further parameters "
    "must be keyword-only"
)


@dataclass(frozen=True)
class RewardInput:
    """A finished sample as reward functions see it: text and ids.

    Example: RewardInput("What is 6 x 7?", "It is 42.", label="42"), to try a reward function on.
    """

    prompt: str
    """The row's text or rendered messages; of a row of ids their text, without special tokens."""
    response: str
    """All tokens after the prompt as text, without special tokens; with an environment its tokens too."""
    label: Any = None
    """What the row has for comparison; None where it has nothing."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's other keys, its messages among them."""
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    """All tokens after the prompt, the end token and those of an environment included."""
    finish_reason: str = "stop"
    """stop, length (cut at max_new_tokens, or the last turn that was allowed) or abort."""
    row: int = 0
    """Number of the row in the data set, from 0."""

    def __post_init__(self):
        for name in ("prompt", "response"):
            if getattr(self, name) is None:  # there is no tokenizer: "" would be another text
                object.__delattr__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name in ("prompt", "response"):
            raise AttributeError(
                f"the sample has no {name}: `hf_checkpoint` has no tokenizer, so ids have no text; add its "
                "files, or score sample.output_ids"
            )
        raise AttributeError(f"a sample has no {name!r}; it has {', '.join(self.__dataclass_fields__)}")


def reward_input(prompt: Prompt, trajectory: Trajectory, texts: tuple[str | None, str | None]) -> RewardInput:
    """A sample as functions see it, with copies of what a function may change."""
    own = prompt.copied()
    return RewardInput(
        *texts,
        label=own.label,
        metadata=own.metadata,
        prompt_ids=own.input_ids,
        output_ids=trajectory.output_ids.tolist(),
        finish_reason=trajectory.finish_reason,
        row=prompt.index,
    )


def form_of(function: Callable, source: str) -> Form:
    """Which form a reward function has, by the positional arguments that it can be called with.

    One: `sample`, or `group` where that parameter is called `samples`. Three: `ids`.

    Args:
        function: of the user.
        source: what it was loaded from, for the error.

    Raises:
        ValueError: it can be called with neither or with both.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # of some functions written in C
        raise ValueError(f"{source} has no signature to read; {FORMS}") from None
    one, three = _takes(signature, 1), _takes(signature, 3)
    if one == three:
        both = "both one argument and three" if one else "neither one argument nor three"
        raise ValueError(f"{source} has the signature {signature}, which takes {both}; {FORMS}")
    if three:
        return "ids"
    return "group" if next(iter(signature.parameters)) == "samples" else "sample"


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
