"""Rank 0's part of the probe after a push: it asks the servers, and says which of them differ,
with its evidence.

In every push each server scores the same texts and samples one response. Where one of them is further apart
than rounding explains, the server is suspicious: it is asked for other texts and responses, in up to ROUNDS
rounds, and these alone are evidence.

T tokens of a text that are scored; R simulations of rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.features.push_probe.answers import (
    DECODED_TOKENS,
    FIRST_DECODED,
    PROMPT_TOKENS,
    ProbeAnswer,
    ProbeDraw,
    Question,
    ask_earlier,
    ask_servers,
    ask_types,
)
from megatron_rl_corr.features.push_probe.evidence import (
    DIFFERS_BITS,
    ROUNDINGS,
    Rounding,
    TextRounding,
    bits_of,
    is_new,
    is_off,
    off_by,
)
from megatron_rl_corr.features.push_probe.history import Movement
from megatron_rl_corr.features.push_probe.texts import TEXTS, prompt_text, round_texts
from megatron_rl_corr.features.push_probe.verdict import (
    Growth,
    ProbeNumbers,
    ServerEvidence,
    cause_of,
    error_of,
    judge_decoded,
)
from megatron_rl_corr.mcore.batch.server_collector import SampleSource
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.updatable import is_interrupted

ROUNDS = 3
"""Further rounds at most; a server without enough evidence for either side after them is
not said to differ.
"""
UNKNOWN_TYPE = "bfloat16"
"""What a server computes in that has never said it."""
SUSPECTS = 4
"""Servers at most that are asked again after one push."""

Logprobs = Sequence[np.ndarray]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """What all ranks compute in a round."""

    texts: Sequence[tuple[int, ...]]
    relative_error: float
    """Size of the rounding to simulate; 0: none."""


@dataclass
class JudgeMemory:
    """What stays from push to push."""

    before: dict[str, ProbeAnswer] | None = None
    """Answers before the run's first push, which is compared with them; None: not asked yet, {}: compared."""
    expected: list[TextRounding] | None = None
    """What rounding does to the texts of every push; None: not simulated yet."""
    decoded: list[TextRounding] = field(default_factory=list)
    """What it does to responses of the last further round."""
    waiting: list[str] = field(default_factory=list)
    """Suspicious servers for which there was no place after the last push; the first one waits longest."""
    typed: tuple[str, ...] = ()
    """Servers that were asked for their number types."""
    types: dict[str, str] = field(default_factory=dict)
    """What each has said last; one that does not answer once computes as before."""
    rounding: Rounding | None = None
    """The one that was simulated."""
    movement: Movement = field(default_factory=Movement)
    growth: Growth = field(default_factory=Growth)


