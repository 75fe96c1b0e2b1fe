"""Our correction in place of the token weight of Megatron's own RL: around
megatron.rl.rl_utils.calculate_grpo_loss.

B rows of a microbatch (or one bin of packed sequences), L log-probs a row, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.segments import row_ids
from megatron_rl_corr.reduce.metrics import Metric

LOSS_MASK = 3
"""Place of the loss mask in a microbatch of train_rl.py, and in what load_packed_data_by_index returns."""


@dataclass
class GRPOCorrection:
    """Replaces the importance weight in Megatron's GRPO loss; keeps the metrics of one optimizer step."""

    config: RolloutCorrectionConfig
    metrics: list[dict[str, Metric]] = field(default_factory=list)
    """By microbatch, of the tokens that have a rollout log-prob."""

    _mask: Tensor | None = None
    """Loss mask [B, L] of the microbatch whose loss comes next: the loss itself is not told."""

    def forward_step(self, original: Callable) -> Callable:
        """train_rl.py's forward step, whose microbatches are looked at as it takes them."""

        def forward_step(data_iterator: Iterator, *args: Any, **kwargs: Any) -> tuple:
            return original(_Watched(data_iterator, self), *args, **kwargs)

        return forward_step

    def load_packed_data_by_index(self, original: Callable) -> Callable:
        """The function of this name, whose loss mask is kept."""

        def load_packed_data_by_index(*args: Any, **kwargs: Any) -> tuple:
            loaded = original(*args, **kwargs)
            self._mask = loaded[LOSS_MASK]
            return loaded

        return load_packed_data_by_index

    def calculate_grpo_loss(self, original: Callable) -> Callable:
        """The function of this name: its policy term weighted and masked by our correction, the
        other terms masked.

        Six values as before: the losses [B, L], and five that are only logged, which stay. A generated
        token without a rollout log-prob (Megatron appends the end of a response itself, and stands 0 for
        what it lacks) has weight 1 and goes only if its sequence does. Keyword call, the same in
        Megatron-LM core 0.15 to 0.20.
        """

        def calculate_grpo_loss(
            *,
            advantages: Tensor,
            kl_beta: float,
            entropy_weight: float,
            inference_logprobs: Tensor | None = None,
            is_truncation_coef: float | None = None,
            **others: Any,
        ) -> tuple[Tensor, ...]:
            if is_truncation_coef is not None:
                raise ValueError(
                    f"--rl-importance-sampling-truncation-coef {is_truncation_coef} has no effect beside "
                    "--rollout-is; drop it, and use --rollout-is-threshold"
                )
            weights, keep = self._weights(
                others["old_logprobs"],
                inference_logprobs,
                others.get("seq_starts"),
                others.get("seq_lengths"),
            )
            policy, *logged = original(advantages=advantages, kl_beta=0.0, entropy_weight=0.0, **others)
            losses = torch.where(keep, policy, 0.0) * weights
            if kl_beta or entropy_weight:
                # Without advantages the original's loss is the other terms, in its own version's signs.
                nothing = torch.zeros_like(advantages)
                terms, *_ = original(
                    advantages=nothing, kl_beta=kl_beta, entropy_weight=entropy_weight, **others
                )
                losses = losses + torch.where(keep, terms, 0.0)
            return losses, *logged

        return calculate_grpo_loss

    @torch.no_grad()
    def _weights(
        self, old: Tensor, rollout: Tensor | None, starts: Sequence[int] | None, lengths: Sequence[int] | None
    ) -> tuple[Tensor, Tensor]:
        """Weights [B, L] float32 and what is kept [B, L] bool, of pi_old against the policy that sampled."""
        if rollout is None:
            raise ValueError(
                "Megatron gave its loss no rollout log-probs; add --rl-inference-logprobs-is-correction, "
                "and roll out with an engine that returns them"
            )
        mask, self._mask = self._mask, None
        if mask is None or mask.shape != old.shape or rollout.shape != old.shape:
            seen = [None if tensor is None else tuple(tensor.shape) for tensor in (mask, old, rollout)]
            raise ValueError(f"loss mask, pi_old and rollout log-probs of one shape are expected, got {seen}")
        mask = mask.to(old.device).bool()
        ids, count = _sequences(old, starts, lengths)
        has = _told(mask, rollout, ids, count)
        correction = compute_correction(
            old.reshape(-1),
            rollout.reshape(-1),
            has.reshape(-1),
            ids,
            num_sequences=count,
            config=self.config,
        )
        self.metrics.append(correction.metrics)
        if self.config.diagnostics_only:
            return torch.ones_like(old, dtype=torch.float32), mask
        told = torch.zeros(count, device=old.device).index_add_(0, ids, has.reshape(-1).float()) > 0
        keep_sequence = (correction.kept_sequences | ~told)[ids].reshape(old.shape)
        keep = torch.where(has, correction.mask.reshape(old.shape), mask & keep_sequence)
        return torch.where(has, correction.weights.reshape(old.shape), 1.0), keep


def _told(mask: Tensor, rollout: Tensor, ids: Tensor, count: int) -> Tensor:
    """Which tokens the engine gave a log-prob for [B, L] bool; Megatron keeps no mask of it, only zeros.

    A token that the engine was certain of has log-prob 0 as well. Missing are those of a sequence that has
    no other, and the last of a sequence: Megatron appends its end behind what the engine sampled.
    """
    flat, zero = mask.reshape(-1), (rollout == 0).reshape(-1)
    number = torch.arange(1, len(flat) + 1, device=flat.device) * flat
    last = torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_reduce_(0, ids, number, "amax")
    any_told = torch.zeros(count, device=flat.device).index_add_(0, ids, (flat & ~zero).float()) > 0
    missing = zero & (~any_told[ids] | (number == last[ids]))
    return (flat & ~missing).view_as(mask)


class _Watched:
    """An iterator whose loss masks are kept: of rows, the first token of which has no log-prob."""

    def __init__(self, inner: Iterator, correction: GRPOCorrection):
        self._inner, self._correction = inner, correction

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Sequence[Tensor]:
        batch = next(self._inner)
        # Of packed sequences there is only the bin's number, and the mask comes with what that loads.
        self._correction._mask = batch[LOSS_MASK][:, 1:] if len(batch) > LOSS_MASK else None
        return batch


def _sequences(
    like: Tensor, starts: Sequence[int] | None, lengths: Sequence[int] | None
) -> tuple[Tensor, int]:
    """The sequence of each token, int64 [B * L], and how many there are; where none is, the mask is False."""
    if starts is None or lengths is None:
        return row_ids(*like.shape, like.device), len(like)
    ids = torch.zeros(like.numel(), dtype=torch.int64)
    for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        ids[start : start + length - 1] = number  # one log-prob less than tokens
    return ids.to(like.device), max(len(lengths), 1)
