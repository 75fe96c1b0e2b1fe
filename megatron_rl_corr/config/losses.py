"""What each policy loss has of its own: the clip, the aggregation and the advantage that its paper pairs it with."""

from __future__ import annotations

from dataclasses import dataclass

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
ADVANTAGES = ("grpo", "group_mean", "rloo", "raw")
KL_TYPES = ("k1", "k2", "k3")
DUAL_CLIP = 3.0


@dataclass(frozen=True)
class LossKind:
    """Defaults of one loss, and what it takes."""

    clip: tuple[float, float] | None
    """(low, high) by default; None: it does not clip."""

    aggregation: str = "token-mean"
    advantage: str = "grpo"
    dual_clip: bool = False
    """Takes clip_ratio_c."""

    @property
    def has_ratio(self) -> bool:
        """Whether pi_theta / pi_old is in it already."""
        return self.clip is not None


LOSS_KINDS: dict[str, LossKind] = {
    "ppo_clip": LossKind((0.2, 0.2), dual_clip=True),
    "grpo": LossKind((0.2, 0.2), "seq-mean-token-mean", dual_clip=True),
    "dr_grpo": LossKind((0.2, 0.2), "seq-mean-token-sum-norm", "group_mean", dual_clip=True),
    "dapo": LossKind((0.2, 0.28), dual_clip=True),
    "gspo": LossKind((3e-4, 4e-4), "seq-mean-token-mean"),
    "cispo": LossKind((1.0, 4.0)),
    "dppo_tv": LossKind((0.15, 0.15)),
    "reinforce": LossKind(None),
    "rloo": LossKind(None, "seq-mean-token-sum", "rloo"),
}
LOSSES = tuple(LOSS_KINDS)
