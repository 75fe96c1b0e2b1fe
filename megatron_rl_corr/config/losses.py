"""Policy losses by name: formula file, defaults and meaning of each. The formula is in
core/losses/FORMULA.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl_corr.config.checks import one_of

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
ADVANTAGES = (
    "grpo",
    "group_mean",
    "rloo",
    "raw",
    "batch_mean",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "otb",
)
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantages that are divided by their standard deviation over the tokens of the global batch."""
BY_TOKEN = ("otb",)
"""Advantages of which each token of a response has its own."""
WITHOUT_GROUPS = ("raw", "batch_mean", "reinforce_plus_plus")
"""Advantages that do not compare a response with others of its prompt."""
KL_TYPES = ("k1", "k2", "k3", "k3+", "unbiased")
DUAL_CLIP = 3.0


@dataclass(frozen=True)
class LossKind:
    """One policy loss: the file of its formula, and the defaults that its paper pairs it with.

    Example: LossKind("ppo_clip", "PPO's clipped surrogate", (0.2, 0.2)) is computed by
    core/losses/ppo_clip.py.
    """

    formula: str
    """core/losses/FORMULA.py defines the function FORMULA(inputs: PolicyLossInputs, config, *, metrics)."""

    doc: str
    """What it is, for help and docs."""

    clip: tuple[float, float] | None = None
    """(low, high) by default; None: it does not clip, as pi_theta / pi_old is not in it."""

    aggregation: str = "token-mean"
    advantage: str = "grpo"

    dual_clip: bool = False
    """Takes clip_ratio_c."""

    whole_sequences: bool = False
    """Needs seq_ids and num_sequences."""

    unclipped_ratio: bool = False
    """pi_theta / pi_old is in it, and no clip bounds it."""

    pulls_to_old: bool = False
    """It has a gradient towards pi_old, also where the advantage is 0."""

    @property
    def has_ratio(self) -> bool:
        """True if pi_theta / pi_old is part of the formula, as far as is known."""
        return (self.clip is not None or self.unclipped_ratio) and self is not OWN_LOSS


LOSS_KINDS: dict[str, LossKind] = {
    "ppo_clip": LossKind("ppo_clip", "PPO's clipped surrogate, with dual clip", (0.2, 0.2), dual_clip=True),
    "grpo": LossKind(
        "ppo_clip",
        "PPO's, averaged over each sequence first",
        (0.2, 0.2),
        "seq-mean-token-mean",
        dual_clip=True,
    ),
    "dr_grpo": LossKind(
        "ppo_clip",
        "PPO's, each sequence's sum divided by a constant length; r - mean for advantage",
        (0.2, 0.2),
        "seq-mean-token-sum-norm",
        "group_mean",
        dual_clip=True,
    ),
    "dapo": LossKind("ppo_clip", "PPO's with a higher upper clip", (0.2, 0.28), dual_clip=True),
    "gspo": LossKind(
        "gspo",
        "PPO's, clipping the geometric mean of a sequence's ratios",
        (3e-4, 4e-4),
        "seq-mean-token-mean",
        whole_sequences=True,
    ),
    "cispo": LossKind("cispo", "log-prob times a clipped ratio that carries no gradient", (1.0, 4.0)),
    "dppo_tv": LossKind(
        "dppo_tv",
        "drops tokens whose probability has moved by more than the clip (total variation)",
        (0.15, 0.15),
    ),
    "dppo_kl": LossKind(
        "dppo_kl",
        "drops tokens whose probability has moved outwards by a binary KL above the clip",
        (0.05, 0.05),
    ),
    "sapo": LossKind(
        "sapo",
        "the ratio behind a soft gate, whose temperatures take the place of a clip",
        None,
        "seq-mean-token-mean",
        unclipped_ratio=True,
    ),
    "dro": LossKind("dro", "log-prob times advantage, and a squared pull to pi_old", pulls_to_old=True),
    "reinforce": LossKind("reinforce", "log-prob times advantage"),
    "rloo": LossKind(
        "reinforce",
        "REINFORCE with the mean of the other samples as baseline",
        None,
        "seq-mean-token-sum",
        "rloo",
    ),
}
LOSSES = tuple(LOSS_KINDS)
OWN_LOSS = LossKind("own", "the user's function", (0.2, 0.2), dual_clip=True, whole_sequences=True)
"""What the user's own loss may be given; whether it has a ratio or clips is not known."""


def is_own(name: str) -> bool:
    """True if this names a function of the user's: path/to/file.py:name or package.module:name."""
    return ":" in name


def kind_of(loss: str) -> LossKind:
    """What a loss brings of its own."""
    return OWN_LOSS if is_own(loss) else LOSS_KINDS[loss]


@dataclass(frozen=True)
class KnownOrOwn:
    """In Annotated[str, KnownOrOwn(LOSSES)]: a name of the table, or one of a function of the user's."""

    known: tuple[str, ...]

    def check(self, what: str, value: str) -> None:
        """ValueError, which begins with `what`, for another name."""
        if not is_own(value):
            one_of(what, value, self.known, also="FILE.py:NAME")
