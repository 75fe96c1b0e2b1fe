"""Sends a step's sampling masks from the data leader to the last pipeline stage: each rank gets
those of its tokens.

N samples of this replica, cp context-parallel ranks, T tokens (with padding) that each of them has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.logprobs.sampling_mask import SamplingMasks
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.context import zigzag_positions
from megatron_rl_corr.reduce.failure import communication_device
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.slices import scatter_slices

Part = tuple[Tensor, Tensor]
"""(how many ids each token has [T] int32, the ids int32)."""


@collective
def scatter_sampling_masks(parts: list[Part] | None, tokens: int, *, layout: Layout) -> SamplingMasks | None:
    """The sampling masks of each rank's tokens on the last stage; None on other stages, which
    never see an id.

    Every rank of a replica calls it. The leader sends each context-parallel rank of the last stage its own,
    once, and tensor-parallel ranks, which hold the same tokens, get them from the first.

    Args:
        parts: `cut_sampling_masks` on the data leader; None on others.
        tokens: T.
        layout: this rank's process groups.
    """
    device, last = communication_device(), layout.is_last_stage

    def scatter(index: int, size: int) -> Tensor:
        own = torch.empty(size if last else 0, dtype=torch.int32, device=device)
        of_rank = None if parts is None else lambda stage, context: parts[context][index]
        scatter_slices(of_rank, own, layout, stages={layout.pp_size - 1})
        return own

    lengths = scatter(0, tokens).cpu().numpy()  # their sum is the number of ids
    ids = scatter(1, int(lengths.sum()))
    return SamplingMasks.of(ids, lengths) if last else None


def cut_sampling_masks(samples: Sequence[Trajectory], boundaries: Sequence[int], cp: int) -> list[Part]:
    """The sampling masks of samples, for each of cp context-parallel ranks.

    A token outside a response (of a prompt, or behind the end) has no ids.

    Args:
        samples: of this replica, N.
        boundaries: [N + 1], where each begins among the tokens, its padding included: a batch's `cu_seqlens`.
        cp: context-parallel ranks.

    Raises:
        ValueError: for a sample without sampling masks, and for a token that is not in its own: the loss
            would silently leave both out, as their log-prob under the trainer is -inf.
    """
    lengths = np.zeros(boundaries[-1], dtype=np.int32)
    for start, sample in zip(boundaries[:-1], samples, strict=True):
        if sample.output_ids.numel():
            first = start + sample.prompt_ids.numel() - 1
            lengths[first : first + sample.output_ids.numel()] = _checked_lengths(sample)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    none = torch.empty(0, dtype=torch.int32)
    ids = torch.cat([none, *[sample.support.ids for sample in samples if sample.support is not None]])
    parts = []
    for rank in range(cp):
        positions = zigzag_positions(rank, cp, boundaries).numpy()
        # Its positions are runs of neighbours, two a sample, whose ids are neighbours too.
        runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        own = [ids[starts[run[0]] : starts[run[-1] + 1]] for run in runs]
        parts.append((torch.from_numpy(lengths[positions]), torch.cat([none, *own])))
    return parts


def _checked_lengths(sample: Trajectory) -> np.ndarray:
    """[response tokens] int32: how many ids each was drawn from."""
    who = f"a sample of prompt {sample.prompt_index}"
    if sample.support is None:
        raise ValueError(
            f"{who} has no sampling mask, but --rollout-top-k and --rollout-top-p truncate what servers "
            "sample from: its log-probs can't be compared with the trainer's; leave both flags out, or "
            "sample it with them"
        )
    lengths = sample.support.lengths
    at = torch.arange(len(lengths)).repeat_interleave(lengths)
    found = torch.zeros(len(lengths), dtype=torch.bool)
    found[at[sample.support.ids == sample.output_ids[at]]] = True
    if not found.all():
        first = int(found.int().argmin())
        raise ValueError(
            f"{who} has token {int(sample.output_ids[first])} at position {first} of its response, which is "
            f"none of the {int(lengths[first])} ids of its sampling mask; the server's top-k and top-p are "
            "not what it said"
        )
    return lengths.numpy()
