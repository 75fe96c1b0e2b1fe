"""A response and what a step made of it: reward, loss mask, Megatron's log-probs, advantages.

P prompt tokens, R response tokens, N samples, L tokens a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl_corr.engines.trajectory import Trajectory

PER_TOKEN = {
    "loss_mask": torch.bool, "train_logprobs": torch.float32, "advantages": torch.float32,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Sample:
    """A response and what is known of it after a step; None where it is not."""

    trajectory: Trajectory
    reward: float | None = None
    loss_mask: torch.Tensor | None = None
    """[R] bool: the response token enters the loss."""
    train_logprobs: torch.Tensor | None = None
    """[R] float32 of Megatron's pi_old, natural log."""
    advantages: torch.Tensor | None = None
    """[R] float32."""

    def __post_init__(self):
        for name, kind in PER_TOKEN.items():
            values = getattr(self, name)
            if values is None:
                continue
            if values.dim() != 1 or values.dtype != kind:
                raise ValueError(f"{name} must be 1-d {kind}, got {values.dim()}-d {values.dtype}")
            if values.numel() != self.trajectory.output_ids.numel():
                raise ValueError(f"{self.trajectory.output_ids.numel()} output_ids have {values.numel()} {name}")


def samples_of_rows(
    trajectories: Sequence[Trajectory], rewards: torch.Tensor | None = None, **rows: torch.Tensor
) -> list[Sample]:
    """Samples of a batch whose position t of a row predicts token t + 1; on the CPU, sharing nothing with the rows.

    rewards [N]; rows are the fields of a Sample with a value for each token (loss_mask, train_logprobs, advantages),
    each [N, L] with L >= P + R - 1. Raises ValueError for another N or an L too short.
    """
    count = len(trajectories)
    rows = {name: values.cpu() for name, values in rows.items()}
    for name, values in {"rewards": rewards, **rows}.items():
        if values is not None and len(values) != count:
            raise ValueError(f"{count} trajectories have {len(values)} rows of {name}")
    samples = []
    for index, trajectory in enumerate(trajectories):
        first = trajectory.prompt_ids.numel() - 1
        part = slice(first, first + trajectory.output_ids.numel())
        own = {name: values[index, part].clone() for name, values in rows.items()}
        samples.append(Sample(trajectory, None if rewards is None else float(rewards[index]), **own))
    return samples
