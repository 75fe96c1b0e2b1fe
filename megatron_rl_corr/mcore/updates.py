"""Several updates of a batch: which samples each takes, what of the batch it goes on with, and
what it counts anew.

A batch of S samples of this replica (episodes, of one sequence or several) makes U = K * E updates of S / K
samples each: E epochs, each in an order of its own, cut into K parts. One update is one iteration of
Megatron, so batch b makes iterations b * U to b * U + U - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.updates import UpdatesConfig
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.auto_weights import AutoWeights
from megatron_rl_corr.core.segments import sums_of_episodes
from megatron_rl_corr.core.token_baseline import total_power
from megatron_rl_corr.mcore.batch.microbatch import LossInputs, Microbatch
from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch
from megatron_rl_corr.mcore.step_scale import sequences_ess
from megatron_rl_corr.reduce.collectives import ParallelGroups, collective
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.metrics import Metric
from megatron_rl_corr.rollout.cursor import SavedCursor


@dataclass(frozen=True)
class Updates:
    """How a batch is trained on. Example: K = 2 parts in E = 3 epochs, steps 7 to 12 are those of
    the second batch.
    """

    parts: int = 1
    """K, --rollout-updates-per-batch."""
    epochs: int = 1
    """E, --rollout-epochs-per-batch."""
    max_kl: float | None = None
    """--rollout-max-kl-to-old."""
    seed: int = 0
    """Samples are put in order with it."""
    earlier: int = 0
    """Batches before the run's checkpoint beyond its iterations / U: not 0 where it was
    made with another U.
    """
    ess_step_scale: bool = False
    """--rollout-ess-step-scale."""

    @classmethod
    def of(cls, options: UpdatesConfig, seed: int, iteration: int, saved: SavedCursor | None) -> Updates:
        """Those of a run that begins with this iteration. saved: the cursor of its checkpoint."""
        updates = cls(options.updates_per_batch, options.epochs_per_batch, options.max_kl_to_old, seed)
        updates = replace(updates, ess_step_scale=options.ess_step_scale)
        if saved is None:
            return updates
        trained = iteration if saved.batches is None else saved.batches
        return replace(updates, earlier=trained - updates.batches(iteration))

    @property
    def count(self) -> int:
        """U."""
        return self.parts * self.epochs

    def batches(self, iteration: int) -> int:
        """Whole batches in the run's first `iteration` steps, which is the version of the weights
        behind the last.
        """
        return iteration // self.count + self.earlier

    def bounds_kl(self, iteration: int) -> bool:
        """True if the batch may end before this step: at its first update the policy has not moved yet."""
        return self.max_kl is not None and iteration % self.count > 0

    def too_far(self, iteration: int, kl: float) -> str | None:
        """Why the step after `iteration` others and the rest of its batch are left out; None: they are not.

        kl: mean k3 between pi_old and the policy.
        """
        if not kl > self.max_kl:
            return None
        return (
            f"step {iteration + 1} and what is left of its batch are left out, updates "
            f"{iteration % self.count + 1} to {self.count}: the KL to pi_old is {kl:.3g}, above "
            f"--rollout-max-kl-to-old {self.max_kl:g}"
        )

    def samples(self, batch: int, update: int, rows: int, replica: int) -> np.ndarray | None:
        """The samples of one update, by their numbers in the replica's batch: [S / K] int64.
        None: all (K = 1).

        Drawn from the seed and these numbers alone, so every rank of the replica has the same, and a
        resumed run too.

        Args:
            batch: number of the batch since the run's beginning.
            update: in [0, U).
            rows: S.
            replica: data-parallel rank.
        """
        if self.parts == 1:
            return None
        epoch, part = divmod(update, self.parts)
        order = np.random.default_rng([self.seed, batch, epoch, replica]).permutation(rows)
        return order.reshape(self.parts, -1)[part]


@dataclass
class BatchInTraining:
    """A batch from its collection to its last update."""

    number: int
    """Batches that the run trained before it, which is the version of the weights that it began with."""
    batch: RolloutBatch
    packs: Packs
    """The whole batch's microbatches."""
    inputs: LossInputs | None
    """The whole batch's, on the last stage."""
    metrics: dict[str, Metric]
    """The whole batch's, on the last stage: they are reported with its first update."""
    response_length: float = 0.0
    """Mean, on the rank that reports."""
    weight_lag: float = 0.0
    """Largest, in pushes, on the rank that reports."""
    seconds: float = 0.0
    """Seconds that its collection and its updates so far took, on the rank that reports."""
    chosen: AutoWeights | None = None
    """With --rollout-correction auto, once its first update is decided: the weights of the next batch."""
    ends_early: bool = False
    """Its last updates are left out, as the policy is too far from pi_old."""
    left_out: tuple | None = None
    """Then the result of Megatron's train step for them."""

    def places_of(self, samples: np.ndarray) -> torch.Tensor:
        """[T' + 1] int64: the places of these sequences' tokens among the batch's T, and behind
        them T, of no token.
        """
        places = np.append(self.batch.host_places_of(samples), self.batch.num_tokens)
        return torch.from_numpy(places).to(self.batch.seq_ids.device)