class PushJudge:
    """Asks the servers after each push, and judges them.

    Args:
        source: of the run's samples: its prompts, the client and its loop.
        dtype: what the trainer computes in, a key of ROUNDINGS.
        max_log_ratio: --rollout-max-probe-log-ratio.
        push_rounding: --rollout-push-rounding: the servers' weights differ from the trainer's by it.
        responses: those of the last batch.
        longest: ids that a text may have. A server samples a token behind a text.
        resumed: the run goes on at a checkpoint, which servers that loaded another one rightly differ from
            before the first push.
    """

    def __init__(
        self,
        source: SampleSource,
        *,
        dtype: str,
        max_log_ratio: float | None,
        push_rounding: str,
        responses: Callable[[], Sequence[Trajectory]],
        longest: int,
        resumed: bool,
    ):
        self._source, self._memory, self._dtype = source, JudgeMemory(before={} if resumed else None), dtype
        self._bound, self._push_rounding = max_log_ratio, push_rounding
        self._responses, self._longest = responses, longest
        self._servers: WeightServers | None = None
        self._version = ""
        self._question = Question(())
        self._answers: dict[str, ProbeAnswer] = {}
        self._compared: dict[str, ServerEvidence] = {}
        """Address of each server that has answered after this push -> the evidence."""
        self._scored: list[tuple[int, ...]] = []
        """Texts that were scored after this push."""
        self._suspects: dict[str, ServerEvidence] = {}
        self._off_before: set[str] = set()
        """After the first push, servers that were off before it, too."""
        self.asked = Asked((), 0.0)
        self.numbers: dict[str, float] = {}
        """By the names of verdict.METRICS."""

    @cached_property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        """Those of every push. Raises ValueError or OSError where the run's prompts can't be read."""
        return tuple(round_texts(self._source.prompts, 0, (), self._longest))

    def ask_earlier(self) -> None:
        """Ask before the run's first push; a server that a killed trainer has left paused
        would not answer.
        """
        if self._memory.before is not None:
            return
        client, loop = self._source.client, self._source.loop
        try:
            versions = zip(client.base_urls, loop.call(client.reported_versions()), strict=True)
        except RolloutError:  # none answers, which the push itself reports
            versions = ()
        urls = [url for url, version in versions if version is not None and not is_interrupted(version)]
        self._memory.before = loop.call(
            ask_earlier(
                client.control(urls),
                Question(self.texts),
                vocab_size=client.vocab_size,
                cache_key=client.cache_key,
            )
        )

    def begin(self, servers: WeightServers, version: str) -> Asked:
        """Begin with the push of these servers. What all ranks compute first.

        Rounding is simulated in the first push, and where number types have changed.
        """
        self._servers, self._version = servers, version
        self._answers, self._compared, self._suspects, self.numbers = {}, {}, {}, {}
        self._scored = list(self.texts)
        if tuple(servers.urls) != self._memory.typed:
            self._ask_types()
        self._question = Question(self.texts, self._draws(0))
        return self._asked(self._question.texts, simulates=self._memory.expected is None)

    def _ask_types(self) -> None:
        """Note what the servers compute in, which a server may do otherwise after a restart."""
        memory, urls = self._memory, self._servers.urls
        memory.types |= self._source.loop.call(ask_types(self._source.client.control(urls)))
        rounding = self._rounding({memory.types.get(url, UNKNOWN_TYPE) for url in urls})
        memory.typed = tuple(urls)
        if rounding != memory.rounding:
            memory.rounding, memory.expected, memory.decoded = rounding, None, []

    def ask(self, number: int) -> Future[dict[str, ProbeAnswer]]:
        """Ask all servers in the first round, and the suspects for other texts in a later one."""
        if number == 1:
            self._ask_types()
        if number:
            texts = round_texts(self._source.prompts, number, self._responses(), self._longest)
            self._question = Question(tuple(texts), self._draws(number))
        client = self._source.client
        return self._source.loop.submit(
            ask_servers(
                client.control(list(self._suspects) if number else self._servers.urls),
                self._question,
                version=self._version,
                vocab_size=client.vocab_size,
                cache_key=client.cache_key,
                required=not number,
            )
        )

    def screen(self, answers: Mapping[str, ProbeAnswer], own: Logprobs, moved: Logprobs) -> None:
        """Find the suspects among the servers.

        Args:
            answers: to the first round.
            own: [T] the trainer's log-probs of each text.
            moved: [R, T] what simulated rounding moves them by; (): as the last time.

        Raises:
            RolloutProtocolError: `Movement.check`.
        """
        memory = self._memory
        memory.movement.check(answers, own, self._servers.loaded, version=self._version)
        if moved:
            memory.expected = [TextRounding.of(one, memory.rounding) for one in moved]
        expected = memory.expected or self._bounds(own)
        usual = _usual([*expected, *memory.decoded])
        for url, answer in answers.items():
            evidence = self._compared[url] = ServerEvidence(_ratios(own, answer.scores, expected))
            for decoded in answer.decoded:
                judge_decoded(evidence, decoded, None, usual)
                evidence.responses.append(decoded.ids)
        before, memory.before = memory.before or {}, {}
        self.numbers = self._measured(own, answers, before)
        suspects = self._by_suspicion()
        if len(suspects) > SUSPECTS:
            logger.warning("%d more servers are compared again after the next push", len(suspects) - SUSPECTS)
        memory.waiting = suspects[SUSPECTS:]
        self._suspects = {url: self._compared[url] for url in suspects[:SUSPECTS]}
        for url in suspects:
            self._compared[url].begin_evidence()
        ratios = {url: _ratios(own, answer.scores, expected) for url, answer in before.items()}
        self._off_before = {url for url, found in ratios.items() if sum(map(is_off, found)) > len(found) / 2}

    def _by_suspicion(self) -> list[str]:
        """Servers of which a text or a response was off: those of most texts first, then
        who waits longest.
        """
        bits = {
            url: max(bits_of(one.screened), bits_of(one.decode))
            for url, one in self._compared.items()
            if any(map(is_off, [*one.screened, *one.decode]))
        }
        places = {url: place for place, url in enumerate(self._memory.waiting)}
        return sorted(
            bits, key=lambda url: (bits[url] < DIFFERS_BITS, places.get(url, len(places)), -bits[url])
        )

    @property
    def goes_on(self) -> bool:
        """True if suspects must be asked for more."""
        self._suspects = {url: one for url, one in self._suspects.items() if one.goes_on}
        return bool(self._suspects)

    def take(self, answers: Mapping[str, ProbeAnswer]) -> None:
        """Note the suspects' answers. All ranks compute the texts and the responses, and the
        texts of every push.
        """
        self._suspects = {url: one for url, one in self._suspects.items() if url in answers}
        self._answers = {url: answers[url] for url in self._suspects}
        responses = [decoded.ids for answer in self._answers.values() for decoded in answer.decoded]
        self.asked = self._asked([*self._question.texts, *responses, *self.texts], simulates=True)

    def judge(self, own: Logprobs, moved: Logprobs) -> RolloutError | None:
        """Add a round to the evidence; the error that names a server which differs, or None.

        Args:
            own: [T] the trainer's log-probs of each text that was asked.
            moved: [R, T] what simulated rounding moves them by; () with a bound of the user's.
        """
        self.numbers["rollout/probe_rounds"] += 1
        expected = (
            [TextRounding.of(one, self._memory.rounding) for one in moved] if moved else self._bounds(own)
        )
        if moved:  # rounding may have grown with the policy: the next push is compared with that of now
            self._memory.expected = expected[-len(self.texts) :]
        place, tails = len(self._question.texts), []
        new = self._new_texts()
        for url, evidence in self._suspects.items():
            answer = self._answers[url]
            ratios = _ratios(own[: len(answer.scores)], answer.scores, expected)
            evidence.scores += [ratio for ratio, counts in zip(ratios, new, strict=True) if counts]
            for decoded in answer.decoded:
                tail = self._of_response(moved[place] if moved else None, len(decoded.sampled))
                if is_new(decoded.ids, evidence.responses, len(decoded.sampled)):
                    judge_decoded(evidence, decoded, own[place][-len(decoded.sampled) :], tail)
                evidence.responses.append(decoded.ids)
                tails.append(tail)
                place += 1
        self._memory.decoded = tails or self._memory.decoded
        if self._suspects:
            bits = max(one.bits for one in self._suspects.values())
            self.numbers["rollout/probe_bits"] = max(bits, self.numbers["rollout/probe_bits"])
        return self._error(own[: len(self._question.texts)])

    def _new_texts(self) -> list[bool]:
        """True for each text of this round that is evidence: few prompts, or some that begin alike, make the
        same ones.
        """
        found = []
        for text in self._question.texts:
            found.append(is_new(text, self._scored, len(text)))
            self._scored.append(text)
        return found

    def _error(self, own: Logprobs) -> RolloutError | None:
        wrong = [url for url, one in self._suspects.items() if one.answer == "differs"]
        if not wrong:
            return None
        url, evidence = wrong[0], self._suspects[wrong[0]]
        alone = any(one.is_well for one in self._compared.values())
        cause = cause_of(evidence, before=url in self._off_before, alone=alone)
        return error_of(url, self._answers[url], evidence, own, cause, version=self._version)

    def _measured(
        self, own: Logprobs, answers: Mapping[str, ProbeAnswer], before: Mapping[str, ProbeAnswer]
    ) -> dict[str, float]:
        """The numbers of the first round, of the worst server each."""
        if not answers:
            return {}
        compared = {url: ProbeNumbers.of(own, one.scores) for url, one in answers.items()}
        self._memory.growth.measure({url: ProbeNumbers.of(own, one.scores).k3 for url, one in before.items()})
        growth = self._memory.growth.measure({url: one.k3 for url, one in compared.items()})
        every = self._compared.values()
        found = {
            "probe_max_abs_log_ratio": max(one.max_abs for one in compared.values()),
            "probe_mean_abs_log_ratio": max(one.mean_abs for one in compared.values()),
            "probe_k3": max(one.k3 for one in compared.values()),
            "probe_over_rounding": max(float(np.median(one.screened)) for one in every),
            "probe_bits": max(bits_of(one.screened) for one in every),
            "probe_rounds": 0.0,
        }
        if growth is not None:
            found["probe_k3_growth"] = growth
        if decoded := [ratio for one in every for ratio in one.decode]:
            found["probe_decode_over_rounding"] = max(decoded)
        return {f"rollout/{name}": value for name, value in found.items()}

    def _draws(self, number: int) -> tuple[ProbeDraw, ...]:
        """Responses to ask a server for: one in every push, TEXTS in a further round, half of them
        without the cache.

        Those with the cache have beginnings of the prompt of every push, so that a prefix that was kept
        too long is met. No two rounds have a prompt in common: a sure policy answers it alike, and that is
        no further evidence.
        """
        length = max(min(PROMPT_TOKENS, self._longest - DECODED_TOKENS), 2)
        most = max(self._longest - length, 1)
        usual = prompt_text(self._source.prompts, 0, length)
        if number == 0:
            return (ProbeDraw(usual, 0, min(FIRST_DECODED, most)),)
        made, tokens = [], min(DECODED_TOKENS, most)
        for place in range(TEXTS):
            fresh, cut = place >= TEXTS // 2, (number - 1) * TEXTS // 2 + place + 1
            other = prompt_text(self._source.prompts, number * TEXTS + place, length)
            prompt = other if fresh else usual[: max(length - cut, 2)]
            made.append(ProbeDraw(prompt, number * 100 + place, tokens, fresh))
        return tuple(made)

    def _asked(self, texts: Sequence[tuple[int, ...]], *, simulates: bool) -> Asked:
        return Asked(
            tuple(texts), self._memory.rounding.relative_error if simulates and self._bound is None else 0.0
        )

    def _bounds(self, own: Logprobs) -> list[TextRounding]:
        """With --rollout-max-probe-log-ratio."""
        return [TextRounding.bound(self._bound, len(one)) for one in own]

    def _of_response(self, moved: np.ndarray | None, count: int) -> TextRounding:
        """What rounding does to a response, whose prompt the policy may be much surer of.

        Args:
            moved: [R, T] of prompt and response; None: there is a bound of the user's.
            count: tokens of the response.
        """
        if moved is None:
            return TextRounding.bound(self._bound, count)
        return TextRounding.of(moved[:, -count:], self._memory.rounding)

    def _rounding(self, types: set[str]) -> Rounding:
        """The coarsest of what trainer and servers compute in, and of what is pushed."""
        pushed = {"fp8_blockwise": "fp8", "int4_group": "int4"}.get(self._push_rounding)
        names = {self._dtype, *types, pushed, "fp8" if self._servers.quantization is not None else None} - {
            None
        }
        known = [ROUNDINGS.get(name, ROUNDINGS["bfloat16"]) for name in names]
        return max(known, key=lambda rounding: rounding.relative_error)


def _ratios(own: Logprobs, scores: Logprobs, expected: Sequence[TextRounding]) -> list[float]:
    """`off_by` of each text that was scored."""
    return [off_by(mine - theirs, one) for mine, theirs, one in zip(own, scores, expected, strict=False)]


def _usual(expected: Sequence[TextRounding]) -> TextRounding:
    """What rounding does to a text like these, of which nothing was simulated: as to the worst of them."""
    median, upper = max(one.median for one in expected), max(one.upper for one in expected)
    return TextRounding(median, upper, np.zeros(0, dtype=bool))
