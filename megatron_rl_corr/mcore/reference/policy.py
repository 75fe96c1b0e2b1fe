"""The reference policy on the trainer's own ranks: weights on the host that take the live ones'
place for one pass.

T tokens of this rank's batch, S sequences of this replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.kl import reward_kl
from megatron_rl_corr.core.segments import sums_of_episodes
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch
from megatron_rl_corr.mcore.forward import BatchForward
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.shards import LocalParameter, ShardRanks, load_shards
from megatron_rl_corr.reduce.collectives import ParallelGroups, collective
from megatron_rl_corr.reduce.metrics import Mean, Metric
from megatron_rl_corr.weight_sync.export import StageExporter

HOST = torch.device("cpu")


class ReferenceInPlace(RuntimeError):
    """Something would take the reference policy's weights for the trained ones."""


class ReferenceWeights:
    """This rank's weights of the reference policy, on the host.

    Where `in_place`, the model has the reference's weights and the host the live ones: each pair is
    exchanged through a copy of one tensor, so that the device holds one model and the host one more. Tensors
    stay where they are: a parameter may be a view of the distributed optimizer's buffer, or be known to a
    graph by its address.

    Args:
        parameters: of this rank, all of them; whole and current, as within `compat.gathered_parameters`.
    """

    def __init__(self, parameters: Sequence[LocalParameter]):
        self._live = list(parameters)
        self._kept = [_on_host(parameter.tensor) for parameter in self._live]
        self.are_in_place = False
        """The model has the reference's weights: `Reference.check_live`."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(kept.nbytes for kept in self._kept)

    def on_device(self) -> Sequence[LocalParameter]:
        """The reference's parameters for an exporter; each is copied to the device when it is read."""
        return _OnDevice(self)

    def parameter(self, i: int) -> LocalParameter:
        """The i-th, with the reference's values on the device."""
        assert not self.are_in_place
        live = self._live[i]
        return replace(live, tensor=self._kept[i].to(live.tensor.device))

    def __len__(self) -> int:
        return len(self._live)

    def load(self, checkpoint: HFCheckpoint, ranks: ShardRanks) -> None:
        """Take a Hugging Face checkpoint's weights. Raises ValueError as `load_shards`."""
        pairs = zip(self._live, self._kept, strict=True)
        loaded = [replace(parameter, tensor=kept) for parameter, kept in pairs]
        load_shards(loaded, checkpoint, ranks)
        # An expert bias is float32 from here on, in a tensor of its own.
        self._kept = [parameter.tensor for parameter in loaded]

    @torch.no_grad()
    def take(self) -> None:
        """Become the live weights, which must be whole and current."""
        assert not self.are_in_place
        for i, parameter in enumerate(self._live):
            if self._kept[i].dtype == parameter.tensor.dtype:
                self._kept[i].copy_(parameter.tensor)
            else:  # an expert bias, which Megatron makes float32 in its first pass
                self._kept[i] = _on_host(parameter.tensor)

    @contextmanager
    def in_place(self, only: Sequence[int] | None = None) -> Iterator[None]:
        """Within, the model has the reference's weights; after, byte for byte its own again,
        whatever was raised.

        Args:
            only: of these parameters alone, by their numbers.
        """
        assert not self.are_in_place
        self.are_in_place, exchanged = True, []
        try:
            for i in range(len(self._live)) if only is None else only:
                self._exchange(i)
                exchanged.append(i)
            yield
        finally:
            for i in reversed(exchanged):
                self._exchange(i)
            self.are_in_place = False

    @torch.no_grad()
    def _exchange(self, i: int) -> None:
        live, kept = self._live[i].tensor, self._kept[i]
        held = live.detach().clone()
        # What may fail for want of memory comes before the live weights are touched.
        store = (
            kept if kept.dtype == held.dtype else torch.empty_like(held, device=HOST, pin_memory=held.is_cuda)
        )
        live.copy_(kept)
        self._kept[i] = store.copy_(held)


class _OnDevice(Sequence):
    def __init__(self, weights: ReferenceWeights):
        self._weights = weights

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, i: int) -> LocalParameter:
        if i >= len(self):
            raise IndexError(i)
        return self._weights.parameter(i)


def _on_host(tensor: Tensor) -> Tensor:
    """A copy on the host, in memory that a GPU copies from without a detour."""
    kept = torch.empty_like(tensor, device=HOST, pin_memory=tensor.is_cuda)
    return kept.copy_(tensor.detach())


