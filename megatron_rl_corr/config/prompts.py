"""Where prompts are read from, and how a row becomes one."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megatron_rl_corr.config.fields import Options, Positive, option
from megatron_rl_corr.config.problems import Refusal

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize")
"""Variables of a chat template that are not the user's to set, or that have a flag of their own."""


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(Options):
    """Prompts: where they are read from, and how a row becomes one."""

    prompts: tuple[str, ...] = option((), metavar="PATH", required_unless="replay")
    """JSON lines, Parquet (a file, or a folder of them), or a folder that datasets' save_to_disk
    wrote. Several are one data set; see `prompts_weights`. A row has ids, text or messages, and
    further keys for the reward.
    """

    prompts_weights: tuple[str, ...] = option((), metavar="W")
    """How often each of `prompts` is drawn, one number for each: of every 1000 prompts each has its share.
    Without it every row comes once an epoch.
    """

    input_key: str | None = option(None, metavar="KEY")
    """The key of the prompt: text, a list of ids, or a list of messages ({"role": ..., "content": ...}),
    which are rendered with the tokenizer's chat template. A dot goes into an object (default: the one of
    input_ids, prompt and messages that the row has).
    """

    label_key: str | None = option(None, metavar="KEY")
    """The key of what the reward compares with; a dot goes into an object, as in reward_model.ground_truth
    (default: label, where there is one).
    """

    apply_chat_template: bool = False
    """Text is a user's message, and rendered with the tokenizer's chat template like messages. Without it
    text is tokenised as it is.
    """

    system_prompt: str | None = option(None, metavar="TEXT")
    """A system message for all rows with messages that have none."""

    tools_key: str | None = option(None, metavar="KEY")
    """The key of the functions that the chat template shows, a list of their JSON schemas
    (also as JSON text).
    """

    sampling_key: str | None = option(None, metavar="KEY")
    """The key of a row's own settings, an object of max_new_tokens (at most the run's), stop and
    stop_token_ids (beside the run's); null in a row without.
    """

    chat_template_kwargs: str | None = option(None, metavar="JSON")
    """Variables of the chat template, such as '{"enable_thinking": false}'."""

    max_prompt_tokens: Annotated[int | None, Positive()] = option(None, metavar="N")
    """Longest prompt, in tokens; --seq-length, less the longest response, bounds it too."""

    long_prompts: Literal["drop", "error"] = "drop"
    """Prompts that are longer: drop leaves them out and counts them, error refuses the data. Of large data
    a thousand rows are looked at before the start; a longer prompt that is met later is left out and
    counted as a bad row.
    """

    unread_labels: Literal["error", "drop"] = "error"
    """Rows whose label the reward `math` can't read whole: error refuses the data, and names the first of
    them; drop trains without them, and counts them. All labels are looked at before the start, of large
    data those of the 50,000 rows drawn first.
    """

    def check(self) -> None:
        wrong = [weight for weight in self.prompts_weights if not _is_weight(weight)]
        if wrong:
            raise Refusal(
                f"`prompts_weights` must be positive numbers, got {weight}; leave out what has none"
                for weight in wrong
            )

    def check_count_of_weights(self) -> None:
        if self.prompts_weights and len(self.prompts_weights) != len(self.prompts):
            raise ValueError(
                f"`prompts_weights` has {len(self.prompts_weights)} numbers for {len(self.prompts)} of "
                "`prompts`; give one for each"
            )
        if len(self.prompts_weights) == 1:
            raise ValueError("`prompts_weights` has no effect with one of `prompts`; drop it")

    def check_paths(self) -> None:
        if len({os.path.realpath(path) for path in self.prompts}) < len(self.prompts):
            raise ValueError("`prompts` names a path twice; to draw one more often, use `prompts_weights`")

    def check_template_variables(self) -> None:
        self.template_variables()

    @property
    def weights(self) -> list[float]:
        """`prompts_weights` as numbers."""
        return [float(weight) for weight in self.prompts_weights]

    def template_variables(self) -> dict[str, Any]:
        """`chat_template_kwargs` as a dict. Raises ValueError for what is none."""
        if self.chat_template_kwargs is None:
            return {}
        try:
            variables = json.loads(
                self.chat_template_kwargs,
                parse_constant=_refuse_constant,
                object_pairs_hook=_with_each_key_once,
            )
        except ValueError as error:
            raise ValueError(f"`chat_template_kwargs` is not JSON: {error}") from None
        if not isinstance(variables, dict) or not variables:
            raise ValueError(
                "`chat_template_kwargs` must be an object with names and values, got "
                f"{self.chat_template_kwargs}"
            )
        reserved = [name for name in RESERVED if name in variables]
        if reserved:
            raise Refusal(
                f"`chat_template_kwargs` can't set {name}; {_INSTEAD.get(name, 'leave it out')}"
                for name in reserved
            )
        return variables


_INSTEAD = {"messages": "rows have them", "tools": "use `tools_key`"}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON; write null, or leave its key out")


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f'the key "{twice[0]}" comes twice; keep one')
    return dict(pairs)


def _is_weight(text: Any) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
