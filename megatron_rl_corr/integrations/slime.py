"""The correction as slime and miles call it: --custom-tis-function-path
megatron_rl_corr.integrations.slime.correct

S samples of a microbatch, R response tokens of all of them, T of those on this context-parallel rank.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.core.correction import Correction, compute_correction
from megatron_rl_corr.core.ratios import LOG_CLAMP
from megatron_rl_corr.integrations.settings import read_settings
from megatron_rl_corr.reduce.collectives import ParallelGroups

SETTINGS = "rollout_correction_config"
"""Attribute of args that names our YAML file; a key of the file that --custom-config-path gives."""


def correct(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    parallel_state: Any = None,
    max_seq_lens: list[int] | None = None,
    **_others: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """(weighted pg_loss [T], masks without the rejected tokens, metrics as [T] tensors).

    pg_loss and the lists of log-probs are this context-parallel rank's zigzag part of each sample's response,
    joined or one by one; loss_masks are whole, and so are those returned. Metrics are averaged by the caller,
    over the masks that it had. With --get-mismatch-metrics and no --use-tis, only the metrics are new.
    parallel_state and max_seq_lens are miles's; for slime the group is Megatron's. Two collectives over cp,
    whatever the number of samples. ValueError for settings without effect here and for lengths that are not
    those of the layout.

    Source: slime v0.2.0 to main of 2026-08, policy_loss_function; miles main of 2026-08,
    loss_hub/losses.py.
    """
    if SETTINGS not in vars(args):
        raise ValueError(
            f"{SETTINGS} is not set: give --custom-config-path a YAML file with the line `{SETTINGS}: "
            "FILE.yaml`, where FILE.yaml holds the correction's settings, for example `preset: "
            "decoupled_token_is`"
        )
    config = read_settings(getattr(args, SETTINGS), "slime and miles")
    if train_log_probs is None or rollout_log_probs is None:
        raise ValueError(
            "the log-probs of both policies are needed; train with --use-tis or --get-mismatch-metrics"
        )
    cp_group = _cp_group(parallel_state)
    places = _Places.of(
        total_lengths, response_lengths, max_seq_lens if _padded(args) else None, cp_group, pg_loss
    )
    train, rollout = torch.cat(train_log_probs), torch.cat(rollout_log_probs).to(pg_loss.device)
    places.check([len(part) for part in train_log_probs], len(rollout), len(pg_loss))
    whole_mask = torch.cat(loss_masks).to(pg_loss.device)
    correction = compute_correction(
        train,
        rollout,
        whole_mask[places.index],
        places.seq_ids,
        num_sequences=len(response_lengths),
        config=config if args.use_tis else replace(config, diagnostics_only=True),
        groups=ParallelGroups(cp=cp_group),
    )
    metrics = _token_metrics(train, rollout, correction)
    if not args.use_tis or config.diagnostics_only:
        return pg_loss, loss_masks, metrics
    keep = _whole_keep_mask(correction.mask, places.index, len(whole_mask), cp_group)
    kept = [mask * part.to(mask) for mask, part in zip(loss_masks, keep.split(response_lengths), strict=True)]
    return torch.where(correction.mask, pg_loss, 0.0) * correction.weights, kept, metrics


@dataclass(frozen=True)
class _Places:
    """Where this rank's tokens stand in the whole responses."""

    index: Tensor
    """int64 [T] into the joined responses, R long."""

    seq_ids: Tensor
    """int64 [T]: the sample of each token."""

    counts: list[int]
    """Tokens of each sample on this rank."""

    @classmethod
    def of(
        cls,
        totals: Sequence[int],
        responses: Sequence[int],
        padded: Sequence[int] | None,
        cp_group: ProcessGroup | None,
        like: Tensor,
    ) -> _Places:
        rank, size = (0, 1) if cp_group is None else (cp_group.rank(), cp_group.size())
        parts, ids, counts, before = [], [], [], 0
        for sample, (total, response) in enumerate(zip(totals, responses, strict=True)):
            length = total if padded is None else padded[sample]
            spans = list(local_spans(total, response, length, rank, size))
            parts += [torch.arange(before + start, before + stop) for start, stop in spans]
            counts.append(sum(stop - start for start, stop in spans))
            ids.append(torch.full((counts[-1],), sample))
            before += response
        nothing = torch.zeros(0, dtype=torch.int64)
        index, seq_ids = torch.cat([nothing, *parts]), torch.cat([nothing, *ids])
        return cls(index.to(like.device), seq_ids.to(like.device), counts)

    def check(self, train: list[int], rollout: int, loss: int) -> None:
        """ValueError unless all have this layout's lengths."""
        if train != self.counts or {rollout, loss} != {sum(self.counts)}:
            raise ValueError(
                f"this context-parallel rank should have {self.counts} tokens of the samples' responses, and "
                f"got train log-probs of {train}, {rollout} rollout log-probs and {loss} losses in all: no "
                "layout that is known"
            )


def local_spans(total: int, response: int, length: int, rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Response tokens [start, stop) of rank `rank` of `size`, in its order.

    A row of `length` positions is cut into 2 * size chunks, rounded up; a rank has chunks rank and 2 *
    size - 1 - rank. A token belongs to the rank of the position that predicts it, one before its own.
    """
    if size == 1:
        yield 0, response
        return
    chunk, first = -(-length // (2 * size)), total - response - 1
    for number in (rank, 2 * size - 1 - rank):
        start, stop = max(number * chunk, first), min((number + 1) * chunk, total - 1)
        if start < stop:
            yield start - first, stop - first


def _padded(args: Namespace) -> bool:
    """True if rows are padded to max_seq_lens before they are cut: miles's --qkv-format bshd.
    slime has it no more.
    """
    return vars(args).get("qkv_format", "thd") == "bshd"


def _cp_group(parallel_state: Any) -> ProcessGroup | None:
    if parallel_state is not None:
        return parallel_state.cp.group if parallel_state.cp.size > 1 else None
    from megatron.core import parallel_state as megatrons

    return megatrons.get_context_parallel_group() if megatrons.get_context_parallel_world_size() > 1 else None


def _whole_keep_mask(keep: Tensor, index: Tensor, size: int, cp_group: ProcessGroup | None) -> Tensor:
    """The keep mask of the whole responses, [R] float32: every rank has its tokens, and zero
    for the others'.
    """
    whole = torch.zeros(size, device=keep.device)
    whole[index] = keep.float()
    if cp_group is not None:
        dist.all_reduce(whole, group=cp_group)
    return whole


def _token_metrics(train: Tensor, rollout: Tensor, correction: Correction) -> dict[str, Tensor]:
    """What the caller averages, [T] each: 0 where there is nothing to measure, so that
    nothing there matters.
    """
    log_ratio = torch.where(correction.valid, train.detach().float() - rollout.float(), 0.0)
    clamped = log_ratio.clamp(-LOG_CLAMP, LOG_CLAMP)
    return {
        "rollout_corr/weight": correction.weights,
        "rollout_corr/kept": correction.mask.float(),
        "rollout_corr/valid": correction.valid.float(),
        "rollout_corr/ratio": torch.where(correction.valid, clamped.exp(), 0.0),
        "rollout_corr/kl": -log_ratio,
        "rollout_corr/k3_kl": clamped.expm1() - log_ratio,
    }
