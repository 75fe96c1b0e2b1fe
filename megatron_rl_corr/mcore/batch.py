"""A step's samples as tensors that every rank of a replica holds, and their microbatches.

N samples of this replica, L = --seq-length (or a context-parallel rank's share of it), b = --micro-batch-size.
Position t of a row predicts token t + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.segments import row_ids
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.logprobs.sampling_mask import Supports
from megatron_rl_corr.parallel.context import zigzag_positions
from megatron_rl_corr.parallel.failure import communication_device
from megatron_rl_corr.parallel.layout import Layout
from megatron_rl_corr.rollout import versions


@dataclass(frozen=True)
class RolloutBatch:
    """One replica's samples, padded to rows of L; of several context-parallel ranks, each holds its columns."""

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
    """[N] int64: which prompt of this replica the sample answers."""
    version_lags: Tensor
    """[N] float32: trainer's weight version less the one that sampled the first token."""
    position_ids: Tensor
    """[L] int64: each column's position in the whole row."""
    turn_ids: Tensor | None = None
    """[N, L] int64: which turn of the policy the label is of, from 0; 0 outside the mask. None: rows have one turn."""
    num_turns: int | None = None
    """Above every turn id, the same on all ranks; None where those are."""
    ends: Tensor | None = None
    """[N] int64: positions before it are real tokens, where columns were cut; None: the mask tells."""
    routes: Tensor | None = None
    """[N, t, M, k] uint8 or int16: the server's experts of the tokens and layers that this rank's routers see."""
    supports: Supports | None = None
    """The ids that each of the N * L labels was drawn from, on the last stage. None: the whole vocabulary."""

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
            position_ids=torch.arange(length, device=device),
        )

    @classmethod
    def from_trajectories(
        cls, trajectories: Sequence[Trajectory], rewards: Tensor, *, length: int, version: int,
        num_turns: int | None = None,
    ) -> RolloutBatch:
        """ValueError for a sample of more than length + 1 tokens (the last one is a label only).

        num_turns: the most that an environment lets a sample have, where there is one.
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
            host["group_ids"][row] = sample.prompt_index
            host["version_lags"][row] = version - versions.number(sample.oldest_version)
        host["rewards"].copy_(rewards)
        tensors = {name: tensor.to(batch.tokens.device) for name, tensor in host.items()}
        return cls(**tensors, num_turns=num_turns)

    def broadcast(self, layout: Layout, *, num_turns: int | None = None) -> RolloutBatch:
        """The data leader's batch on its whole replica: two tensors over tensor x context, then pipeline.

        Every rank passes a batch of the same shapes; only the leader's values count. num_turns: as in
        `from_trajectories`; turn ids travel with the tokens. Routes and supports have transports of their own.
        """
        integers = [self.tokens, self.labels, self.loss_mask.long()]
        if num_turns is not None:
            integers.append(torch.zeros_like(self.tokens) if self.turn_ids is None else self.turn_ids)
        whole = torch.stack(integers).contiguous()
        rows = torch.stack([self.rewards, self.group_ids.float(), self.version_lags])
        real = torch.cat([self.rollout_logprobs.reshape(-1), rows.reshape(-1)])
        broadcast_to_replica([whole, real], layout)
        logprobs, rows = real.split([self.rollout_logprobs.numel(), rows.numel()])
        rewards, group_ids, lags = rows.view(3, -1)
        return RolloutBatch(
            whole[0], whole[1], whole[2].bool(), logprobs.view_as(self.rollout_logprobs),
            rewards, group_ids.long(), lags, self.position_ids,
            None if num_turns is None else whole[3], num_turns,
        )

    def context_slice(self, rank: int, size: int) -> RolloutBatch:
        """The columns of context-parallel rank `rank` of `size`, in Megatron's zigzag order."""
        if size == 1:
            return self
        columns = zigzag_positions(rank, size, (0, self.tokens.shape[1]), self.tokens.device)
        by_column = ["tokens", "labels", "loss_mask", "rollout_logprobs"]
        by_column += [] if self.turn_ids is None else ["turn_ids"]
        cut = {name: getattr(self, name).index_select(1, columns) for name in by_column}
        return replace(self, **cut, position_ids=self.position_ids[columns], ends=self._ends())

    @property
    def padding(self) -> Tensor:
        """[N, L] bool: behind the row's last sampled token."""
        ends = self._ends() if self.ends is None else self.ends
        return self.position_ids >= ends[:, None]

    def _ends(self) -> Tensor:
        """Of whole rows. A row without a sampled token is all real: a mean over no token would be NaN."""
        length = self.loss_mask.shape[1]
        ends = (self.loss_mask * torch.arange(1, length + 1, device=self.loss_mask.device)).amax(1)
        return torch.where(ends > 0, ends, length)

    @property
    def seq_ids(self) -> Tensor:
        """[N * L] int64: the row of each token."""
        return row_ids(*self.tokens.shape, self.tokens.device)

    @property
    def flat_turn_ids(self) -> Tensor | None:
        """[N * L] int64, or None."""
        return None if self.turn_ids is None else self.turn_ids.reshape(-1)


