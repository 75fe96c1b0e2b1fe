"""Verdicts on what servers compute with after a push, and the numbers that are logged of it.

D = log pi_train - log pi_rollout of a token of a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from megatron_rl_corr.core.metric_spec import MetricSpec, UsualRange, in_group
from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.features.push_probe.answers import Decoded, ProbeAnswer
from megatron_rl_corr.features.push_probe.evidence import (
    DIFFERS_BITS,
    MARGIN,
    Answer,
    TextRounding,
    answer_of,
    bits_of,
    is_off,
    off_by,
)

LEAST_K3 = 1e-6
"""Smaller ones count as this one: growth of next to nothing means nothing."""

_WITH_PROBE = "--rollout-probe-push on"
METRICS = in_group(
    "Sampling",
    MetricSpec(
        "rollout/probe_max_abs_log_ratio",
        "largest disagreement on texts that each server scores after the push",
        "max |D|, of the worst server",
        only_with=_WITH_PROBE,
    ),
    MetricSpec(
        "rollout/probe_mean_abs_log_ratio",
        "average disagreement per token of those texts",
        "mean |D|, of the worst server",
        only_with=_WITH_PROBE,
    ),
    MetricSpec(
        "rollout/probe_k3",
        "KL of trainer and server on those texts, k3 estimate",
        "mean(e^D - D - 1), of the worst server",
        only_with=_WITH_PROBE,
    ),
    MetricSpec(
        "rollout/probe_k3_growth",
        "how much the last push has raised that KL",
        "k3 / max(k3 after the push before, 1e-6), of the worst server; one token near a tie may make it 100",
        only_with=_WITH_PROBE,
    ),
    MetricSpec(
        "rollout/probe_over_rounding",
        "that disagreement, over what rounding explains",
        "median over texts of |D| / simulated |D| (of medians or 0.9 quantiles the larger one), of the worst "
        "server",
        only_with=_WITH_PROBE,
        usual=UsualRange(
            "a server differs from the trainer by more than rounding",
            "`megatron-rl-corr doctor --full` compares the server with the checkpoint. A server that "
            "differs ends the run once there is enough evidence (`rollout/probe_bits`).",
            high=MARGIN,
        ),
    ),
    MetricSpec(
        "rollout/probe_decode_over_rounding",
        "disagreement of a server with itself, sampling against scoring",
        "|log-prob when sampled - when scored| over simulated |D|, of the worst server",
        only_with=_WITH_PROBE,
    ),
    MetricSpec(
        "rollout/probe_bits",
        "evidence that a server computes with other weights than the trainer",
        "log2 of the likelihood ratio, of the worst server; 20 of further texts (probe_rounds > 0) end the "
        "run",
        only_with=_WITH_PROBE,
    ),
    MetricSpec(
        "rollout/probe_rounds",
        "times that further texts were asked before the verdict",
        "0 where no text was further apart than rounding explains",
        only_with=_WITH_PROBE,
    ),
)

Side = Literal["scores", "decode", "triangle"]


@dataclass
class ServerEvidence:
    """What is known of one server after a push: `off_by` of each text, for each side of the triangle."""

    screened: list[float] = field(default_factory=list)
    """Trainer against scores, of the texts of every push."""
    scores: list[float] = field(default_factory=list)
    """Trainer against scores, of further texts."""
    decode: list[float] = field(default_factory=list)
    """Sampled against scores, of the server's own responses."""
    fresh: list[float] = field(default_factory=list)
    """The same, of responses that could share no cached prefix."""
    sampled: list[float] = field(default_factory=list)
    """Trainer against sampled, of its responses."""

    responses: list[tuple[int, ...]] = field(default_factory=list)
    """Ids of those that it has sampled, whether or not before the suspicion: each is
    evidence once at most.
    """

    suspicious: bool = False
    """A text of the round that every push has was off."""

    def begin_evidence(self) -> None:
        """Forget what raised the suspicion: only texts that were chosen without knowing it are evidence."""
        self.suspicious = True
        self.scores, self.decode, self.fresh, self.sampled = [], [], [], []

    @property
    def answers(self) -> dict[Side, Answer]:
        """The verdict on each side, from the texts that were asked for after the suspicion."""
        found = {"scores": self.scores, "decode": self.decode + self.fresh, "triangle": self.sampled}
        return {side: answer_of(ratios) for side, ratios in found.items()}

    @property
    def answer(self) -> Answer:
        """differs > unclear > numerics > equal of trainer against scores, and of sampled against scores."""
        found = [self.answers["scores"], self.answers["decode"]]
        return next(answer for answer in ("differs", "unclear", "numerics", "equal") if answer in found)

    @property
    def is_well(self) -> bool:
        """True if nothing was off, or further texts have cleared the server."""
        return not self.suspicious or bool(self.scores) and self.answer in ("equal", "numerics")

    @property
    def bits(self) -> float:
        """Bits of evidence, those of the side with the most."""
        return max(bits_of(self.scores), bits_of([*self.decode, *self.fresh]))

    @property
    def goes_on(self) -> bool:
        """True if more texts are needed for a verdict."""
        return not self.scores or self.answer == "unclear"


