"""The environment that a user writes for episodes of several turns: it replies to the policy
after each turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from megatron_rl_corr.data.loading import load
from megatron_rl_corr.data.prompt import Prompt

FLAG = "`environment`"


class Done:
    """The class of DONE, which `step` returns to end the episode."""

    def __repr__(self) -> str:
        return "DONE"


DONE = Done()


class Environment:
    """One episode's environment: subclass it, and define `step`. Every sample has an object of its own.

    Each method may be `async`, and should be where it waits: plain ones run one at a time, in a thread.
    Ids go in and out, never text, so what the policy sampled is never tokenised again; decode and encode
    with your own tokenizer.
    """

    stop_token_ids: Sequence[int] = ()
    """Ids that end a turn, beside the model's own end-of-sequence ids: the last token of a tool call, say."""
    stop: Sequence[str] = ()
    """Texts that end a turn; the turn's ids are up to the one that completes the text."""
    replayable: bool = False
    """A new object for the same row, given the same turns again, says the same, and nothing outside notices
    that it is asked twice: no order is sent, no file changed. Then the turns of an episode that is under way
    at a checkpoint are kept. The replies are compared; what a call does beside them only you know.
    """

    def step(
        self, output_ids: list[int], finish_reason: str
    ) -> Sequence[int] | Done | Awaitable[Sequence[int] | Done]:
        """The ids that follow the policy's turn, chat-template tokens included, or DONE. Called
        after every turn.

        Where the turn was cut (finish_reason length or abort), or was the last that is allowed, the episode
        ends whatever is returned.

        Args:
            output_ids: ids that the policy sampled in this turn, its stop id included.
            finish_reason: stop, length or abort.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(output_ids, finish_reason)")

    def reward(self) -> float | None | Awaitable[float | None]:
        """The episode's reward, called once when it has ended for any reason. None:
        `reward_function` scores.
        """
        return None

    def close(self) -> None | Awaitable[None]:
        """Called once, at the very end, after a failure too: give back what the tools hold."""


EnvironmentFactory = Callable[[Prompt], Environment | Awaitable[Environment]]
"""factory(prompt) -> a new environment: an `Environment` class that takes the prompt, or a
function, `async` or not.
"""


def load_environment(spec: str) -> EnvironmentFactory:
    """The class or function named by "path/to/file.py:name" or "package.module:name".

    Raises:
        ValueError: as `load`.
    """
    return load(spec, FLAG)
