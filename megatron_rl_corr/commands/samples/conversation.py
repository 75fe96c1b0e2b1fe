"""An episode as a conversation: its messages with their roles, and where a branch leaves the others.

D = log pi_train - log pi_rollout of a token; P prompt tokens, R response tokens, T = P + R.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import ENVIRONMENT, Trajectory
from megatron_rl_corr.rollout.gateway.answering import PROMPT_TAIL, names_of_calls
from megatron_rl_corr.rollout.gateway.tool_calls import TOOL_FORMATS, detect
from megatron_rl_corr.rollout.sample_file import Sample
from megatron_rl_corr.tables import readable, visible

REASONS = {
    "edited": "the agent's history is another one",
    "template": "the chat template writes the past otherwise now",
    "tools": "the tools are others",
    "earlier": "the agent goes on from there once more",
}
"""Why a branch begins, in words."""
ASKED_AGAIN = "the same is asked again"


@dataclass(frozen=True)
class Passage:
    """Tokens [first, last) of a sequence that are one message, or several that are not told apart."""

    role: str
    first: int
    last: int
    ended: str = ""
    """How the policy's answer ended; "": not known, or it is not the policy's."""
    turn: int | None = None
    """The policy's turn that is sampled in it; None: none of it is trained here."""


def is_conversation(sample: Sample) -> bool:
    """True if the sample has turns, or a conversation's messages."""
    return sample.trajectory.turn_ids is not None or bool(sample.trajectory.messages)


def passages_of(row: Trajectory) -> list[Passage]:
    """The whole sequence in passages; without messages the prompt, the policy's turns, and what an
    environment said between.
    """
    prompt, total = row.prompt_ids.numel(), row.prompt_ids.numel() + row.output_ids.numel()
    if row.messages:
        starts = sorted({one.start for one in row.messages} | {0})
        return [
            _passage(row, [one for one in row.messages if one.start == first], first, last)
            for first, last in pairwise([*starts, total])
        ]
    found, turns = [Passage("prompt", 0, prompt)], turns_of(row).tolist()
    changes = [at for at in range(len(turns)) if at == 0 or turns[at] != turns[at - 1]]
    for first, last in pairwise([*changes, len(turns)]):
        said = turns[first] == ENVIRONMENT
        role, turn = ("environment", None) if said else ("policy", turns[first])
        found.append(Passage(role, prompt + first, prompt + last, turn=turn))
    return found


def turns_of(row: Trajectory) -> torch.Tensor:
    """[R] int64, as `turn_ids`, also where the policy sampled all in one turn."""
    return torch.zeros_like(row.output_ids) if row.turn_ids is None else row.turn_ids


def _passage(row: Trajectory, messages: Sequence, first: int, last: int) -> Passage:
    begin = max(first - row.prompt_ids.numel(), 0)
    own = turns_of(row)[begin : max(last - row.prompt_ids.numel(), 0)]
    turns = own[own != ENVIRONMENT]
    roles = ", ".join(one.role for one in messages) or "text"
    ended = messages[-1].ended if messages else ""
    return Passage(roles, first, last, ended, int(turns[0]) if turns.numel() else None)


@dataclass(frozen=True)
class Fork:
    """Where a branch leaves an earlier one of its episode."""

    words: str
    tokens: int
    """That the branch begins with and that are shown in the earlier one."""


def fork_of(row: Trajectory, passages: Sequence[Passage], earlier: Sequence[Trajectory]) -> Fork:
    """Which branch this one leaves, and where: the first of those with which it shares most tokens, cut at
    the beginning of a message.

    Args:
        row: a branch that is not the first.
        passages: its.
        earlier: the branches before it.
    """
    common = [_common(row, one) for one in earlier]
    longest = max(common)
    whole = [one for one in passages if one.last <= longest]
    shared = whole[-1].last if whole else 0
    reason = REASONS.get(row.began, "why is not known")
    if not shared:
        return Fork(f"begins anew: {reason}", 0)
    if passages[len(whole)].turn is not None:
        reason = ASKED_AGAIN
    parent = earlier[common.index(longest)]
    before = f"{shared} tokens" if len(whole) == 1 else f"{shared} tokens, {len(whole)} messages"
    return Fork(f"leaves branch {parent.branch} {_place(parent, shared)}, behind {before}: {reason}", shared)