def broadcast_to_replica(tensors: list[Tensor], layout: Layout) -> None:
    """From the first rank of the first stage to its stage, and from there down every pipeline."""
    if layout.pp_rank == 0:
        _broadcast_from_first(tensors, layout.tp_cp_group)
    _broadcast_from_first(tensors, layout.pp_group)


def _broadcast_from_first(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        source = dist.get_process_group_ranks(group)[0]
        for tensor in tensors:
            dist.broadcast(tensor, source, group=group)


@dataclass(frozen=True)
class TrainingTargets:
    """What the loss needs beside the logits, flat over tokens; on the last pipeline stage only."""

    rollout_logprobs: Tensor
    """[tokens] float32, log pi_rollout of the label; NaN where the server gave none."""
    loss_mask: Tensor
    """[tokens] bool: the label was sampled by the policy, whatever its log-prob."""
    own_weights: Tensor
    """[tokens] bool: sampled, and by the weights that the trainer has now."""
    advantages: Tensor
    """[tokens] float32."""
    correction: Correction
    """The batch's; without a scoring pass it only counts tokens, and the loss makes each microbatch's."""
    coefficients: Tensor
    """[tokens] float32: the loss of the global batch is the sum of coefficients x token losses."""
    old_logprobs: Tensor | None = None
    """[tokens] float32, log pi_old of the label, of the scoring pass; None without one."""
    turn_ids: Tensor | None = None
    """[tokens] int64, in [0, num_turns); None where rows have one turn."""
    num_turns: int | None = None


@dataclass(frozen=True)
class Microbatch:
    """b rows: the model's inputs and, in training on the last stage, the loss's."""

    index: int
    """Its place in the step."""
    tokens: Tensor
    """[b, L] int64."""
    labels: Tensor
    """[b, L] int64."""
    position_ids: Tensor
    """[b, L] int64."""
    targets: TrainingTargets | None = None
    padding: Tensor | None = None
    """[b, L] bool: no token, as `RolloutBatch.padding` tells."""
    supports: Supports | None = None
    """The ids that each of the b * L labels was drawn from."""


def microbatches(
    batch: RolloutBatch, size: int, targets: TrainingTargets | None = None
) -> Iterator[Microbatch]:
    """Rows in order, `size` at a time; N must be a multiple of it."""
    rows, length = batch.tokens.shape
    positions, padding = batch.position_ids.expand(size, length), batch.padding
    for start in range(0, rows, size):
        part, first, last = slice(start, start + size), start * length, (start + size) * length
        micro = Microbatch(
            start // size, batch.tokens[part], batch.labels[part], positions, padding=padding[part],
            supports=None if batch.supports is None else batch.supports.tokens(first, last),
        )
        if targets is not None:
            cut = {
                name: value[first:last] for name, value in vars(targets).items() if isinstance(value, Tensor)
            }
            micro = replace(micro, targets=replace(targets, **cut, correction=targets.correction.rows(first, last)))
        yield micro
