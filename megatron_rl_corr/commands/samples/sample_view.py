"""A saved sample as a person reads it: its text by tokens with D, its reward, and why it does not count.

D = log pi_train - log pi_rollout of a token; R response tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from megatron_rl_corr.commands.samples.conversation import (
    Fork,
    Passage,
    calls_of,
    fork_of,
    is_conversation,
    passages_of,
    turns_of,
    words_of,
)
from megatron_rl_corr.commands.samples.rejected import Rejections
from megatron_rl_corr.commands.samples.token_text import TextSpan, text_spans
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.rollout.sample_file import Sample
from megatron_rl_corr.tables import readable, visible

SHADES = (0.05, 0.2, 0.7, 2.0)
"""|D| from which a token is shaded, from light to strong: factors of 1.05, 1.2, 2 and 7 between
the two policies.
"""


@dataclass(frozen=True)
class ViewedSpan:
    """A piece of a response's text, and what is known of its tokens."""

    text: str
    log_ratio: float | None
    """D; of several tokens that make one character together, the largest by size. None: not known."""
    rejected: bool = False
    """The policy sampled it, and it does not enter the loss."""
    environment: bool = False
    """The policy did not sample it."""

    @property
    def shade(self) -> str:
        """ "" for no shade, else n (D < 0) or p and how strong it is: p1 to p4."""
        if self.log_ratio is None:
            return ""
        strength = sum(abs(self.log_ratio) >= bound for bound in SHADES)
        return f"{'n' if self.log_ratio < 0 else 'p'}{strength}" if strength else ""


@dataclass(frozen=True)
class ViewedMessage:
    """A message of a conversation."""

    role: str
    words: str
    """What is known of it, in one line."""
    is_policy: bool
    """The policy sampled it here."""
    spans: list[ViewedSpan]


@dataclass(frozen=True)
class SampleView:
    """A sample to be shown, or one branch of an episode."""

    head: str
    """Which sample it is, its reward and how it ended, in one line."""
    notes: list[str]
    """Further lines: the label, what was rejected and why, the largest D."""
    prompt: str
    response: list[ViewedSpan]
    conversation: list[ViewedMessage]
    """In the place of prompt and response, where it has turns."""
    left_out: int
    """Tokens of the response, or messages, that are not shown, from the middle."""


@dataclass(frozen=True)
class ViewSettings:
    """How samples are shown."""

    tokenizer: Tokenizer | None
    """The model's; None: ids are shown."""
    most_tokens: int | None = None
    """Tokens of a prompt, a response or a message that are shown, from beginning and end; None: all."""
    most_messages: int | None = None
    """Messages of a branch, likewise."""
    tool_format: str | None = None
    """How calls are read, for `calls_of`."""


def is_dropped(sample: Sample) -> bool:
    """True if none of the policy's tokens enters the loss, as far as the file knows."""
    return sample.loss_mask is not None and not sample.loss_mask.any()


def group_of(sample: Sample) -> int:
    """The number of the sample's group since the run's beginning; in older files, the prompt's
    place in the batch.
    """
    return sample.trajectory.prompt_index if sample.origin is None else sample.origin.group


def views_of(
    episode: Sequence[Sample], rejections: Sequence[Rejections | None], settings: ViewSettings
) -> list[SampleView]:
    """A sample as it is shown: one view, or one for each branch of an episode, where the tokens that a branch
    shares with an earlier one are in that.

    Args:
        episode: its rows of a file, by branch.
        rejections: what rejects the tokens of each, of `find_rejections`; None: not known.
        settings: how.
    """
    views = []
    for place, (sample, own) in enumerate(zip(episode, rejections, strict=True)):
        row, fork = sample.trajectory, None
        spans = [_viewed(sample, span) for span in text_spans(settings.tokenizer, row.output_ids.tolist())]
        passages = passages_of(row) if is_conversation(sample) else []
        if place:
            fork = fork_of(row, passages, [one.trajectory for one in episode[:place]])
        head, notes = _head(sample, len(episode), fork), list(_notes(sample, own, spans, is_first=not place))
        if passages:
            known = [one for one in passages if fork is None or one.first >= fork.tokens]
            messages, left_out = _conversation(sample, known, settings)
            views.append(SampleView(head, notes, "", [], messages, left_out))
        else:
            views.append(_plain_view(sample, head, notes, spans, settings))
    return views


def _plain_view(
    sample: Sample, head: str, notes: list[str], spans: list[ViewedSpan], settings: ViewSettings
) -> SampleView:
    prompt = text_spans(settings.tokenizer, sample.trajectory.prompt_ids.tolist())
    (prompt_start, prompt_end), hidden = _ends(prompt, settings.most_tokens)
    between = f" [... {hidden} tokens ...] " if hidden else ""
    response, left_out = _shortened(spans, settings.most_tokens)
    text = "".join(span.text for span in prompt_start) + between + "".join(span.text for span in prompt_end)
    return SampleView(head, notes, visible(text), response, [], left_out)


