"""Log-probs of samples under the policy of other servers, which nothing is ever pushed to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from megatron_rl_corr.config.run import ENGINES
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.engines.inspection import TokenScores
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.engines.types import UnsupportedByEngine
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.rollout.server_pool import rotated


class Scorer:
    """Several servers of one policy, which score given tokens at temperature 1, each sample in one prefill.

    The HTTP session belongs to the event loop of the first call.

    Args:
        urls: addresses of the servers.
        vocab_size: of the model.
        engine: what the servers run.
        max_concurrency: samples in flight.
        timeout_s: limit of a sample, from its request to the end of the answer.
        max_retries: failed requests of a sample after which it has no log-probs.
        api_key, ca_file, replica, replicas: as `RolloutClient`'s.

    Raises:
        ValueError: no address, or a key or file that can't be used.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        vocab_size: int,
        engine: str = next(iter(ENGINES)),
        max_concurrency: int = 64,
        timeout_s: float = 600.0,
        max_retries: int = 3,
        api_key: str | None = None,
        ca_file: str | Path | None = None,
        replica: int = 0,
        replicas: int = 1,
    ):
        self._fleet = Fleet(
            urls,
            engine=engine,
            timeout_s=timeout_s,
            connect_timeout_s=10.0,
            api_key=api_key,
            ca_file=ca_file,
            max_in_flight=max_concurrency,
        )
        self.urls = self._fleet.urls
        self.control = ServerControl(self._fleet, self.urls, update_timeout_s=timeout_s)
        """Asks them anything else."""
        self._vocab_size, self._max_retries, self._in_flight = vocab_size, max_retries, max_concurrency
        self._waiting = dict.fromkeys(rotated(self.urls, replica, replicas), 0)
        self._names: list[str | None] = [None] * len(self.urls)
        """What each server called its weights when it was healthy; None where it did not tell."""

    async def wait_healthy(self, timeout_s: float) -> None:
        """Find out what each server runs, and return once all can score.

        Raises:
            RolloutServerError: one can't in time.
            RolloutProtocolError: one is no server.
        """
        await self._fleet.recognize(timeout_s)
        await self.control.wait_healthy(timeout_s)
        self._names = await self._reported_names()

    async def too_short(self, tokens: int) -> tuple[str, int] | None:
        """(address, context length) of a server that can't score a sample of so many tokens, or None.

        Servers that do not tell are left out.
        """
        for url in self.urls:
            engine = self._fleet.engine_of(url)
            try:
                context = engine.context_length(url, await self.control.ask(url, engine.list_models()))
            except (RolloutError, UnsupportedByEngine):
                continue
            if tokens > context - engine.limits.scoring_room:
                return url, context
        return None

    async def changed_weights(self) -> tuple[str, str, str] | None:
        """(address, name of its weights at `wait_healthy`, now) of a server whose weights are others
        by now, or None.

        Servers that do not tell are left to the next call, and to `score`.
        """
        try:
            now = await self._reported_names()
        except RolloutProtocolError:  # all of what came is no answer, as a proxy's page of a moment is none
            return None
        found = zip(self.urls, self._names, now, strict=True)
        return next((one for one in found if None not in one and one[1] != one[2]), None)

    async def _reported_names(self) -> list[str | None]:
        try:
            return await self.control.reported_versions()
        except RolloutServerError:  # of none, as of a router that does not hand the question on
            return [None] * len(self.urls)

    async def score(self, samples: Sequence[Trajectory], *, likeliest: int = 1) -> list[TokenScores | None]:
        """The scores of each sample's response, in the order of the samples; None for one that
        no server scored.

        Args:
            samples: R tokens each.
            likeliest: K, so many ids at least come with each token.

        Raises:
            RolloutError: none of the samples was scored; the last failure.
        """
        places = asyncio.Semaphore(self._in_flight)
        answers = await asyncio.gather(*[self._one(sample, likeliest, places) for sample in samples])
        if samples and all(isinstance(answer, RolloutError) for answer in answers):
            raise answers[-1]
        for place, answer in enumerate(answers):
            if isinstance(answer, RolloutError):
                EVENTS.tell("sample_not_scored", str(answer), place=place, samples=len(samples))
        return [None if isinstance(answer, RolloutError) else answer for answer in answers]

    async def close(self) -> None:
        """Close the HTTP session."""
        await self._fleet.close()

    async def _one(
        self, sample: Trajectory, likeliest: int, places: asyncio.Semaphore
    ) -> TokenScores | RolloutError:
        prompt, output, failed, error = sample.prompt_ids.tolist(), sample.output_ids.tolist(), [], None
        async with places:
            for attempt in range(self._max_retries + 1):
                # The least busy of those that this sample has failed at least often.
                url = min(self._waiting, key=lambda url: (failed.count(url), self._waiting[url]))
                self._waiting[url] += 1
                try:
                    return await self._scored(url, prompt, output, likeliest)
                except RolloutError as failure:
                    error = failure
                    failed.append(url)
                    if attempt < self._max_retries:
                        EVENTS.tell("scoring_retried", str(failure), server=url)
                finally:
                    self._waiting[url] -= 1
        return error

    async def _scored(self, url: str, prompt: list[int], output: list[int], likeliest: int) -> TokenScores:
        engine = self._fleet.engine_of(url)
        answer = await self.control.ask(url, engine.score(prompt, output, likeliest=likeliest))
        scores = engine.parse_scores(answer, server=url, output_ids=output, vocab_size=self._vocab_size)
        if scores.top_ids.shape[1] < likeliest:
            detail = f"{scores.top_ids.shape[1]} likeliest ids came where {likeliest} were asked for"
            raise RolloutProtocolError(url, "the answer to a score", detail)
        return scores
