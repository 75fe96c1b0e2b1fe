"""How a run answers its agents: what reads tool calls and thoughts in what the policy says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout.gateway.episode import THOUGHTS, EpisodeRules
from megatron_rl_corr.rollout.gateway.harmony import split_harmony
from megatron_rl_corr.rollout.gateway.tool_calls import TOOL_FORMATS, detect, parse_tool_calls, split_thoughts

AUTO = "auto"
SPLITS = {
    "gpt_oss": split_harmony,
    "gemma4": partial(split_thoughts, begin="<|channel>thought\n", end="<channel|>"),
}
"""How thoughts are taken apart where a format's models write them in another way than <think>."""

PROMPT_TAIL = 16
"""Tokens: a prompt that begins the answer's thoughts does so within its last ones."""


def names_of_calls(tool_format: str, text: str, before: str, cut: str | None) -> list[str]:
    """The names of the functions that an answer calls, as an episode reads them.

    Args:
        tool_format, text, cut: as in `parse_tool_calls`.
        before: the end of its prompt.
    """
    _, rest = SPLITS.get(tool_format, split_thoughts)(text, begun=before.rstrip().endswith(THOUGHTS))
    _, calls = parse_tool_calls(tool_format, rest, None, turn="", cut=cut)
    return [one["function"]["name"] for one in calls]


def answer_rules(
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    *,
    max_tokens: int,
    max_turns: int,
    tool_format: str,
    separate_thoughts: bool,
    warn: Callable[[str], None],
) -> EpisodeRules:
    """The rules of a run's episodes.

    Args:
        tokenizer: of the checkpoint.
        sampling, max_tokens, max_turns: as in `EpisodeRules`.
        tool_format: a name in TOOL_FORMATS; auto: the one that the chat template teaches.
        separate_thoughts: they are taken from the content.
        warn: takes a line where auto finds none.

    Raises:
        ValueError: there is no such format, or its chat template refuses thoughts within the content.
    """
    names = ", ".join(sorted(TOOL_FORMATS))
    if tool_format not in (AUTO, *TOOL_FORMATS):
        raise ValueError(f"`agent_tool_parser` must be auto or one of {names}, got {tool_format!r}")
    name = detect(tokenizer.template_text) if tool_format == AUTO else tool_format
    if name is None:
        warn(
            "`agent_tool_parser` auto: the chat template teaches no format of tool calls that is known, so "
            f"none are read from answers; name one of {names} if the agent uses tools"
        )
    if name == "gpt_oss" and not separate_thoughts:
        raise ValueError(
            "`agent_reasoning` must be separate for gpt-oss, got content: its chat template refuses answers "
            "that have their thoughts in the content"
        )
    return EpisodeRules(
        sampling,
        max_tokens,
        max_turns,
        parse=None if name is None else partial(parse_tool_calls, name),
        thoughts=SPLITS.get(name, split_thoughts),
        separates=separate_thoughts,
    )
