"""How a step's samples lie in tensors: the one file that knows. One sequence behind the other.

S sequences of this replica, T tokens of them on this context-parallel rank, cp such ranks, E episodes: a
sample is an episode, which has one sequence, or several where its agent edits its history. Each sequence is
padded to a multiple: of 2 * cp, of which every rank takes its two chunks, where microbatches are packs; of
L = --seq-length where they are rows. Position t of a sequence predicts token t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.core.segments import sums_of_episodes
from megatron_rl_corr.engines.trajectory import TopLogprobs, Trajectory, episode_numbers
from megatron_rl_corr.logprobs.sampling_mask import SamplingMasks
from megatron_rl_corr.mcore.batch.packing import PackLimits
from megatron_rl_corr.reduce.collectives import all_gather_stacked, collective
from megatron_rl_corr.reduce.context import zigzag_positions, zigzag_runs
from megatron_rl_corr.rollout import versions

AgentBranches = Literal["episode", "sequence"]


@dataclass(frozen=True)
class BatchShape:
    """Sizes of a step's batch, on every rank alike. Example: 64 samples, 8 a prompt, 2 a
    microbatch, 4096 positions.
    """

    global_batch_size: int
    """Samples of an update, of all replicas: episodes, which have one sequence or several."""
    group_size: int
    """Samples of a prompt."""
    micro_batch_size: int
    """Samples of a microbatch."""
    seq_length: int
    """Positions of a whole row."""
    packing: PackLimits | None = None
    """How sequences are packed; None: microbatches are padded rows."""
    updates_per_batch: int = 1
    """--rollout-updates-per-batch: parts that the collected samples are cut into."""

    @property
    def collected(self) -> int:
        """Samples of a batch, of all replicas."""
        return self.global_batch_size * self.updates_per_batch

    def sequence_multiple(self, cp_size: int) -> int:
        """A sequence is padded to a multiple of it: 2 * cp chunks of one token or more, or a whole row."""
        if self.packing is None:
            return self.seq_length
        return chunk_multiple(cp_size)

    def rows(self, dp_size: int) -> int:
        """Samples of a batch on one of dp_size replicas.

        Raises ValueError where a prompt's samples would not stay on one replica.
        """
        share = self.collected // dp_size
        if self.global_batch_size % dp_size or share % self.group_size:
            times = (
                f" x --rollout-updates-per-batch {self.updates_per_batch}"
                if self.updates_per_batch > 1
                else ""
            )
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
    """One replica's sequences, one behind the other; under context parallelism, this rank's tokens of each.

    Example of sequences of 3 and 2 tokens, cp 1: positions [0, 1, 2, 0, 1], seq_ids [0, 0, 0, 1, 1],
    cu_seqlens [0, 3, 5]. With cp 2, or as rows of 4, they are padded to 4 each (cu_seqlens [0, 4, 8]); of
    cp 2 rank 0 has positions [0, 3, 0, 3].
    """

    tokens: Tensor | None
    """[T] int64, input ids; 0 in padding. On the first and the last stage, None on others."""
    labels: Tensor | None
    """[T] int64: the next token of the sequence. On the last stage, None on others."""
    loss_mask: Tensor | None
    """[T] bool: the label was sampled by the policy. On the last stage, None on others."""
    rollout_logprobs: Tensor | None
    """[T] float32 of the label; 0 outside the mask, NaN where the server gave none. On the
    last stage, None on others.
    """
    positions: Tensor
    """[T] int64, in the whole sequence."""
    seq_ids: Tensor
    """[T] int64 in [0, S)."""
    cu_seqlens: np.ndarray
    """[S + 1] int64 on the host: where each whole sequence begins, its padding included, over all of cp."""
    lengths: np.ndarray
    """[S] int64 on the host: tokens of each whole sequence, without padding."""
    rewards: Tensor
    """[S] float32."""
    group_ids: Tensor
    """[S] int64, numbers the prompts of this replica; with parted_groups, of all."""
    version_lags: Tensor
    """[S] float32: the trainer's weight version minus the one that sampled the first token."""
    token_lags: Tensor | None = None
    """[T] int64: as version_lags, of the label's own version; 0 outside the mask. None:
    nobody asks for it.
    """
    in_loss: Tensor | None = None
    """[S] bool: False for a sample that only its group's baseline counts. None: all are in the loss."""
    engine_ids: Tensor | None = None
    """[S] int64: which of `engines` sampled it; None where all have the same."""
    engines: tuple[str, ...] = ()
    """Names as `Trajectory.engine` has them."""
    turn_ids: Tensor | None = None
    """[T] int64: the policy's turn that sampled the label, from 0; 0 outside the mask. None:
    sequences of one turn.
    """
    num_turns: int | None = None
    """Larger than every turn id, the same on all ranks; None without turn_ids."""
    sampling_masks: SamplingMasks | None = None
    """The ids that each of the T labels was drawn from, on the last stage. None: the whole vocabulary."""
    top_ids: Tensor | None = None
    """[T, K] int32: the ids that were likeliest where the label was sampled, 0 outside the mask. On the last
    stage, None on others and where nobody asks.
    """
    top_logprobs: Tensor | None = None
    """[T, K] float32 of these; 0 outside the mask."""
    parted_groups: int = 0
    """Groups of all replicas, where one may have samples on several; 0: a group is whole on this replica."""
    cp: tuple[int, int] = (0, 1)
    """(rank, size) of the context-parallel ranks that share the tokens; (0, 1) for whole sequences."""
    episodes: np.ndarray | None = None
    """[S] int64 on the host, rising in [0, E): which episode each sequence is of. None: each is one."""
    episode_ids: Tensor | None = None
    """The same, as a tensor."""
    means_of: AgentBranches = "episode"
    """What means over samples in the loss take as one: an episode, or each of its sequences."""

    @classmethod
    def bare(
        cls,
        lengths: Sequence[int],
        multiple: int,
        *,
        cp: tuple[int, int] = (0, 1),
        device: torch.device | str = "cpu",
    ) -> RolloutBatch:
        """Sequences of which nothing is known but where their tokens lie: that follows from the lengths.

        Args:
            lengths: [S] tokens of each sequence.
            multiple: each is padded to one.
            cp: as the field.
            device: of the tensors.
        """
        real = np.asarray(lengths, dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(-(-real // multiple) * multiple)])
        runs = np.asarray(zigzag_runs(*cp, starts.tolist()), dtype=np.int64).reshape(-1, 2)
        ids = np.searchsorted(starts, runs[:, 0], side="right") - 1
        of_runs = [np.arange(begin, end) for begin, end in runs - starts[ids, None]]
        rows = torch.zeros(len(real), device=device)
        return cls(
            tokens=None,
            labels=None,
            loss_mask=None,
            rollout_logprobs=None,
            positions=torch.from_numpy(np.concatenate(of_runs)).to(device),
            seq_ids=torch.from_numpy(np.repeat(ids, np.diff(runs)[:, 0])).to(device),
            cu_seqlens=starts,
            lengths=real,
            rewards=rows,
            group_ids=rows.long(),
            version_lags=rows.clone(),
            cp=cp,
        )

    @classmethod
    def empty(
        cls,
        lengths: Sequence[int],
        multiple: int,
        *,
        num_turns: int | None = None,
        top_logprobs: int = 0,
    ) -> RolloutBatch:
        """As `bare`, of whole sequences on the host, with zeros for each token. num_turns: as the field;
        top_logprobs: K.
        """
        made = cls.bare(lengths, multiple)
        long = torch.zeros_like(made.seq_ids)
        return replace(
            made,
            tokens=long,
            labels=long.clone(),
            loss_mask=long.bool(),
            rollout_logprobs=long.float(),
            token_lags=long.clone(),
            turn_ids=None if num_turns is None else long.clone(),
            num_turns=num_turns,
            top_ids=long.new_zeros(len(long), top_logprobs, dtype=torch.int32) if top_logprobs else None,
            top_logprobs=torch.zeros(len(long), top_logprobs) if top_logprobs else None,
        )

    @classmethod
    def from_trajectories(
        cls,
        trajectories: Sequence[Trajectory],
        rewards: Tensor,
        *,
        length: int,
        version: int,
        multiple: int = 1,
        num_turns: int | None = None,
        mask_truncated: bool = False,
        with_episodes: bool = False,
        top_logprobs: int = 0,
    ) -> RolloutBatch:
        """The samples' tokens in their order, on the host.

        Args:
            trajectories: of one replica.
            rewards: [S] float32.
            length: the longest that a sequence may be, --seq-length.
            version: of the trainer's weights.
            multiple: each sequence is padded to one, `BatchShape.sequence_multiple`.
            num_turns: the largest number of turns of a sample; None without an environment.
            mask_truncated: keep sequences that were cut (finish reason length) out of the loss.
            with_episodes: an episode may have several sequences, one behind the other.
            top_logprobs: K of the likeliest ids that the loss needs; 0: none.

        Raises:
            ValueError: for a sample of more than length + 1 tokens (the last one is a label only), and for
                one without its K likeliest ids.
        """
        lengths = [_real_length(sample, length) for sample in trajectories]
        whole = cls.empty(lengths, multiple, num_turns=num_turns, top_logprobs=top_logprobs)
        host = {name: value for name, value in vars(whole).items() if isinstance(value, Tensor)}
        for sample, start in zip(trajectories, whole.cu_seqlens[:-1], strict=True):
            ids = torch.cat([sample.prompt_ids, sample.output_ids])
            own, sampled = slice(start, start + len(ids) - 1), sample.sampled
            response = slice(start + len(sample.prompt_ids) - 1, start + len(ids) - 1)
            host["tokens"][own], host["labels"][own] = ids[:-1], ids[1:]
            host["loss_mask"][response] = sampled
            host["token_lags"][response] = versions.token_lags(sample, version).where(sampled, 0)
            host["rollout_logprobs"][response] = sample.rollout_logprobs.where(sampled, 0.0)
            if top_logprobs and len(sample.output_ids):
                top = _likeliest(sample, top_logprobs)
                host["top_ids"][response] = top.ids
                host["top_logprobs"][response] = top.logprobs.where(sampled[:, None], 0.0)
            if num_turns is not None and sample.turn_ids is not None:
                assert (sample.turn_ids < num_turns).all(), "more turns than num_turns"
                host["turn_ids"][response] = sample.turn_ids.where(sampled, 0)
        host["group_ids"] = torch.tensor([sample.prompt_index for sample in trajectories])
        if mask_truncated:
            host["in_loss"] = torch.tensor([sample.finish_reason != "length" for sample in trajectories])
        lags = [version - versions.number(sample.oldest_version) for sample in trajectories]
        host["version_lags"], host["rewards"] = torch.tensor(lags, dtype=torch.float32), rewards.float()
        made = replace(whole, **host)
        if not with_episodes:
            return made
        return made.of_episodes(np.asarray(episode_numbers(trajectories), dtype=np.int64))

    def of_episodes(self, episodes: np.ndarray) -> RolloutBatch:
        """The same sequences, of these episodes: [S], as the field."""
        ids = torch.from_numpy(episodes).to(self.rewards.device, non_blocking=True)
        return replace(self, episodes=episodes, episode_ids=ids)

    def to(self, device: torch.device) -> RolloutBatch:
        """The same, its tensors on a device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: value.to(device) for name, value in tensors.items()})

    def context_slice(self, rank: int, size: int) -> RolloutBatch:
        """Context-parallel rank `rank`'s part: of each sequence the chunks rank and 2 * size - 1 -
        rank of 2 * size.
        """
        if size == 1:
            return self
        return replace(
            self,
            **self._tokens_at(zigzag_positions(rank, size, self.cu_seqlens.tolist(), self.seq_ids.device)),
            cp=(rank, size),
        )

    def _tokens_at(self, places: Tensor) -> dict[str, Tensor]:
        names = (
            "tokens",
            "labels",
            "loss_mask",
            "rollout_logprobs",
            "token_lags",
            "positions",
            "seq_ids",
            "turn_ids",
            "top_ids",
            "top_logprobs",
        )
        return {name: getattr(self, name)[places] for name in names if getattr(self, name) is not None}

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.rewards)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.seq_ids)

    @property
    def num_episodes(self) -> int:
        """E."""
        return self.num_sequences if self.episodes is None else int(self.episodes[-1]) + 1

    @property
    def mean_ids(self) -> Tensor | None:
        """[S] int64: which sample of the loss's means each sequence is of; None: each is one."""
        return self.episode_ids if self.means_of == "episode" else None

    def episode_sums(self, values: Tensor) -> Tensor:
        """A value a sequence [S] float64 -> [E]: the sum over each episode."""
        if self.episode_ids is None:
            return values
        return sums_of_episodes(values, self.episode_ids)[: self.num_episodes]

    def episode_means(self, values: Tensor) -> Tensor:
        """A value a sequence [S] float64 -> [E]: the mean over each episode."""
        if self.episode_ids is None:
            return values
        return self.episode_sums(values) / self.episode_sums(torch.ones_like(values))

    def samples_of(self, episodes: Sequence[int]) -> np.ndarray:
        """The sequences of these episodes, by their places in the batch, in the order of the episodes."""
        wanted = np.asarray(episodes, dtype=np.int64)
        if self.episodes is None:
            return wanted
        starts = np.searchsorted(self.episodes, np.arange(self.num_episodes + 1))
        return np.concatenate([np.arange(starts[one], starts[one + 1]) for one in wanted])

    def name_of(self, sample: int) -> str:
        """The sample's name in an error: a prompt's samples may be on several replicas."""
        prompt = f"prompt {int(self.group_ids[sample])}{' of the step' if self.parted_groups else ''}"
        return f"sample {sample}, which is of {prompt},"

    def spread(self, values: Tensor) -> Tensor:
        """A value a sequence [S] -> [T]: each token's, the value of its sequence."""
        return values[self.seq_ids]

    @cached_property
    def sampled(self) -> np.ndarray:
        """[T] bool on the host: the mask's one read, before the first forward pass."""
        return self.loss_mask.cpu().numpy()

    @property
    def padding(self) -> Tensor:
        """[T] bool: positions behind the sequence's last token."""
        ends = torch.from_numpy(self.lengths).to(self.positions.device, non_blocking=True)
        return self.positions >= ends[self.seq_ids]

    def part(self, samples: Sequence[int]) -> RolloutBatch:
        """These samples of the batch, by their places in it, in this order."""
        (places, rows), masks = self.places_of(samples), self.sampling_masks
        padded = np.diff(self.cu_seqlens)[np.asarray(samples, dtype=np.int64)]
        numbers = np.repeat(np.arange(len(samples)), padded // self.cp[1])
        cut = self._tokens_at(places) | {
            "seq_ids": torch.from_numpy(numbers).to(places.device, non_blocking=True)
        }
        names = ("rewards", "group_ids", "version_lags", "in_loss", "engine_ids")
        by_row = {name: getattr(self, name)[rows] for name in names if getattr(self, name) is not None}
        own = replace(
            self,
            **cut,
            **by_row,
            cu_seqlens=np.concatenate([[0], np.cumsum(padded)]),
            lengths=self.lengths[np.asarray(samples, dtype=np.int64)],
            sampling_masks=None if masks is None else masks.at(self.host_places_of(samples)),
        )
        if self.episodes is None:
            return own
        numbers = self.episodes[np.asarray(samples, dtype=np.int64)]
        # Anew from 0 in this order, in which an episode's sequences are neighbours.
        return own.of_episodes(np.cumsum(np.diff(numbers, prepend=numbers[:1]) != 0))

    def places_of(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(the places of these samples' tokens among the T, [T'], the samples' own [S']),
        int64 on the device.
        """
        host, device = (
            (self.host_places_of(samples), np.asarray(samples, dtype=np.int64)),
            self.seq_ids.device,
        )
        places, rows = (torch.from_numpy(numbers).to(device, non_blocking=True) for numbers in host)
        return places, rows

    @property
    def host_starts(self) -> np.ndarray:
        """[S + 1] int64 on the host: where each sequence begins among the T, with its padding."""
        return self.cu_seqlens // self.cp[1]

    def host_places_of(self, samples: Sequence[int]) -> np.ndarray:
        """The first of `places_of`, on the host."""
        starts = self.host_starts
        none = np.empty(0, dtype=np.int64)
        return np.concatenate([none, *(np.arange(starts[one], starts[one + 1]) for one in samples)])

    @collective
    def whole_rows(self, values: Tensor, cp_group: dist.ProcessGroup) -> Tensor:
        """Values [K, T] of each context-parallel rank's tokens -> [K, S, longest sequence]; 0
        behind the ends.
        """
        size, total = cp_group.size(), int(self.cu_seqlens[-1])
        whole = values
        if size > 1:
            whole = values.new_empty(len(values), total)
            for rank, part in enumerate(all_gather_stacked(values, cp_group)):
                whole[:, zigzag_positions(rank, size, self.cu_seqlens.tolist(), values.device)] = part
        rows = np.repeat(np.arange(self.num_sequences), np.diff(self.cu_seqlens))
        columns = np.arange(total) - self.cu_seqlens[rows]
        made = values.new_zeros(len(values), self.num_sequences, int(np.diff(self.cu_seqlens).max()))
        made[:, torch.from_numpy(rows).to(values.device), torch.from_numpy(columns).to(values.device)] = whole
        return made


def chunk_multiple(cp_size: int) -> int:
    """Context parallelism cuts a sequence into 2 * cp chunks of one token or more."""
    return 2 * cp_size if cp_size > 1 else 1


def _real_length(sample: Trajectory, length: int) -> int:
    """Positions of a sample. One without a response has a token too: a prompt of one is input and
    label of nothing.
    """
    prompt, ids = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.output_ids)
    if ids - 1 > length:
        raise ValueError(
            f"--seq-length {length} is too short for a sample of {ids} tokens ({prompt} of them prompt); use "
            f"--seq-length {ids - 1} or more, or a smaller --rollout-max-new-tokens"
        )
    return max(ids - 1, 1)


def _likeliest(sample: Trajectory, count: int) -> TopLogprobs:
    """The `count` likeliest ids at each response token.

    Raises:
        ValueError: the sample has fewer.
    """
    top = sample.top_logprobs
    known = 0 if top is None else top.ids.shape[1]
    if known < count:
        raise ValueError(
            f"`score_centering` {count} needs the log-probs of so many ids at each token, and a sample of "
            f"prompt {sample.prompt_index} has {known}; sample it with the option, or use fewer"
        )
    order = top.logprobs.argsort(dim=1, descending=True, stable=True)[:, :count]
    return TopLogprobs(top.ids.gather(1, order), top.logprobs.gather(1, order))


def trained_tokens(batch: RolloutBatch) -> Tensor:
    """[T] bool: the policy sampled the label, and its sample is in the loss."""
    mask = batch.loss_mask
    return mask if batch.in_loss is None else mask & batch.spread(batch.in_loss)


def in_baseline(batch: RolloutBatch, kept_sequences: Tensor) -> Tensor:
    """[S] bool: the samples that their groups' baselines count: those kept, and those that only
    baselines count.
    """
    return kept_sequences if batch.in_loss is None else kept_sequences | ~batch.in_loss
