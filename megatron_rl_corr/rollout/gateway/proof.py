"""The proof of an episode: what is trained is what the servers gave, at its place, and all else is the
template's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl_corr.engines.trajectory import ENVIRONMENT, Trajectory
from megatron_rl_corr.rollout.gateway.templates import Templates
from megatron_rl_corr.rollout.gateway.turn import AskedTurn, Turn, follows, seal, shown_of


def problems_of_episode(
    turns: Sequence[Turn],
    leaves: Sequence[Turn],
    branches: Sequence[Trajectory],
    templates: Templates | None,
) -> list[str]:
    """What is wrong with an episode, nothing if it is exact.

    Each conversation is rendered once more from its messages, and what is not sampled must be the
    template's text and its ids. What is sampled must be what the servers gave, at that place behind those
    tokens, in one branch each, with its log-probs.

    Args:
        turns: of the episode.
        leaves: the last turn of each branch.
        branches: of the leaves.
        templates: of the checkpoint; None: nothing is rendered and tokenised, which takes as long as all
            requests did.
    """
    problems = [text for turn in turns for text in _problems_of(turn, templates)]
    if len(branches) != len(leaves):
        return [*problems, f"{len(leaves)} branches are {len(branches)}"]
    seen: set[int] = set()
    for branch, leaf in zip(branches, leaves, strict=True):
        problems += _problems_of_branch(branch, leaf.path(), seen)
    missing = [turn.number for turn in turns if turn.number not in seen]
    return problems + [f"turn {number} is sampled in no branch" for number in missing]


def _problems_of(turn: Turn, templates: Templates | None) -> list[str]:
    asked, parent, where = turn.asked, turn.parent, f"turn {turn.number}"
    problems = []
    part = turn.part
    if turn.seal != seal(parent and parent.seal, asked.added, part.output_ids, part.rollout_logprobs):
        problems.append(f"{where}: its ids or log-probs are not those that a server gave")
    before = torch.empty(0, dtype=torch.int64) if parent is None else parent.line.ids
    if not torch.equal(torch.cat([before, asked.added]), turn.part.prompt_ids):
        problems.append(f"{where}: it was not sampled behind the tokens before it")
    if templates is None:
        return problems
    if asked.messages is None:
        return problems + _problems_of_raw(asked, where, templates)
    text = templates.render(asked.messages, asked.tools, asked.variables, asks=True)
    if asked.shown != shown_of(text):
        problems.append(f"{where}: the template writes its conversation another way now")
    if parent is not None:
        found = templates.continuation(
            asked.messages,
            len(parent.asked.messages) + 1,
            asked.tools,
            asked.variables,
            follows=lambda text: follows(text, parent.asked.shown),
            text=parent.text,
            ended=parent.ended,
        )
        text = None if found is None else found.glue
    if text != asked.added_text:
        return [*problems, f"{where}: the template's text behind what was sampled is another one"]
    ids = templates.encode(text) if parent is None else templates.encode_behind(text, parent.ended)
    if ids != asked.added.tolist():
        problems.append(f"{where}: the ids that were not sampled are not those of the template's text")
    return problems


def _problems_of_raw(asked: AskedTurn, where: str, templates: Templates) -> list[str]:
    text, parent = asked.added_text, asked.parent
    ids = templates.encode_raw(text) if parent is None else templates.encode_behind(text, parent.ended)
    if not text or ids == asked.added.tolist():
        return []
    return [f"{where}: the ids that were not sampled are not those of the request's text"]


def _problems_of_branch(branch: Trajectory, path: Sequence[Turn], seen: set[int]) -> list[str]:
    """What is wrong with one branch; adds the numbers of the turns that it samples to `seen`."""
    where, prompt = f"branch {branch.branch}", branch.prompt_ids.numel()
    ids = torch.cat([branch.prompt_ids, branch.output_ids])
    if ids.numel() != path[-1].line.ids.numel():
        return [f"{where}: {ids.numel()} tokens, its turns have {path[-1].line.ids.numel()}"]
    problems, end, sealed = [], 0, None
    kinds = torch.full_like(branch.output_ids, ENVIRONMENT)
    for turn in path:
        begin = end + turn.asked.added.numel()
        added, end, place = (
            ids[end:begin],
            begin + turn.part.output_ids.numel(),
            f"{where}, turn {turn.number}",
        )
        if begin < prompt:
            logprobs = turn.part.rollout_logprobs
            if turn.number not in seen:
                problems.append(f"{place}: it is in the prompt, and sampled in no branch before")
        else:
            logprobs = branch.rollout_logprobs[begin - prompt : end - prompt]
            kinds[begin - prompt : end - prompt] = turn.depth
            if turn.number in seen:
                problems.append(f"{place}: it is sampled in another branch too")
            seen.add(turn.number)
        sealed = seal(sealed, added, ids[begin:end], logprobs)
        if sealed != turn.seal:
            return [*problems, f"{place}: ids or log-probs are not those that a server gave there"]
    if not torch.equal(kinds, branch.turn_ids):
        problems.append(f"{where}: its mask is not that of the sampled tokens")
    if not branch.rollout_logprobs[kinds == ENVIRONMENT].isnan().all():
        problems.append(f"{where}: a token that was not sampled has a log-prob")
    bounds = [0, *(span.end for span in branch.weight_versions)]
    if (
        bounds[:-1] != [span.start for span in branch.weight_versions]
        or bounds[-1] != branch.output_ids.numel()
    ):
        problems.append(f"{where}: its weight versions do not cover it once")
    return problems
