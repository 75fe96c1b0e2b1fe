"""How a step's samples lie in tensors: the one file that knows. Whole rows, and a rank's part of them.

N samples of this replica, each a row of L = --seq-length positions (or a context-parallel
rank's share of them).
Position t of a row predicts token t + 1. Other files see T = N * L tokens and S = N sequences: `flat` and
`spread` make [T] of a value a token and a value a sequence, `seq_ids` says which token is whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.core.segments import row_ids
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.sampling_mask import SamplingMasks
from megatron_rl_corr.mcore.replicas import broadcast_batch
from megatron_rl_corr.reduce.collectives import all_gather_stacked
from megatron_rl_corr.reduce.context import zigzag_positions
from megatron_rl_corr.reduce.failure import communication_device
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout import versions

if TYPE_CHECKING:
    from megatron_rl_corr.mcore.packed_batch import PackedBatch
    from megatron_rl_corr.mcore.packing import PackLimits


@dataclass(frozen=True)
class BatchShape:
    """Sizes of a step's batch, on every rank alike. Example: 64 samples, 8 a prompt, 2 a
    microbatch, 4096 positions.
    """

    global_batch_size: int
    """Samples of an update, of all replicas."""
    group_size: int
    """Samples of a prompt."""
    micro_batch_size: int
    """Samples of a microbatch."""
    seq_length: int
    """Positions of a whole row."""
    packing: PackLimits | None = None
    """How sequences are packed; None: padded rows."""
    updates: int = 1
    """--rollout-updates-per-batch: parts that the collected samples are cut into."""

    @property
    def positions(self) -> int:
        """All positions of an update's global batch, padding included."""
        return self.global_batch_size * self.seq_length

    @property
    def collected(self) -> int:
        """Samples of a batch, of all replicas."""
        return self.global_batch_size * self.updates

    def rows(self, dp_size: int) -> int:
        """Samples of a batch on one of dp_size replicas.

        Raises ValueError where a prompt's samples would not stay on one replica.
        """
        share = self.collected // dp_size
        if self.global_batch_size % dp_size or share % self.group_size:
            times = f" x --rollout-updates-per-batch {self.updates}" if self.updates > 1 else ""
            raise ValueError(
                f"--global-batch-size {self.global_batch_size}{times} must be a multiple of "
                f"--rollout-group-size {self.group_size} times the data-parallel size {dp_size}: a prompt's "
                "samples stay on one replica"
            )
        several = 1 if self.packing is None else self.packing.count_multiple
        if (self.global_batch_size // dp_size) % several:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size} over {dp_size} data-parallel ranks must be a "
                f"multiple of {several}, as interleaved stages take so many microbatches at a time"
            )
        return share