def _conversation(
    sample: Sample, passages: Sequence[Passage], settings: ViewSettings
) -> tuple[list[ViewedMessage], int]:
    """(the messages that are shown, how many are not)."""
    row, tokenizer = sample.trajectory, settings.tokenizer
    prompt, ratios = row.prompt_ids.numel(), None
    if sample.train_logprobs is not None:
        ratios = sample.train_logprobs - row.rollout_logprobs
    changes = {
        span.start: span.version
        for before, span in pairwise(row.weight_versions)
        if row.sampled[span.start] and turns_of(row)[span.start] == turns_of(row)[span.start - 1]
    }
    (start, end), left_out = _ends(passages, settings.most_messages)
    ids = torch.cat([row.prompt_ids, row.output_ids])
    shown: list[ViewedMessage] = []
    for passage in [*start, *end]:
        if left_out and len(shown) == len(start):
            shown.append(ViewedMessage("...", f"{left_out} messages", is_policy=False, spans=[]))
        spans = []
        for span in text_spans(tokenizer, ids[passage.first : passage.last].tolist()):
            first, last = (at + passage.first - prompt for at in (span.first, span.last))
            if first in changes:
                spans.append(ViewedSpan(visible(f"[weights {changes[first]}]"), None, environment=True))
            if first < 0:
                spans.append(ViewedSpan(visible(span.text), None, environment=True))
            else:
                spans.append(_viewed(sample, TextSpan(span.text, first, last)))
        words = words_of(passage, sample, ratios, calls_of(passage, row, tokenizer, settings.tool_format))
        role = visible(passage.role).replace("\n", "\\n")
        own, _ = _shortened(spans, settings.most_tokens)
        shown.append(ViewedMessage(role, words, passage.turn is not None, own))
    return shown, left_out


def _shortened(spans: list[ViewedSpan], most: int | None) -> tuple[list[ViewedSpan], int]:
    """(the first and the last spans, how many between them are left out)."""
    (start, end), left_out = _ends(spans, most)
    if left_out:
        start = [*start, ViewedSpan(f" [... {left_out} tokens ...] ", None, environment=True)]
    return [*start, *end], left_out


def _ends[Span](spans: Sequence[Span], most: int | None) -> tuple[tuple[Sequence[Span], Sequence[Span]], int]:
    """((the first spans, the last ones), how many between them are left out)."""
    if most is None or len(spans) <= most:
        return (spans, []), 0
    first = most * 2 // 3
    return (spans[:first], spans[len(spans) - (most - first) :]), len(spans) - most


def _viewed(sample: Sample, span: TextSpan) -> ViewedSpan:
    own = slice(span.first, span.last)
    sampled = sample.trajectory.sampled[own]
    ratio = None
    if sample.train_logprobs is not None and sampled.any():
        ratios = (sample.train_logprobs[own] - sample.trajectory.rollout_logprobs[own])[sampled].tolist()
        known = [one for one in ratios if math.isfinite(one)]
        ratio = max(known, key=abs) if known else None
    lost = sample.loss_mask is not None and bool((sampled & ~sample.loss_mask[own]).any())
    return ViewedSpan(visible(span.text), ratio, lost, not sampled.any())


def _head(sample: Sample, branches: int, fork: Fork | None) -> str:
    row, origin = sample.trajectory, sample.origin
    if fork is not None:
        parts = [f"branch {row.branch} {fork.words}"]
    else:
        parts = [f"group {group_of(sample)}, sample {row.sample_index}"]
        parts += [f"{branches} branches"] if branches > 1 else []
        parts += [f"row {origin.row}"] if origin is not None else []
    reward = f"reward {readable(sample.reward)}"
    if sample.reward_parts:
        reward += (
            " (" + ", ".join(f"{name} {readable(one)}" for name, one in sample.reward_parts.items()) + ")"
        )
    parts.append(reward)
    if sample.advantages is not None and row.sampled.any():
        values = sample.advantages[row.sampled]
        low, high = readable(float(values.min())), readable(float(values.max()))
        parts.append(f"advantage {low}" + (f" to {high}" if high != low else ""))
    parts += [f"{row.output_ids.numel()} tokens", row.finish_reason, f"weights {row.oldest_version}"]
    parts += [f"engine {row.engine}"] if row.engine else []
    return visible(" | ".join(parts))


def _notes(
    sample: Sample, rejections: Rejections | None, spans: Sequence[ViewedSpan], *, is_first: bool
) -> Iterator[str]:
    if is_first and sample.origin is not None and sample.origin.label is not None:
        label = sample.origin.label
        yield visible(f"label: {label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)}")
    yield from _why(sample, rejections)
    known = [span for span in spans if span.log_ratio is not None]
    if known:
        largest = sorted(known, key=lambda span: -abs(span.log_ratio))[:3]
        yield "largest |D|: " + ", ".join(f"{span.text!r} {span.log_ratio:+.3g}" for span in largest)
    elif sample.train_logprobs is None and sample.trajectory.output_ids.numel():
        yield (
            "D is not known: the file has no log-probs of the trainer (bypass mode, or sampled without a "
            "trainer)"
        )


def _why(sample: Sample, rejections: Rejections | None) -> Iterator[str]:
    """How many tokens enter the loss, and what rejected the others."""
    sampled = sample.trajectory.sampled
    if sample.loss_mask is None or not sampled.any():
        return
    lost, count = sampled & ~sample.loss_mask, int(sampled.sum())
    if not lost.any() and not rejections:  # a weight of 0 rejects no token
        return
    words = "dropped" if is_dropped(sample) else f"{count - int(lost.sum())} of {count} tokens enter the loss"
    if rejections is None:
        yield f"{words}; why is not known without the run's run.json"
        return
    reasons = [f"{rule} rejects {int(own.sum())}" for rule, own in rejections.items()]
    explained = sampled.new_zeros(sampled.shape)
    for own in rejections.values():
        explained = explained | own
    if (lost & ~explained).any():
        reasons.append(
            f"{int((lost & ~explained).sum())} for another reason than the rules that are computed again"
        )
    yield f"{words}: {', '.join(reasons)}"
