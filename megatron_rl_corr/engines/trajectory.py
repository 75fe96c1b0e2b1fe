"""A sampled answer as it came from a rollout server, and the parameters it was sampled with.

P prompt tokens, R response tokens, K_t ids that token t was drawn from, M layers with experts, k
experts a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megatron_rl_corr.engines.routes import ExpertShape

FinishReason = Literal["stop", "length", "abort"]

ENVIRONMENT = -1
"""The turn id of a token that the policy did not sample."""


@dataclass(frozen=True)
class SamplingParams:
    """How a response is sampled: from the softmax at a temperature, all of it or what top_k,
    top_p and min_p keep.

    A truncated softmax is renormalised on the ids that it keeps, so its samples can only be corrected where
    those ids are known: `Engine.check_sampling` refuses what an engine does not return them for.

    Example: SamplingParams(max_new_tokens=1024, temperature=0.8, top_p=0.95, top_k=200).
    """

    max_new_tokens: int
    """Upper bound on R, at least 1."""
    temperature: float = 1.0
    """Divides the logits before the softmax. 0 is greedy: its log-probs are those of temperature 1."""
    top_p: float = 1.0
    """Keep the likeliest ids up to this sum of probabilities, in (0, 1]. Some engines need a
    top_k beside it.
    """
    top_k: int = -1
    """Keep this many of the likeliest ids, at least 2; ids that tie for the last place may
    all stay. -1: off.
    """
    min_p: float = 0.0
    """Keep the ids with at least this share of the likeliest one's probability, in [0, 1). Needs
    what top_p needs.
    """
    stop: tuple[str, ...] = ()
    """Texts that end a response: with the token that completes one in the text of the response, special
    tokens included. All sampled ids are returned, those of the stop text too.
    """
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, beside the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on after end-of-sequence and stop ids until max_new_tokens, or until a text of `stop`."""
    with_support: bool = True
    """The ids that a truncated token was drawn from are returned, as training needs them. False, for
    evaluation: any top_p, top_k and min_p goes, and the log-probs are those of the whole softmax, or
    (vLLM) of what was kept.
    """
    top_logprobs: int = 0
    """K: the K likeliest ids of each sampled token are returned, with their log-probs. 0: none."""
    batch_invariant: bool = False
    """The server must compute a token's log-prob alike whatever else it computes with it."""
    keys: ExpertShape | None = None
    """The keys that sparse attention took are returned, with the layers for layers with experts, keys of a
    query for experts of a token, and the longest sequence for experts. None: not asked for.
    """

    def __post_init__(self):
        if not _is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ValueError(
                f"`max_new_tokens` must be an integer of at least 1, got {self.max_new_tokens!r}"
            )
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, (int, float)):
            raise ValueError(f"`temperature` must be a number, got {self.temperature!r}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"`temperature` must be 0 (greedy) or positive and finite, got {self.temperature}"
            )
        if not _is_int(self.top_logprobs) or self.top_logprobs < 0:
            raise ValueError(
                f"`top_logprobs` must be an integer of at least 0 (none), got {self.top_logprobs!r}"
            )
        self._check_truncation()
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            if not _is_int(token) or token < 0:
                raise ValueError(f"`stop_token_ids` must be integers of at least 0, got {token!r}")
        if isinstance(self.stop, str):
            raise ValueError(f"`stop` must be a tuple of texts, got the text {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"`stop` must be texts of at least one character, got {text!r}")

    @property
    def truncated(self) -> bool:
        """True if top_p, top_k or min_p is on."""
        return self.top_p != 1 or self.top_k != -1 or self.min_p != 0

    @property
    def needs_mask(self) -> bool:
        """True if the server must return the sampling mask."""
        return self.truncated and self.with_support

    def _check_truncation(self) -> None:
        number = isinstance(self.top_p, (int, float)) and not isinstance(self.top_p, bool)
        if not number or not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be in (0, 1], got {self.top_p!r}; use 1 to keep every token")
        if not _is_int(self.top_k) or (self.top_k != -1 and self.top_k < 2):
            raise ValueError(f"`top_k` must be -1 (off) or an integer of at least 2, got {self.top_k!r}")
        number = isinstance(self.min_p, (int, float)) and not isinstance(self.min_p, bool)
        if not number or not 0 <= self.min_p < 1:
            raise ValueError(f"`min_p` must be in [0, 1), got {self.min_p!r}; use 0 to keep every token")
        if self.truncated and self.temperature == 0:
            raise ValueError(
                f"`top_p`, `top_k` and `min_p` have no effect on greedy sampling, got `top_p` {self.top_p}, "
                f"`top_k` {self.top_k} and `min_p` {self.min_p} at `temperature` 0; leave them out"
            )


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were sampled while the server's weights were called `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class MessageSpan:
    """A message of a conversation. Example: MessageSpan("tool", 131)."""

    role: str
    """Who says it, as the chat request has it."""
    start: int
    """Its first token, of those of prompt and response; that of the message before where they have one token
    in common, or the template's text does not tell them apart.
    """
    ended: str = ""
    """How the policy's answer ended, stop or length; "": the policy did not sample it."""


@dataclass(frozen=True, eq=False)
class Support:
    """The ids that each response token was drawn from, itself among them: ragged, one token
    after the other.
    """

    ids: torch.Tensor
    """[sum of K_t] int32, distinct within a token's set and in no order."""
    lengths: torch.Tensor
    """[R] int32: K_t, at least 1."""

    def __post_init__(self):
        _check_vectors(self, {"ids": torch.int32, "lengths": torch.int32})
        if self.lengths.numel() and self.lengths.min() < 1:
            raise ValueError(f"lengths must be at least 1, got {int(self.lengths.min())}")
        if self.lengths.sum() != self.ids.numel():
            raise ValueError(f"lengths that sum to {int(self.lengths.sum())} have {self.ids.numel()} ids")


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """The K likeliest ids at each response token, and their log-probs: of the distribution that
    `rollout_logprobs` are of.
    """

    ids: torch.Tensor
    """[R, K] int32, distinct within a row; 0 for a token that was not sampled."""
    logprobs: torch.Tensor
    """[R, K] float32, natural log; -inf for a token that was not sampled."""

    def __post_init__(self):
        for name, kind in {"ids": torch.int32, "logprobs": torch.float32}.items():
            tensor = getattr(self, name)
            if tensor.dtype != kind or tensor.dim() != 2:
                raise ValueError(f"{name} must be 2-d {kind}, got {tensor.dim()}-d {tensor.dtype}")
        if self.ids.shape != self.logprobs.shape:
            raise ValueError(f"ids {tuple(self.ids.shape)} have logprobs {tuple(self.logprobs.shape)}")

    def __getitem__(self, tokens: slice) -> TopLogprobs:
        """Those of some of the tokens."""
        return TopLogprobs(self.ids[tokens], self.logprobs[tokens])

    @classmethod
    def of_parts(cls, parts: Sequence[TopLogprobs], between: Sequence[int]) -> TopLogprobs:
        """Parts of a response one behind the other, each with so many tokens behind it that were not
        sampled. Parts without a token have no K of their own.
        """
        width = max(part.ids.shape[1] for part in parts)
        ids, logprobs = [], []
        for part, count in zip(parts, between, strict=True):
            if len(part.ids):
                ids, logprobs = [*ids, part.ids], [*logprobs, part.logprobs]
            ids.append(part.ids.new_zeros(count, width))
            logprobs.append(part.logprobs.new_full((count, width), -torch.inf))
        return cls(torch.cat(ids), torch.cat(logprobs))


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One response to one prompt. Tensors are on the CPU, not to be written to: samples share prompt_ids.

    With an environment a response is a whole episode: the policy's turns, and what the environment
    said between them.
    """

    prompt_index: int
    """Position of the prompt in the list given to `generate`."""
    sample_index: int
    """Which of the prompt's samples this is, from 0."""
    prompt_ids: torch.Tensor
    """[P] int64."""
    output_ids: torch.Tensor
    """[R] int64, ending with the stop id where there was one. R may be 0 after an abort."""
    rollout_logprobs: torch.Tensor
    """[R] float32, natural log, of the distribution the token was drawn from: the temperature-scaled softmax,
    renormalised on `support` where there is one. NaN is "no log-prob": the server gave none, or one that is
    not finite (a token it sampled cannot have probability 0)."""
    finish_reason: FinishReason
    """stop: a stop id or text; length: max_new_tokens, or the last turn that was allowed; abort: cut
    short, the tokens so far are valid samples.
    """
    weight_versions: tuple[VersionSpan, ...]
    """In order of time; they partition [0, R). What an environment said is of the span before it."""
    cached_tokens: int
    """Prompt tokens whose keys and values the server had already."""
    server: str
    """Base URL of the server that answered."""
    support: Support | None = None
    """The ids that each response token was drawn from, with top_p or top_k; None: the whole vocabulary."""
    top_logprobs: TopLogprobs | None = None
    """The likeliest ids at each response token; None: nobody asked for them."""
    routed_experts: torch.Tensor | None = None
    """[P + R - 1 - routes_from, M, k] uint8 or int16: which experts each token went to, but for the last
    one, which the server never runs. They are those of the pass that sampled the token behind it; where
    that pass's are not known any more, the token has none: k times the type's largest value.
    """
    indexer_keys: torch.Tensor | None = None
    """[P + R - 1, L, K] uint8 or int16: the positions of the keys that sparse attention took for each token
    but the last one, as for `routed_experts`. A token with no more than K keys before it, itself included,
    has none, since attention takes them all. None: nobody asked for them.
    """
    turn_ids: torch.Tensor | None = None
    """[R] int64: which turn of the policy each token is of, from 0; ENVIRONMENT for what the environment
    said, which was not sampled: its log-prob is NaN, its support the token itself. None: the policy
    sampled all, in one turn.
    """
    engine: str = ""
    """What that server runs, a name in config/run.py ENGINES: "vllm"; several with "+" between, in the
    order of the alphabet, where a response was continued at a server of another one. "": not known.
    """
    routes_from: int = 0
    """The token that `routed_experts` begin with. 0 but in a part that another one with the
    tokens before goes before.
    """
    environment_reward: float | None = None
    """What the environment scored the episode; None: it did not, or there is none."""
    environment_parts: Mapping[str, float] | None = None
    """Named numbers beside that score; None: there are none."""
    branch: int = 0
    """Which of its episode's sequences: an agent that edits its history begins another. All have the same
    sample_index; a token that several share is sampled in one of them, and in the others' prompts.
    """
    began: str = ""
    """Why an agent's conversation begins this sequence: first, edited, tools or template, as in the gateway,
    or earlier: it goes on behind a turn that another one goes on behind too. "": it is of no agent.
    """
    messages: tuple[MessageSpan, ...] = ()
    """The messages of an agent's conversation, by start, from the prompt's first token on; (): not known."""

    def __post_init__(self):
        int64, float32 = torch.int64, torch.float32
        _check_vectors(self, {"prompt_ids": int64, "output_ids": int64, "rollout_logprobs": float32})
        if self.output_ids.numel() != self.rollout_logprobs.numel():
            raise ValueError(
                f"{self.output_ids.numel()} output_ids have {self.rollout_logprobs.numel()} rollout_logprobs"
            )
        if self.support is not None and self.support.lengths.numel() != self.output_ids.numel():
            raise ValueError(
                f"{self.output_ids.numel()} output_ids have a support of {self.support.lengths.numel()} sets"
            )
        if self.top_logprobs is not None and len(self.top_logprobs.ids) != self.output_ids.numel():
            raise ValueError(
                f"{self.output_ids.numel()} output_ids have {len(self.top_logprobs.ids)} rows of top_logprobs"
            )
        if self.turn_ids is not None:
            _check_vectors(self, {"turn_ids": int64})
            if self.turn_ids.numel() != self.output_ids.numel():
                raise ValueError(
                    f"{self.output_ids.numel()} output_ids have {self.turn_ids.numel()} turn_ids"
                )
            if (self.turn_ids < ENVIRONMENT).any():
                raise ValueError(f"turn_ids must be at least {ENVIRONMENT}, got {int(self.turn_ids.min())}")
        if not self.weight_versions:
            raise ValueError("weight_versions must hold at least one span")
        tokens = self.prompt_ids.numel() + self.output_ids.numel()
        for name, first in (("routed_experts", self.routes_from), ("indexer_keys", 0)):
            ids, rows = getattr(self, name), tokens - 1 - first
            if ids is not None and (ids.dim() != 3 or ids.dtype not in (torch.uint8, torch.int16)):
                raise ValueError(f"{name} must be 3-d uint8 or int16, got {ids.dim()}-d {ids.dtype}")
            if ids is not None and ids.shape[0] != rows:
                raise ValueError(f"{tokens} tokens have {name} of {ids.shape[0]}, not {rows}")

    @property
    def oldest_version(self) -> str:
        """The weight version of the first token: what decides how stale the response is."""
        return self.weight_versions[0].version

    @property
    def sampled(self) -> torch.Tensor:
        """[R] bool: the policy sampled the token; only these may enter a loss."""
        if self.turn_ids is None:
            return torch.ones(self.output_ids.numel(), dtype=torch.bool)
        return self.turn_ids != ENVIRONMENT

    def sampled_by(self, version: str) -> torch.Tensor:
        """[R] bool: the tokens sampled while the weights were called `version`, to mask
        others or only these.
        """
        mask = torch.zeros(self.output_ids.numel(), dtype=torch.bool)
        for span in self.weight_versions:
            mask[span.start : span.end] = span.version == version
        return mask & self.sampled


def episode_numbers(trajectories: Sequence[Trajectory]) -> list[int]:
    """The episode of each trajectory, from 0: those of one are neighbours, branches 0, 1 ... of a sample.

    Example: [0, 0, 0, 1] for three branches of sample 0 and one of sample 1.
    """
    numbers, last = [], None
    for one in trajectories:
        name = one.prompt_index, one.sample_index
        goes_on = name == last and one.branch > 0
        numbers.append(numbers[-1] if goes_on else numbers[-1] + 1 if numbers else 0)
        last = name
    return numbers


def join(partial: Trajectory, continuation: Trajectory) -> Trajectory:
    """An aborted response and what was sampled after it, as one response to the first one's prompt.

    The prompt of `continuation` is all of `partial`, prompt and response. Every token keeps its log-prob,
    weight version and set of ids, and its routes or that it has none, as those of a later pass sampled
    nothing. Before any token was sampled, routes are the continuation's. The finish reason and the server
    are the continuation's, everything else is the partial's. Raises ValueError where they do not fit.
    """
    if partial.finish_reason != "abort":
        raise ValueError(f"a response that ended with {partial.finish_reason} has no continuation")
    so_far = torch.cat([partial.prompt_ids, partial.output_ids])
    if not torch.equal(continuation.prompt_ids, so_far):
        raise ValueError(
            f"the continuation's prompt of {continuation.prompt_ids.numel()} tokens is not the "
            f"{so_far.numel()} tokens of the partial response, prompt included"
        )
    return concatenated([partial, continuation])


def concatenated(parts: Sequence[Trajectory], between: Sequence[torch.Tensor] | None = None) -> Trajectory:
    """Parts of one response, each of which has the ones before it for a prompt, as one trajectory; as `join`
    whatever their finish reasons, with tokens that were not sampled in between.

    Those have NaN for a log-prob, themselves alone for a set of ids, and the weight version of the token
    before. Every tensor is copied once, however many parts there are.

    Args:
        parts: N, in order.
        between: N - 1 times ids [B] int64; None: none.
    """
    first, last = parts[0], parts[-1]
    none = first.output_ids.new_empty(0)
    replies = [*([none] * (len(parts) - 1) if between is None else between), none]
    prompt = first.prompt_ids.numel()
    for part, reply in zip(parts, replies, strict=True):
        if part.prompt_ids.numel() != prompt:
            raise ValueError(
                f"a continuation's prompt of {part.prompt_ids.numel()} tokens is not the {prompt} tokens "
                "before it"
            )
        prompt += part.output_ids.numel() + reply.numel()
    for name in ("support", "routed_experts", "top_logprobs", "indexer_keys"):
        if len({getattr(part, name) is None for part in parts}) > 1:
            raise ValueError(f"only one of a partial response and its continuation has {name}")
    outputs, logprobs, ids, lengths = [], [], [], []
    for part, reply in zip(parts, replies, strict=True):
        outputs += [part.output_ids, reply]
        logprobs += [part.rollout_logprobs, torch.full((reply.numel(),), torch.nan)]
        if part.support is not None:
            own = reply.to(torch.int32)
            ids += [part.support.ids, own]
            lengths += [part.support.lengths, torch.ones_like(own)]
    return replace(
        first,
        output_ids=torch.cat(outputs),
        rollout_logprobs=torch.cat(logprobs),
        finish_reason=last.finish_reason,
        weight_versions=_joined_spans(parts, replies),
        server=last.server,
        engine=_joined_engines(parts),
        support=Support(torch.cat(ids), torch.cat(lengths)) if ids else None,
        top_logprobs=_joined_top(parts, replies),
        routed_experts=_joined_choices(
            parts, [part.routed_experts for part in parts], [part.routes_from for part in parts]
        ),
        indexer_keys=_joined_choices(parts, [part.indexer_keys for part in parts], [0] * len(parts)),
    )


def _joined_top(parts: Sequence[Trajectory], replies: Sequence[torch.Tensor]) -> TopLogprobs | None:
    if parts[0].top_logprobs is None:
        return None
    return TopLogprobs.of_parts([part.top_logprobs for part in parts], [len(reply) for reply in replies])


def _joined_choices(
    parts: Sequence[Trajectory], choices: Sequence[torch.Tensor | None], firsts: Sequence[int]
) -> torch.Tensor | None:
    """Each token's, from the first part that has it. But for the last one, a part without a sampled
    token has none.

    choices: of each part what the server chose for its tokens, from the token in `firsts` on.
    """
    if choices[0] is None:
        return None
    rows, known = [], firsts[0]
    for number, (part, own, first) in enumerate(zip(parts, choices, firsts, strict=True)):
        if part.output_ids.numel() or number == len(parts) - 1:
            rows.append(own[known - first :])
            known = first + len(own)
    return torch.cat(rows) if len(rows) > 1 else rows[0]


def _joined_engines(parts: Sequence[Trajectory]) -> str:
    """The names of those that sampled a token, in alphabetical order; the last one's where
    there is no token.
    """
    sampled = [part for part in parts if part.output_ids.numel()] or parts[-1:]
    return "+".join(sorted({name for part in sampled for name in part.engine.split("+")} - {""}))


def _joined_spans(parts: Sequence[Trajectory], replies: Sequence[torch.Tensor]) -> tuple[VersionSpan, ...]:
    """The spans one behind the other, the tokens in between with those before; those without a token
    go, but for one.
    """
    joined, begin, later = [], 0, []
    for part, reply in zip(parts, replies, strict=True):
        *before, end = part.weight_versions
        own = (*before, replace(end, end=end.end + reply.numel()))
        later = [VersionSpan(span.version, span.start + begin, span.end + begin) for span in own]
        for span in later:
            if span.start == span.end:
                continue
            if joined and joined[-1].version == span.version:
                span = VersionSpan(span.version, joined.pop().start, span.end)
            joined.append(span)
        begin += part.output_ids.numel() + reply.numel()
    return tuple(joined) or tuple(later[-1:])


def _check_vectors(owner, dtypes: dict[str, torch.dtype]) -> None:
    for name, dtype in dtypes.items():
        tensor = getattr(owner, name)
        if tensor.dtype != dtype or tensor.dim() != 1:
            raise ValueError(f"{name} must be 1-d {dtype}, got {tensor.dim()}-d {tensor.dtype}")


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
