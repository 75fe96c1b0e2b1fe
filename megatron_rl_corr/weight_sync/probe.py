"""One text that every server scores after a push: its log-probs must be those of the trainer's own weights.

Checksums prove what a server was sent. This proves what it computes with it: an expert in the wrong place, a tensor
that was packed wrongly, or an update that never took place shows in the log-probs.

N ids of the text, of which the last R = N - 1 are scored; D = log pi_train - log pi_rollout of one of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl_corr.core.metric_spec import MetricSpec, in_group
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError, RolloutServerError, StaleWeightsError
from megatron_rl_corr.events import EVENTS

PROBE_TOKENS = 256
"""N at most: a prefill that takes milliseconds, and in which most experts of a layer get tokens."""
FLOAT32_LOG_RATIO = 1e-4
"""Largest |D| that rounding explains where both sides are float32; measured: 1e-6."""

EARLIER_S = 30.0
"""How long a server has for its score before the first push, without which it is not compared with that one."""
ATTEMPTS, PAUSE_S = 3, 0.5
"""How often a server is asked for its score while its answers are none, and the pause in between."""

METRICS = in_group(
    "Sampling",
    MetricSpec(
        "rollout/probe_max_abs_log_ratio", "largest disagreement on a text that each server scores after the push",
        "max |D|, of the worst server", only_with="--rollout-probe-push on",
    ),
    MetricSpec(
        "rollout/probe_mean_abs_log_ratio", "average disagreement per token of that text",
        "mean |D|, of the worst server", only_with="--rollout-probe-push on",
    ),
    MetricSpec(
        "rollout/probe_k3", "KL of trainer and server on that text, k3 estimate",
        "mean(e^D - D - 1), of the worst server", only_with="--rollout-probe-push on",
    ),
)  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeAnswer:
    """One server's answer."""

    logprobs: np.ndarray
    """[R] float64, finite."""
    info: Mapping[str, Any]
    """Its answer to `Engine.server_info`."""
    endpoint: str
    """Where it was asked, for messages."""


@dataclass(frozen=True)
class ProbeBound:
    """How far a server's log-probs may be from the trainer's. Example: ProbeBound(1e-4, "max |log-ratio|", "...")."""

    limit: float
    statistic: str
    """"max |log-ratio|" or "mean k3"."""
    reason: str
    """Why it is this bound, for messages."""


@dataclass(frozen=True)
class ProbeScore:
    """One server's distance from the trainer."""

    max_abs: float
    """max |D|."""
    mean_abs: float
    """mean |D|."""
    k3: float
    """mean(e^D - 1 - D)."""
    worst: int
    """Which of the R tokens has the largest |D|."""

    @classmethod
    def of(cls, trained: np.ndarray, served: np.ndarray) -> ProbeScore:
        """From the log-probs of both sides, [R] each; every number is NaN where a log-prob is not finite."""
        difference = trained.astype(np.float64) - served
        distance = np.abs(difference)
        # k3 overflows where the trainer is surer by hundreds of nats: that is beyond every bound as well.
        k3 = np.expm1(np.minimum(difference, 100.0)) - difference
        return cls(float(distance.max()), float(distance.mean()), float(k3.mean()), int(distance.argmax()))

    def keeps(self, bound: ProbeBound) -> bool:
        """Whether it is within the bound; False for NaN."""
        return (self.max_abs if bound.statistic == "max |log-ratio|" else self.k3) <= bound.limit


def probe_bound(
    given: float | None, *, both_float32: bool, otherwise: float, rounding: str = "none"
) -> ProbeBound:
    """The bound for one server.

    Args:
        given: --rollout-max-probe-log-ratio; None: by the number types of both sides.
        both_float32: trainer and server compute in float32.
        otherwise: mean k3 that the number types explain where they do not, or the rounding of what was pushed.
        rounding: --rollout-push-rounding.
    """
    if given is not None:
        return ProbeBound(given, "max |log-ratio|", "as --rollout-max-probe-log-ratio says")
    if both_float32:
        return ProbeBound(FLOAT32_LOG_RATIO, "max |log-ratio|", "as both compute in float32")
    if rounding != "none":
        return ProbeBound(otherwise, "mean k3", f"as --rollout-push-rounding {rounding} rounds what is pushed")
    return ProbeBound(otherwise, "mean k3", "as not both compute in float32")


async def ask_scores(
    servers: ServerControl, ids: Sequence[int], *, version: str, vocab_size: int, cache_key: str | None
) -> dict[str, ProbeAnswer]:
    """Log-probs of the ids after the first, by each server that answers.

    A server that dies or is restarted meanwhile is left out, as it is from sampling, and so is one whose answers are no
    scores, or HTTP 5xx, ATTEMPTS times, where another server is compared. One that refuses the question is an error.

    Args:
        servers: those of the update; they sample again, as a paused server answers nothing.
        ids: N of them.
        version: of the weights that were pushed.
        vocab_size: of the model.
        cache_key: of requests to the new weights; no cached keys and values are used.

    Raises:
        RolloutServerError: a server refuses to score; or no server is compared, and one answers that it failed.
        RolloutProtocolError: no server is compared, and one's answers are no scores of these ids.
    """
    answers: dict[str, ProbeAnswer] = {}
    failed = []
    asked = [_ask_score(servers, url, ids, version, vocab_size, cache_key) for url in servers.base_urls]
    for url, found in zip(servers.base_urls, await asyncio.gather(*asked, return_exceptions=True), strict=True):
        if isinstance(found, ProbeAnswer):
            answers[url] = found
            continue
        if not isinstance(found, RolloutError) or _refuses(found):
            raise found
        logger.warning("%s is not compared with the trainer after this push: %s", url, found)
        EVENTS.tell("server_not_compared", str(found), server=url, version=version)
        if isinstance(found, RolloutProtocolError) or isinstance(found, RolloutServerError) and found.status:
            failed.append(found)
    if failed and not answers:  # all of them alive: so it would be after every push, and nothing ever compared
        raise failed[0]
    return answers


