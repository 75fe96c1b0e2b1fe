"""A saved sample as a person reads it: its text by tokens with D, its reward, and why it does not count.

D = log pi_train - log pi_rollout of a token; R response tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rl_corr.commands.samples.rejected import Rejections
from megatron_rl_corr.commands.samples.token_text import TextSpan, text_spans, visible
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.rollout.sample_file import Sample
from megatron_rl_corr.tables import readable

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
    """An environment returned it."""

    @property
    def shade(self) -> str:
        """ "" for no shade, else n (D < 0) or p and how strong it is: p1 to p4."""
        if self.log_ratio is None:
            return ""
        strength = sum(abs(self.log_ratio) >= bound for bound in SHADES)
        return f"{'n' if self.log_ratio < 0 else 'p'}{strength}" if strength else ""


@dataclass(frozen=True)
class SampleView:
    """A sample to be shown."""

    head: str
    """Which sample it is, its reward and how it ended, in one line."""
    notes: list[str]
    """Further lines: the label, what was rejected and why, the largest D."""
    prompt: str
    response: list[ViewedSpan]
    left_out: int
    """Tokens of the response that are not shown, from its middle."""


def is_dropped(sample: Sample) -> bool:
    """True if none of the policy's tokens enters the loss, as far as the file knows."""
    return sample.loss_mask is not None and not sample.loss_mask.any()


def group_of(sample: Sample) -> int:
    """The number of the sample's group since the run's beginning; in older files, the prompt's
    place in the batch.
    """
    return sample.trajectory.prompt_index if sample.origin is None else sample.origin.group


def view_of(
    sample: Sample,
    tokenizer: Tokenizer | None,
    rejections: Rejections | None,
    *,
    most_tokens: int | None = None,
) -> SampleView:
    """The sample as it is shown.

    Args:
        sample: of a file.
        tokenizer: of the model; None: ids are shown.
        rejections: what rejects its tokens, of `find_rejections`; None: not known.
        most_tokens: of the prompt, and of the response, that are shown, from beginning and end; None: all.
    """
    row = sample.trajectory
    prompt = text_spans(tokenizer, row.prompt_ids.tolist())
    (prompt_start, prompt_end), hidden = _ends(prompt, most_tokens)
    between = f" [... {hidden} tokens ...] " if hidden else ""
    spans = [_viewed(sample, span) for span in text_spans(tokenizer, row.output_ids.tolist())]
    (start, end), left_out = _ends(spans, most_tokens)
    if left_out:
        start = [*start, ViewedSpan(f" [... {left_out} tokens ...] ", None, environment=True)]
    text = "".join(span.text for span in prompt_start) + between + "".join(span.text for span in prompt_end)
    return SampleView(
        _head(sample), list(_notes(sample, rejections, spans)), visible(text), [*start, *end], left_out
    )


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


def _head(sample: Sample) -> str:
    row, origin = sample.trajectory, sample.origin
    branch = f", branch {row.branch}" if row.branch else ""
    parts = [f"group {group_of(sample)}, sample {row.sample_index}{branch}"]
    if origin is not None:
        parts.append(f"row {origin.row}")
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


def _notes(sample: Sample, rejections: Rejections | None, spans: Sequence[ViewedSpan]) -> Iterator[str]:
    if sample.origin is not None and sample.origin.label is not None:
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