def judge_decoded(
    evidence: ServerEvidence, decoded: Decoded, own: np.ndarray | None, expected: TextRounding
) -> None:
    """Add a response to the evidence.

    Args:
        evidence: of the server.
        decoded: the response.
        own: [K] the trainer's log-probs of it; None: it was not asked.
        expected: of its tokens, or of texts like it.
    """
    ratio = off_by(decoded.sampled - decoded.scored, expected)
    (evidence.fresh if decoded.fresh else evidence.decode).append(ratio)
    if own is not None:
        evidence.sampled.append(off_by(own - decoded.sampled, expected))
        evidence.scores.append(off_by(own - decoded.scored, expected))


def cause_of(evidence: ServerEvidence, *, before: bool, alone: bool) -> str:
    """Name the part that is wrong, with the remedy.

    Args:
        evidence: whose answer is "differs".
        before: the server was as far from the trainer before the run's first push, with the
            weights that it loaded.
        alone: other servers were compared, and do not differ.
    """
    answers = evidence.answers
    if answers["decode"] == "differs":
        if answers["triangle"] != "differs" and bits_of(evidence.sampled) < bits_of(evidence.scores):
            return (
                "its scores of given tokens are wrong and its samples are right: the prefill, or what "
                "stands between (a proxy that asks another server to score). Restart it"
            )
        if answers["scores"] != "differs" and not any(map(is_off, evidence.fresh)):
            return (
                "its prefix cache keeps keys and values of older weights: responses that share no cached "
                "prefix are right. Start it without the prefix cache, or look for what keeps it from being "
                "flushed"
            )
        if answers["scores"] != "differs":
            return (
                "its decode path computes with other weights than its prefill: a graph, a packed copy, a "
                "draft model's head, or a proxy that samples elsewhere. Restart it; if it does so again, "
                "start it without CUDA graphs"
            )
    if alone:
        return (
            "it is the server's: a tensor was loaded wrongly or not at all, or another program pushes to "
            "it; restart it"
        )
    if before:
        return (
            "it was so before the first push, with the weights that the server had loaded itself, so the "
            "trainer's model is another one: compare Megatron's flags with config.json (`megatron-rl-corr "
            "model-flags`)"
        )
    return (
        "every server differs: either they loaded a tensor wrongly, then restart them, or the trainer's "
        "model is another one: compare Megatron's flags with config.json (`megatron-rl-corr model-flags`)"
    )


def error_of(
    url: str,
    answer: ProbeAnswer,
    evidence: ServerEvidence,
    trained: Sequence[np.ndarray],
    cause: str,
    *,
    version: str,
) -> RolloutProtocolError:
    """The error for a server that differs."""
    numbers = ProbeNumbers.of(trained, answer.scores)
    sides = {
        "the trainer's and its scores": evidence.scores,
        "its samples' and its scores": evidence.decode + evidence.fresh,
        "the trainer's and its samples'": evidence.sampled,
    }
    told = "; ".join(
        f"{name} log-probs are off in {sum(map(is_off, ratios))} of {len(ratios)} texts"
        for name, ratios in sides.items()
        if ratios
    )
    return RolloutProtocolError(
        url,
        answer.endpoint,
        f"its weights differ from the trainer's, with {evidence.bits:.0f} bits of evidence ({DIFFERS_BITS:g} "
        f"are needed: at most one false verdict in {2**DIFFERS_BITS:,.0f}). After version {version!r} was "
        f"pushed {told}, farther than rounding explains; in the last texts max |D| is {numbers.max_abs:.3g}, "
        f"mean {numbers.mean_abs:.3g}, k3 {numbers.k3:.3g}. {cause[0].upper()}{cause[1:]}. `megatron-rl-corr "
        "doctor --full` compares a server with the checkpoint. If numerics alone explain it, give "
        "`max_probe_log_ratio`",
    )


@dataclass(frozen=True)
class ProbeNumbers:
    """One server's distance from the trainer, over all tokens of the texts."""

    max_abs: float
    """max |D|."""
    mean_abs: float
    """mean |D|."""
    k3: float
    """mean(e^D - 1 - D)."""

    @classmethod
    def of(cls, trained: Sequence[np.ndarray], served: Sequence[np.ndarray]) -> ProbeNumbers:
        """From the log-probs of both sides, [T] of each text; NaN where a log-prob is not finite."""
        difference = np.concatenate(trained).astype(np.float64) - np.concatenate(served)
        distance = np.abs(difference)
        # k3 overflows where the trainer is surer by hundreds of nats: that is beyond every bound as well.
        k3 = np.expm1(np.minimum(difference, 100.0)) - difference
        return cls(float(distance.max()), float(distance.mean()), float(k3.mean()))


class Growth:
    """By how much each push raises the servers' k3."""

    def __init__(self):
        self._last: dict[str, float] = {}

    def measure(self, k3: Mapping[str, float]) -> float | None:
        """The largest factor, of the servers that were compared after the push before; None: of none.

        Args:
            k3: of each server.
        """
        grown = [value / max(self._last[url], LEAST_K3) for url, value in k3.items() if url in self._last]
        self._last |= k3
        return max(grown, default=None)