def _common(row: Trajectory, other: Trajectory) -> int:
    """How many tokens of the prompt the other sequence begins with too."""
    whole = torch.cat([other.prompt_ids, other.output_ids])
    most = min(row.prompt_ids.numel(), whole.numel())
    differ = (row.prompt_ids[:most] != whole[:most]).nonzero()
    return int(differ[0]) if differ.numel() else most


def _place(parent: Trajectory, shared: int) -> str:
    turns = turns_of(parent)[max(shared - parent.prompt_ids.numel(), 0) :]
    behind = turns[turns != ENVIRONMENT]
    return f"before its turn {int(behind[0])}" if behind.numel() else "behind its last turn"


def words_of(passage: Passage, sample: Sample, ratios: torch.Tensor | None, calls: Sequence[str]) -> str:
    """What is known of a passage, in one line: of the policy's turn its number, calls, tokens and D.

    Args:
        passage: of the sample.
        sample: the branch.
        ratios: [R] D, NaN where it is not known; None: the file has none.
        calls: names of the functions that it calls.
    """
    return visible(" | ".join(_words(passage, sample, ratios, calls))).replace("\n", "\\n")


def _words(
    passage: Passage, sample: Sample, ratios: torch.Tensor | None, calls: Sequence[str]
) -> Iterator[str]:
    row = sample.trajectory
    if passage.turn is None:
        yield f"{passage.last - passage.first} tokens"
        return
    begin, end = (max(at - row.prompt_ids.numel(), 0) for at in (passage.first, passage.last))
    sampled = row.sampled[begin:end]
    yield f"turn {passage.turn}"
    if calls:
        yield f"calls {', '.join(calls)}"
    yield f"{int(sampled.sum())} tokens"
    if ratios is not None:
        own = ratios[begin:end][sampled]
        own = own[own.isfinite()]
        if own.numel():
            largest = float(own[own.abs().argmax()])
            yield f"mean |D| {readable(float(own.abs().mean()))}, largest {largest:+.3g}"
    if sample.loss_mask is not None and (lost := int((sampled & ~sample.loss_mask[begin:end]).sum())):
        yield f"{lost} not in the loss"
    if len(row.weight_versions) > 1:
        first = begin + int(sampled.nonzero()[0])
        yield f"weights {next(one.version for one in row.weight_versions if first < one.end)}"
    if passage.ended == "length":
        yield "cut (length)"


def calls_of(
    passage: Passage, row: Trajectory, tokenizer: Tokenizer | None, tool_format: str | None
) -> list[str]:
    """The names of the functions that the policy calls in a turn, as the gateway reads them.

    Args:
        passage: of the row.
        row: the branch.
        tokenizer: of the model; None: ids are shown, and no calls.
        tool_format: a key of TOOL_FORMATS; None: that of the chat template.
    """
    if passage.turn is None or tokenizer is None or not row.messages:
        return []
    if tool_format not in TOOL_FORMATS:
        tool_format = detect(tokenizer.template_text)
    if tool_format is None:
        return []
    of_turn = turns_of(row) == passage.turn
    before = torch.cat([row.prompt_ids, row.output_ids[: of_turn.nonzero()[0]]])[-PROMPT_TAIL:].tolist()
    ids = row.output_ids[of_turn].tolist()
    cut = ids[-1] not in tokenizer.control_tokens.values()
    text = tokenizer.decode_all(ids if cut else ids[:-1])
    return names_of_calls(tool_format, text, tokenizer.decode_all(before), passage.ended if cut else None)