@dataclass(frozen=True)
class RolloutBatch:
    """One replica's samples, padded to rows of L; under context parallelism, this rank's columns of them."""

    tokens: Tensor
    """[N, L] int64, input ids; 0 behind the end."""
    labels: Tensor
    """[N, L] int64, tokens moved left by one."""
    loss_mask: Tensor
    """[N, L] bool: the label was sampled by the policy."""
    rollout_logprobs: Tensor
    """[N, L] float32 of the label; 0 outside the mask, NaN where the server gave none."""
    rewards: Tensor
    """[N] float32."""
    group_ids: Tensor
    """[N] int64, numbers the prompts of this replica."""
    version_lags: Tensor
    """[N] float32: the trainer's weight version minus the one that sampled the first token."""
    position_ids: Tensor
    """[L] int64: each column's position in the whole row."""
    token_lags: Tensor | None = None
    """[N, L] int64: as version_lags, of the label's own version; 0 outside the mask. None:
    nobody asks for it.
    """
    turn_ids: Tensor | None = None
    """[N, L] int64: the policy's turn that sampled the label, from 0; 0 outside the mask. None:
    rows have one turn.
    """
    num_turns: int | None = None
    """Larger than every turn id, the same on all ranks; None without turn_ids."""
    in_loss: Tensor | None = None
    """[N] bool: False for a sample that only its group's baseline counts. None: all are in the loss."""
    engine_ids: Tensor | None = None
    """[N] int64: which of `engines` sampled it; None where all have the same."""
    engines: tuple[str, ...] = ()
    """Names as `Trajectory.engine` has them."""
    ends: Tensor | None = None
    """[N] int64: number of real positions of the whole row, where columns were cut; None:
    read from the mask.
    """
    sampling_masks: SamplingMasks | None = None
    """The ids that each of the T labels was drawn from, on the last stage. None: the whole vocabulary."""

    @classmethod
    def empty(cls, rows: int, length: int) -> RolloutBatch:
        """Zeros of the right shapes, to receive into."""
        device = communication_device()

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            tokens=zeros(rows, length, dtype=torch.int64),
            labels=zeros(rows, length, dtype=torch.int64),
            loss_mask=zeros(rows, length, dtype=torch.bool),
            rollout_logprobs=zeros(rows, length, dtype=torch.float32),
            rewards=zeros(rows, dtype=torch.float32),
            group_ids=zeros(rows, dtype=torch.int64),
            version_lags=zeros(rows, dtype=torch.float32),
            token_lags=zeros(rows, length, dtype=torch.int64),
            position_ids=torch.arange(length, device=device),
        )

    @classmethod
    def from_trajectories(
        cls,
        trajectories: Sequence[Trajectory],
        rewards: Tensor,
        *,
        length: int,
        version: int,
        num_turns: int | None = None,
        mask_truncated: bool = False,
    ) -> RolloutBatch:
        """Rows of the samples' tokens, on the communication device.

        Args:
            trajectories: of one replica, group by group.
            rewards: [N] float32.
            length: L.
            version: of the trainer's weights.
            num_turns: the largest number of turns of a sample; None without an environment.
            mask_truncated: keep samples that were cut (finish reason length) out of the loss.

        Raises:
            ValueError: for a sample of more than L + 1 tokens (the last one is a label only).
        """
        batch = cls.empty(len(trajectories), length)
        host = {name: value.cpu() for name, value in vars(batch).items() if isinstance(value, Tensor)}
        if num_turns is not None:
            host["turn_ids"] = torch.zeros_like(host["tokens"])
        for row, sample in enumerate(trajectories):
            ids = torch.cat([sample.prompt_ids, sample.output_ids])
            prompt, end = len(sample.prompt_ids), len(ids) - 1
            if end > length:
                raise ValueError(
                    f"--seq-length {length} is too short for a sample of {len(ids)} tokens ({prompt} of them "
                    f"prompt); use --seq-length {end} or more, or a smaller --rollout-max-new-tokens"
                )
            host["tokens"][row, :end] = ids[:-1]
            host["labels"][row, :end] = ids[1:]
            sampled = sample.sampled
            host["loss_mask"][row, prompt - 1 : end] = sampled
            host["rollout_logprobs"][row, prompt - 1 : end] = sample.rollout_logprobs.where(sampled, 0.0)
            if num_turns is not None and sample.turn_ids is not None:
                assert (sample.turn_ids < num_turns).all(), "more turns than num_turns"
                host["turn_ids"][row, prompt - 1 : end] = sample.turn_ids.where(sampled, 0)
            host["token_lags"][row, prompt - 1 : end] = versions.token_lags(sample, version).where(sampled, 0)
            host["group_ids"][row] = sample.prompt_index
            host["version_lags"][row] = version - versions.number(sample.oldest_version)
        host["rewards"].copy_(rewards)
        if mask_truncated:
            host["in_loss"] = torch.tensor([sample.finish_reason != "length" for sample in trajectories])
        tensors = {name: tensor.to(batch.tokens.device) for name, tensor in host.items()}
        return cls(**tensors, num_turns=num_turns)

    def broadcast(self, layout: Layout, *, num_turns: int | None = None) -> RolloutBatch:
        """The data leader's batch on its whole replica: two tensors over tensor x context, then pipeline.

        Every rank passes a batch of the same shapes; only the leader's values count. num_turns: as in
        `from_trajectories`. `sampling_masks` are sent by `scatter_sampling_masks`.
        """
        return replace(self, **broadcast_batch(self, layout, num_turns=num_turns), num_turns=num_turns)

    def context_slice(self, rank: int, size: int) -> RolloutBatch:
        """The columns of context-parallel rank `rank` of `size`, in Megatron's zigzag order."""
        if size == 1:
            return self
        columns = zigzag_positions(rank, size, (0, self.tokens.shape[1]), self.tokens.device)
        names = ("tokens", "labels", "loss_mask", "rollout_logprobs", "token_lags", "turn_ids")
        by_column = {name: value for name in names if (value := getattr(self, name)) is not None}
        cut = {name: value.index_select(1, columns) for name, value in by_column.items()}
        return replace(self, **cut, position_ids=self.position_ids[columns], ends=self._ends())

    def part(self, samples: Sequence[int] | np.ndarray) -> RolloutBatch:
        """These rows of the batch, by their places in it, in this order."""
        rows, masks = torch.as_tensor(samples, device=self.tokens.device), self.sampling_masks
        names = (
            "tokens",
            "labels",
            "loss_mask",
            "rollout_logprobs",
            "rewards",
            "group_ids",
            "version_lags",
            "token_lags",
            "turn_ids",
            "ends",
            "in_loss",
            "engine_ids",
        )
        cut = {name: getattr(self, name)[rows] for name in names if getattr(self, name) is not None}
        return replace(self, **cut, sampling_masks=masks and masks.at(self.host_places_of(samples)))

    def host_places_of(self, samples: Sequence[int] | np.ndarray) -> np.ndarray:
        """The places of these samples' tokens among the T, [T'] int64, on the host."""
        length = self.tokens.shape[1]
        return (np.asarray(samples, dtype=np.int64)[:, None] * length + np.arange(length)).reshape(-1)

    @property
    def padding(self) -> Tensor:
        """[N, L] bool: positions behind the row's last sampled token."""
        ends = self._ends() if self.ends is None else self.ends
        return self.position_ids >= ends[:, None]

    def _ends(self) -> Tensor:
        """[N] number of real positions, of whole rows. Without a sampled token all are: a mean
        over none is NaN.
        """
        length = self.loss_mask.shape[1]
        ends = (self.loss_mask * torch.arange(1, length + 1, device=self.loss_mask.device)).amax(1)
        return torch.where(ends > 0, ends, length)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.tokens)

    @property
    def host_starts(self) -> np.ndarray:
        """[N + 1] int64 on the host: where each row begins among the T."""
        return np.arange(len(self.tokens) + 1) * self.tokens.shape[1]

    cu_seqlens = host_starts
    """The same, in a batch that no context-parallel rank has cut."""

    @property
    def parted_groups(self) -> int:
        """0: a group's rows are all on this replica."""
        return 0

    @property
    def flat_positions(self) -> Tensor:
        """[T] int64: where each token stands in its row."""
        return self.position_ids.repeat(len(self.tokens))

    def name_of(self, sample: int, group_size: int) -> str:
        """What a sample is called in an error."""
        return f"sample {sample % group_size} of prompt {sample // group_size}"

    @property
    def seq_ids(self) -> Tensor:
        """[T] int64: the sequence of each token."""
        return row_ids(*self.tokens.shape, self.tokens.device)

    def flat(self, values: Tensor) -> Tensor:
        """One of this batch's tensors with a value a token, [N, L] -> [T]."""
        return values.reshape(-1)

    def spread(self, values: Tensor) -> Tensor:
        """A value a sequence [S] -> [T]: each token's, the value of its sequence."""
        return values[self.seq_ids]

    @cached_property
    def sampled_rows(self) -> SampledRows:
        """Which of the T labels were sampled: the mask's one read on the host, before the
        first forward pass.
        """
        return SampledRows.of(self.flat(self.loss_mask).cpu().numpy(), self.loss_mask.device)

    @property
    def flat_turn_ids(self) -> Tensor | None:
        """[T] int64, or None."""
        return None if self.turn_ids is None else self.flat(self.turn_ids)

    def all_gather_rows(self, values: Tensor, cp_group: dist.ProcessGroup) -> Tensor:
        """Values [K, T] of each context-parallel rank's tokens -> [K, N, whole row], in the
        order of the row.
        """
        size, values = cp_group.size(), values.view(len(values), *self.tokens.shape)
        if size == 1:
            return values
        whole = values.new_empty(*values.shape[:2], size * values.shape[2])
        for rank, part in enumerate(all_gather_stacked(values, cp_group)):
            whole[:, :, zigzag_positions(rank, size, (0, whole.shape[2]), values.device)] = part
        return whole


def trained_tokens(batch: RolloutBatch | PackedBatch) -> Tensor:
    """[T] bool: the policy sampled the label, and its sample is in the loss."""
    mask = batch.flat(batch.loss_mask)
    return mask if batch.in_loss is None else mask & batch.spread(batch.in_loss)


def in_baseline(batch: RolloutBatch | PackedBatch, kept_sequences: Tensor) -> Tensor:
    """[S] bool: the samples that their groups' baselines count: those kept, and those that only
    baselines count.
    """
    return kept_sequences if batch.in_loss is None else kept_sequences | ~batch.in_loss