class Reference:
    """The null form, without a KL penalty that needs a reference policy."""

    weights: ReferenceWeights | None = None
    """What takes the live weights' place for a pass; None: nothing does."""
    reset_after = 0
    """The batch after which it last became the live policy; 0: never."""
    exporter: StageExporter | None = None
    """Gathers its weights, which must be saved with checkpoints; None: it is the same at every start."""
    metrics: Mapping[str, Metric] = MappingProxyType({})
    """About the reference itself, on the last stage."""

    def check_live(self, purpose: str) -> None:
        """Raise where the model has the reference's weights, which are never pushed, saved or trained.

        Args:
            purpose: what the model's weights are read for: "pushed".

        Raises:
            ReferenceInPlace: within the pass of the reference policy; on every rank, as all are in it.
        """
        if self.weights is not None and self.weights.are_in_place:
            raise ReferenceInPlace(
                f"the model's weights can't be {purpose} now: they are the reference policy's, for its "
                "forward pass, and the trained ones wait on the host; call this before the pass or after it"
            )

    def log_probs(self, forward: BatchForward) -> Tensor | None:
        """Log pi_ref of the batch's labels, [T] on the last stage, None on the others;
        every rank calls it.
        """

    def end_batch(self, number: int) -> None:
        """Reset the reference if it is time; the live weights must be whole and current.

        Args:
            number: batches trained so far, from the run's first start on.
        """

    def close(self) -> None:
        """Leave its servers, if it has any."""


class LocalReference(Reference):
    """A reference policy on the trainer's ranks.

    Args:
        weights: this rank's.
        reset_every: batches after which it becomes the live policy; None: it stays.
        reset_after: the batch after which it was last reset; 0: never.
        exporter: with reset_every, what gathers the weights on the host (`ReferenceWeights.on_device`).
    """

    def __init__(
        self,
        weights: ReferenceWeights,
        *,
        reset_every: int | None = None,
        reset_after: int = 0,
        exporter: StageExporter | None = None,
    ):
        self.weights, self._every, self.reset_after, self.exporter = (
            weights,
            reset_every,
            reset_after,
            exporter,
        )

    def log_probs(self, forward: BatchForward) -> Tensor | None:
        with forward.gathered(), self.weights.in_place():
            return forward.run()

    def end_batch(self, number: int) -> None:
        if self._every is not None and number % self._every == 0:
            self.weights.take()
            self.reset_after = number


@collective
def less_reference_kl(
    batch: RolloutBatch,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    config: RolloutCorrectionConfig,
    groups: ParallelGroups,
) -> tuple[RolloutBatch, dict[str, Metric]]:
    """The batch with its rewards lowered by the KL to the reference, and the metric of that; with no
    coefficient as is.

    A token that the reference has no finite log-prob for is left out, as one without a rollout log-prob: a
    sample whose KL is not known would pay nothing, and look better than the others of its group.

    Args:
        batch: this rank's tokens.
        logprobs: [T] log pi_old (pi_rollout in bypass mode).
        ref_logprobs: [T] log pi_ref.
        config: kl_reward_coef and kl_reward_type.
        groups: the ranks of the batch.
    """
    if not config.kl_reward_coef:
        return batch, {}
    taken = reward_kl(
        logprobs,
        ref_logprobs,
        batch.loss_mask,
        batch.seq_ids,
        num_sequences=batch.num_sequences,
        config=config,
        groups=groups,
    )
    if batch.episode_ids is not None:  # an episode pays for all that it sampled, whichever its sequence
        taken = sums_of_episodes(taken, batch.episode_ids)[batch.episode_ids]
    by_sample = batch.episode_means(taken)
    sums = torch.stack([by_sample.sum(), torch.ones_like(by_sample).sum()])
    if groups.cp_rank > 0:  # one of the ranks that share a sequence counts it
        sums = torch.zeros_like(sums)
    lowered, mask = (batch.rewards.double() - taken).float(), batch.loss_mask
    unknown = mask & ~ref_logprobs.isfinite()
    rollout = batch.rollout_logprobs.masked_fill(unknown, torch.nan)
    return replace(batch, rewards=lowered, rollout_logprobs=rollout), {"reward/reference_kl": Mean(sums)}
