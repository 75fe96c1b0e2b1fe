"""What a server's answers of several pushes show where one push's bound is too wide to tell, as it is in 16 bits."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import numpy as np

from megatron_rl_corr.core.metric_spec import MetricSpec, UsualRange, in_group
from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.weight_sync.probe import ProbeAnswer, ProbeScore

MOVED = 1e-3
"""Nats by which one of the trainer's log-probs must have moved before a server's, which have not, are an error."""
GROWTH = 10.0
"""Factor by which one push may raise a server's mean k3; measured: 1 at a first push, at most 3.1 in 278 later ones."""
LEAST_K3 = 1e-6
"""Smaller ones count as this one: growth of next to nothing means nothing."""

METRICS = in_group(
    "Sampling",
    MetricSpec(
        "rollout/probe_k3_growth", "how much the last push has raised that KL",
        "k3 / max(k3 after the push before, 1e-6), of the worst server in 16 bits", only_with="--rollout-probe-push on",
        usual=UsualRange(
            "the last push made a server's log-probs worse",
            "Look for a tensor that was loaded wrongly: `megatron-rl-corr doctor --full` compares the server with the "
            "checkpoint. A step that changed the policy much may do the same: see `grad_norm`.",
            high=GROWTH,
        ),
    ),
)  # fmt: skip

logger = logging.getLogger(__name__)


class Movement:
    """Finds a server that computes with older weights than it has loaded, where a bound is too wide to tell.

    In 16 bits the steps of hundreds of pushes may stay below the bound. But then a server's log-probs change in some
    bit whenever the trainer's move; those of one that packs, caches or captures its weights once and for all do not.
    """

    def __init__(self):
        self._first: dict[str, tuple[ProbeAnswer, np.ndarray, int, str]] = {}
        """By server: its answer that is the same ever since, and what was the trainer's, loaded, and pushed then."""

    def check(
        self, answers: Mapping[str, ProbeAnswer], trained: np.ndarray, loaded: Mapping[str, int], *, version: str
    ) -> None:
        """Compare with the pushes before.

        Args:
            answers: of each server.
            trained: [R] log-probs of the trainer.
            loaded: of each server whose weights were hashed, a number that differs if they do.
            version: of the weights that were pushed.

        Raises:
            RolloutProtocolError: weights and the trainer's log-probs have changed, and a server's log-probs have not.
        """
        for url, answer in answers.items():
            if url not in loaded:
                continue
            if url not in self._first or not np.array_equal(answer.logprobs, self._first[url][0].logprobs):
                self._first[url] = answer, trained, loaded[url], version
                continue
            _, before, had, since = self._first[url]
            moved = np.abs(trained - before).max()
            if loaded[url] != had and moved > MOVED:
                raise RolloutProtocolError(
                    url, answer.endpoint,
                    f"its weights differ from the trainer's: it has loaded version {version!r}, and its log-probs of "
                    f"{len(trained)} given ids are in every bit those of version {since!r}, while the trainer's have "
                    f"moved by up to {moved:.3g}; it computes with a copy of older weights. Restart it; if it does so "
                    "again, start it without what makes the copy (packed kernels, graphs, caches)",
                )


class Growth:
    """Finds a server whose log-probs get worse by a push, where the bound of the number types is too wide to tell.

    In 16 bits two exchanged experts raise the mean k3 by a factor of 30 and more, and stay far below that bound. The
    first push brings a server the weights that it holds, or better ones, so it does not raise k3 at all. Later ones may
    raise it, as the policy changes, by a factor of 50 in a few hundred; one of them by far less.
    """

    def __init__(self):
        self._before: dict[str, ProbeAnswer] | None = None
        self._last: dict[str, float] = {}
        """By server: its k3 after the push before."""

    @property
    def is_first_push(self) -> bool:
        """Whether `expect_first_push` is still to be called."""
        return self._before is None

    def expect_first_push(self, answers: Mapping[str, ProbeAnswer]) -> None:
        """Note the answers of the servers that can sample before the run's first push."""
        self._before = dict(answers)

    def check(
        self, answers: Mapping[str, ProbeAnswer], trained: np.ndarray, half: Collection[str], *, version: str
    ) -> dict[str, float]:
        """The largest growth, by the name in METRICS; {} where no server was compared before.

        Args:
            answers: of each server, whose distance is within its bound.
            trained: [R] log-probs of the trainer.
            half: servers that are compared: of 16 bits, or of FP8 that is pushed as such.
            version: of the weights that were pushed.

        Raises:
            RolloutProtocolError: the first push has raised a server's k3 by more than GROWTH.
        """
        grown = {}
        for url in (url for url in answers if url in half):
            k3 = ProbeScore.of(trained, answers[url].logprobs).k3
            before = (self._before or {}).pop(url, None)
            if before is not None:
                grown[url] = _growth(k3, ProbeScore.of(trained, before.logprobs).k3)
                if grown[url] > GROWTH:
                    raise RolloutProtocolError(url, answers[url].endpoint, _got_worse(grown[url], k3, version))
            elif url in self._last:
                grown[url] = _growth(k3, self._last[url])
                if grown[url] > GROWTH:
                    logger.warning(
                        "%s: version %r has raised its k3 of %d given ids by a factor of %.3g, to %.3g; a tensor may "
                        "have been loaded wrongly: `megatron-rl-corr doctor --full` compares it with the checkpoint",
                        url, version, len(trained), grown[url], k3,
                    )  # fmt: skip
            self._last[url] = k3
        return {METRICS[0].name: max(grown.values())} if grown else {}


def _growth(k3: float, before: float) -> float:
    return k3 / max(before, LEAST_K3)


def _got_worse(growth: float, k3: float, version: str) -> str:
    return (
        f"its weights differ from the trainer's: the run's first push, of version {version!r}, has raised the k3 of "
        f"its log-probs of given ids by a factor of {growth:.3g}, to {k3:.3g}, and may do so by {GROWTH:g}, as it "
        "brings what the server holds, or better. A tensor was loaded wrongly, or not at all: restart the server. "
        "`megatron-rl-corr doctor --full` compares it with the checkpoint. If numerics alone explain it, give "
        "`max_probe_log_ratio`"
    )