@dataclass(frozen=True)
class UpdatePart:
    """What one update trains on."""

    batch: RolloutBatch
    packs: Packs
    inputs: LossInputs | None
    """On the last stage."""
    places: torch.Tensor | None = None
    """`BatchInTraining.places_of` its samples; None: it is the whole batch."""

    def metrics(self, layout: Layout) -> dict[str, Metric]:
        """What its update counts anew beside the loss: its packs, the ESS for its decision, its
        gradient's power.

        On the last stage only. Without a pass for old log-probs the loss measures the ESS.
        """
        if not layout.is_last_stage:
            return {}
        found = self.packs.metrics()
        inputs, correction = self.inputs, self.inputs.correction
        if inputs.old_logprobs is not None:
            found = found | {"decision/ess": sequences_ess(correction, layout.groups)}
        if inputs.energies is not None:
            found = found | total_power(
                inputs.energies,
                inputs.advantages,
                correction.weights,
                correction.mask,
                correction.kept_sequences,
                owner=layout.groups.cp_rank == 0,
            )
        return found

    def microbatches(self) -> Iterator[Microbatch]:
        """The microbatches of this part; their tokens' places are those in the whole batch."""
        made = self.packs.microbatches(self.inputs)
        return made if self.places is None else (replace(one, places=self.places[one.places]) for one in made)


@torch.no_grad()
@collective
def inputs_of_update(
    whole: LossInputs,
    part: RolloutBatch,
    samples: np.ndarray,
    places: torch.Tensor,
    config: RolloutCorrectionConfig,
    groups: ParallelGroups,
) -> LossInputs:
    """The loss inputs of an update's samples: weights, masks and advantages of the batch,
    denominators of its own.

    One all-reduce over dp_cp, of three numbers.

    Args:
        whole: of the batch.
        part: the update's samples.
        samples: the places of their sequences in the batch.
        places: of their tokens among the batch's T, [T'] int64.
        config: the correction.
        groups: the ranks of the batch.
    """
    rows = torch.from_numpy(samples).to(places.device, non_blocking=True)
    inputs = whole.at(places, 0)
    correction, lengths = inputs.correction, inputs.correction.lengths
    tokens = lengths.tokens[rows]
    counted = tokens if part.mean_ids is None else sums_of_episodes(tokens, part.mean_ids)
    counted = (counted > 0).sum(dtype=torch.float64)
    if groups.cp_rank > 0:  # the ranks that share sequences hold whole lengths: one of them counts
        counted = torch.zeros_like(counted)
    totals = torch.stack(
        [correction.valid.sum(dtype=torch.float64), correction.mask.sum(dtype=torch.float64), counted]
    )
    valid, kept, sequences = groups.all_reduce_dp_cp(totals).unbind()
    # the whole batch may be filtered out
    kept = torch.where(correction.kept_tokens > 0, kept, torch.zeros_like(kept))
    correction = replace(
        correction,
        valid_tokens=valid,
        kept_tokens=kept,
        kept_sequences=correction.kept_sequences[rows],
        valid_lengths=correction.valid_lengths[rows],
        sequence_ratios=correction.sequence_ratios[rows],
        lengths=replace(lengths, tokens=tokens, sequences=sequences),
    )
    return replace(
        inputs, correction=correction, coefficients=token_coefficients(correction, part.seq_ids, config)
    )