async def ask_earlier(
    servers: ServerControl, ids: Sequence[int], *, vocab_size: int, cache_key: str | None
) -> dict[str, ProbeAnswer]:
    """`ask_scores` before a push, of whatever weights there are; a server that does not answer is just not compared."""

    async def ask(url: str) -> ProbeAnswer | None:
        try:
            async with asyncio.timeout(EARLIER_S):
                return await _ask_score(servers, url, ids, None, vocab_size, cache_key)
        except (RolloutError, TimeoutError) as error:
            logger.warning("%s is not compared with itself before the first push: %s", url, error or "no answer")
            return None

    found = zip(servers.base_urls, await asyncio.gather(*map(ask, servers.base_urls)), strict=True)
    return {url: answer for url, answer in found if answer is not None}


async def _ask_score(
    servers: ServerControl, url: str, ids: Sequence[int], version: str | None, vocab_size: int, cache_key: str | None
) -> ProbeAnswer:
    """One server's answer, asked for again while what comes is no score: it may be a proxy's of a moment.

    With version None its weights may have any name.
    """
    prompt, output = list(ids[:1]), list(ids[1:])
    engine = servers.engine_of(url)
    request = engine.score(prompt, output, likeliest=1, cache_key=cache_key)
    for attempts_left in reversed(range(ATTEMPTS)):
        try:
            answer, info = await servers.ask(url, request), await servers.ask(url, engine.server_info())
            scores = engine.parse_scores(answer, server=url, output_ids=output, vocab_size=vocab_size)
            break
        except (RolloutProtocolError, RolloutServerError) as error:
            if _refuses(error):
                raise RolloutServerError(
                    url, error.endpoint, error.status, error.detail,
                    remedy=f"it was asked to score {len(ids)} ids after a push, which `probe_push` off leaves out",
                ) from error
            if not attempts_left or isinstance(error, RolloutServerError) and error.status is None:
                raise
            await asyncio.sleep(PAUSE_S)
    if version is not None and scores.version not in (None, version):
        raise StaleWeightsError(url, request.endpoint, scores.version, version)
    return ProbeAnswer(scores.logprobs, info, request.endpoint)


def _refuses(error: RolloutError) -> bool:
    """Whether a server has understood the question and does not answer it."""
    return isinstance(error, RolloutServerError) and error.status is not None and error.status < 500


def compare(
    answers: Mapping[str, ProbeAnswer], trained: np.ndarray, bounds: Mapping[str, ProbeBound], *, version: str
) -> dict[str, float]:
    """The worst of the servers, by the names of METRICS; {} where none answered.

    Args:
        answers: of each server.
        trained: [R] log-probs of the trainer.
        bounds: of each server.
        version: of the weights that were pushed.

    Raises:
        RolloutProtocolError: naming the first server beyond its bound.
    """
    scores = {url: ProbeScore.of(trained, answer.logprobs) for url, answer in answers.items()}
    wrong = [url for url, score in scores.items() if not score.keeps(bounds[url])]
    if wrong:
        score, bound = scores[wrong[0]], bounds[wrong[0]]
        raise RolloutProtocolError(
            wrong[0], answers[wrong[0]].endpoint,
            f"its weights differ from the trainer's: it was asked for the log-probs of {len(trained)} given ids after "
            f"version {version!r} was pushed, and they are {score.max_abs:.3g} off the trainer's own at token "
            f"{score.worst} (mean {score.mean_abs:.3g}, k3 {score.k3:.3g}); {bound.statistic} may be {bound.limit:g}, "
            f"{bound.reason}. {_who(wrong, scores)} `megatron-rl-corr doctor --full` compares a server with the "
            "checkpoint. If numerics alone explain it, give a larger `max_probe_log_ratio`",
        )
    if not scores:
        return {}
    worst = {name: max(getattr(score, field) for score in scores.values()) for name, field in _FIELDS.items()}
    return {f"rollout/probe_{name}": value for name, value in worst.items()}


_FIELDS = {"max_abs_log_ratio": "max_abs", "mean_abs_log_ratio": "mean_abs", "k3": "k3"}


def _who(wrong: Sequence[str], scores: Mapping[str, ProbeScore]) -> str:
    if len(wrong) < len(scores):
        return (
            f"{len(wrong)} of {len(scores)} servers differ ({', '.join(wrong)}), so it is theirs: a tensor was loaded "
            "wrongly or not at all, or another program pushes to them; restart them."
        )
    return (
        f"All {len(scores)} servers differ: either they loaded a tensor wrongly, then restart them, or the trainer's "
        "model is another one: compare Megatron's flags with config.json (`megatron-rl-corr model-flags`)."
    )
