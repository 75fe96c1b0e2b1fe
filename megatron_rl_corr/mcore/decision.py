"""Whether an update is made, and how large: what the training pass found, learnt by all ranks
before the update.
"""

from __future__ import annotations

import math
import sys
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.core.auto_weights import MeasuredMismatch
from megatron_rl_corr.core.ratios import k3
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.metrics import Mean

NO_TOKEN = (
    "no token of this step is left: no update. See rollout_corr/rejected_fraction/* for the rule that took "
    "them, and widen its --rollout-rs-threshold; or the step's train-infer KL was above "
    "--rollout-batch-filter-kl (rollout_corr/batch_filtered), no token had a log-prob on both sides "
    "(rollout_corr/nonfinite_tokens), or every sample was cut short (--rollout-truncated-samples mask)"
)
NO_GRADIENT = (
    "no token of this step has a gradient, as every advantage or weight is 0: no update. If the rewards of "
    "each prompt's samples are equal (rollout/groups_without_spread), the prompts are too easy or too hard, "
    "or the servers gave one sample many times (rollout/duplicate_samples)"
)


@dataclass(frozen=True)
class Decision:
    """What `CorrectedLoss` counts for it, over the update's global batch."""

    kept: float = 0.0
    """Tokens in the loss."""
    pulling: float = 0.0
    """Those of them that have a gradient."""
    first_step_kl: float = 0.0
    """Mean of min(k3, `FirstStep.most`) to the servers' log-probs, in the first step after a start."""
    kl_to_old: float = 0.0
    """Mean k3 between pi_old and the policy, where --rollout-max-kl-to-old bounds it."""
    ess: float = 1.0
    """ESS / n over the update's sequences."""
    stops: float = 0.0
    """Features that end the run before the update, 0 or 1."""
    mismatch: MeasuredMismatch = MeasuredMismatch()
    """The batch's, in its first update."""

    @classmethod
    def pop_from(cls, numbers: dict[str, float]) -> Decision:
        """Taken out of an update's numbers; without them, on stages that count nothing, the usual values."""
        names = [name for name in numbers if name.startswith("decision/")]
        counted = {name.removeprefix("decision/"): numbers.pop(name) for name in names}
        if counted and "ess" not in counted:
            # The loss makes the correction, of the policy as it is, over the very samples of the update, and
            # there are no rules: with them it counts what they leave.
            counted["ess"] = numbers["rollout_corr/ess_sequences"]
        if "rollout_corr/chi2_seq" in numbers:
            counted["mismatch"] = MeasuredMismatch.of(numbers)
        return cls(**counted)

    @classmethod
    @collective
    def agreed_decision(
        cls, found: Decision, layout: Layout, device: torch.device | str, *, take_largest: bool = False
    ) -> Decision:
        """The last stage's, on every rank, which all call; a host read.

        Args:
            found: of the last stage; others give any.
            layout: this rank's process groups.
            device: for the exchange.
            take_largest: take the largest value of all ranks. Tensor-parallel ranks may round differently,
                so that a bound would divide them, and a factor let the weights that they share drift apart.
        """
        *own, mismatch = astuple(found)
        values = torch.tensor([*own, *mismatch], dtype=torch.float64, device=device)
        if layout.pp_size > 1:
            dist.broadcast(values, layout.last_stage_rank, group=layout.pp_group)
        if take_largest:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        agreed = values.tolist()
        return cls(*agreed[: len(own)], MeasuredMismatch(*agreed[len(own) :]))

    @property
    def makes_update(self) -> bool:
        """Without a token, or without a gradient, all must skip the update.

        Adam's momentum and weight decay, or MoE's auxiliary losses, would still move the weights.
        """
        return self.kept > 0 and self.pulling > 0

    @property
    def step_scale(self) -> float:
        """VCPO's factor of the update, sqrt(ESS / n)."""
        return math.sqrt(self.ess)

    def print_why_not(self, layout: Layout, left_out: str | None) -> None:
        """Tell the user, on the rank that reports, why no update is made. left_out: of a batch
        that ends early.
        """
        if layout.is_job_reporter:
            why = left_out or (NO_GRADIENT if self.kept > 0 else NO_TOKEN)
            print(f"[rollout] {why}", file=sys.stderr, flush=True)


def mean_k3(logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, most: float = math.inf) -> Mean:
    """Mean of min(e^D - 1 - D, most) over the tokens [T] of the mask whose sampled_logprobs are finite.

    D is the log-ratio of the two. NaN where one of `logprobs` is NaN, or where no token is left.
    """
    mask = mask & sampled_logprobs.isfinite()
    d = torch.where(mask, logprobs.double() - sampled_logprobs.double(), 0.0)
    return Mean(torch.stack([k3(d).clamp(max=most).sum(), mask.sum(dtype=torch.float64)]))
