"""One episode of a run: answers a harness's requests by the policy, and gives what was sampled as
trajectories.

R sampled tokens of an answer.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from megatron_rl_corr.engines.concurrency import all_or_first_failure
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.engines.types import checked_prompt_ids
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.gateway.message_spans import message_spans
from megatron_rl_corr.rollout.gateway.templates import Templates
from megatron_rl_corr.rollout.gateway.tree import AskedTurn, TurnTree
from megatron_rl_corr.rollout.gateway.types import Answer, ChatRequest, GatewayError, TextRequest
from megatron_rl_corr.rollout.seeds import Draw

Result = TypeVar("Result")
ParseCalls = Callable[..., tuple[str, list[dict[str, Any]]]]
"""parse(text, tools, turn=name, cut=cause) -> (the content beside the calls, the calls as in OpenAI's chat
completions, with ids that are unique where the names of answers are). cut: what ended the answer, length or
stop (a text); None: a control token did.
"""
SplitThoughts = Callable[..., tuple[str, str]]
"""split(text, begun=bool) -> (thoughts, the text behind them). begun: the prompt ends with THOUGHTS."""
THOUGHTS = "<think>"


@dataclass(frozen=True)
class EpisodeRules:
    """What is the same for all episodes of a run."""

    sampling: SamplingParams
    """How every answer is sampled; max_new_tokens bounds each of them."""
    max_tokens: int
    """Tokens of a sequence at most, its prompt too: `seq_length` + 1, or what the servers have room for
    if it is less.
    """
    max_turns: int
    """Requests of an episode."""
    parse: ParseCalls | None = None
    """Reads tool calls from an answer; None: all of it is content."""
    thoughts: SplitThoughts | None = None
    """Tells the thoughts from what is behind them; calls are read there alone. None: answers have none."""
    separates: bool = True
    """The thoughts come apart from the content: a harness that does not send them back edits its history.
    False: they stay in the content, in front.
    """

    def __post_init__(self):
        if self.sampling.ignore_eos:
            raise ValueError("ignore_eos leaves an agent's answer without an end; drop it")


@dataclass
class EpisodeCounts:
    """What has happened in an episode."""

    requests: int = 0
    """That were answered or refused."""
    refused: int = 0
    """With an error of the request: too long, too many, one that the template refuses."""
    turns: int = 0
    branches: int = 0
    rerendered: int = 0
    """Turns that the template writes in another way than they were sampled, and that go on as sampled."""
    undelivered: int = 0
    """Answers that the harness did not get."""
    abandoned: int = 0
    """Requests that it took back before their answer was there; they count in nothing else."""
    forks: Counter = field(default_factory=Counter)
    """Branches that requests began, by reason (`TurnTree.forks`)."""
    overridden: Counter = field(default_factory=Counter)
    """Requests by field of theirs that the run's own setting took the place of."""


class Episode:
    """An `EpisodeSession` on rollout servers. Used on the client's event loop.

    Args:
        client: of the servers.
        templates: of the checkpoint, for all episodes.
        rules: of the run.
        draw: the episode's place in the run; each answer gets a turn number of its own.
    """

    def __init__(self, client: RolloutClient, templates: Templates, rules: EpisodeRules, draw: Draw):
        self._client, self._templates, self._rules, self._draw = client, templates, rules, draw
        self.tree = TurnTree(templates)
        self._answers, self._has_ended = 0, False
        self._in_flight: set[asyncio.Future] = set()
        self._failure: RolloutError | None = None
        self._counts = EpisodeCounts()
        self._context = contextvars.copy_context()  # its traces: requests come in tasks of the gateway's
        ids = dict.fromkeys(rules.sampling.stop_token_ids)
        if templates.end_id is not None:
            ids[templates.end_id] = None
        self._sampling = replace(rules.sampling, stop_token_ids=tuple(ids))

    @property
    def counts(self) -> EpisodeCounts:
        """So far."""
        turns = list(self.tree.turns())
        return replace(
            self._counts,
            turns=len(turns),
            branches=len(self.tree.leaves()),
            rerendered=self.tree.rerendered,
            forks=Counter(self.tree.forks),
            overridden=Counter(self._counts.overridden),
        )

    @property
    def variables(self) -> set[str]:
        """As `EpisodeSession`."""
        return self._templates.variables

    async def count(self, request: ChatRequest) -> int:
        """As `EpisodeSession`; it is no request of the episode.

        Raises:
            GatewayError: the template refuses it.
        """
        self._check_open()
        try:
            given = [self._templates.message(one) for one in request.messages]
            _, ids = await self._templates.first(given, request.tools, request.template_kwargs)
        except ValueError as error:
            raise GatewayError(400, "invalid_value", str(error), param="messages") from error
        return ids.numel()

    async def chat(self, request: ChatRequest) -> list[Answer]:
        """request.n answers, each another turn.

        Raises:
            GatewayError: as `EpisodeSession`.
        """
        return await self._counted(self._chat(request), request)

    async def text(self, request: TextRequest) -> list[Answer]:
        """As `chat`, for a raw text or ids."""
        return await self._counted(self._text(request), request)

    def undelivered(self, answers: Sequence[Answer]) -> None:
        """They are no turns, but for those that a later request has in its history."""
        gone = {answer.id for answer in answers}
        for turn in [one for one in self.tree.turns() if str(one.number) in gone]:
            self._counts.undelivered += self.tree.take_back(turn)

    async def finish(self) -> list[Trajectory]:
        """The episode's branches, after the harness has ended; none where it got no answer. Requests in
        flight are cancelled, and are no turns; later ones are refused.

        Raises:
            RolloutError: a request has failed for good, at the servers.
            RuntimeError: a branch is not what the servers gave.
        """
        await self.end()
        if self._failure is not None:
            raise self._failure
        return await asyncio.to_thread(self._checked_branches)

    def _checked_branches(self) -> list[Trajectory]:
        """In a thread, as it takes a second where many branches are long; the ended tree stays as it is."""
        branches = [
            replace(one, sample_index=self._draw.sample, messages=message_spans(leaf.path(), self._templates))
            for one, (leaf, _) in zip(self.tree.branches(), self.tree.leaves(), strict=True)
        ]
        if problems := self.tree.check(branches, renders=False):
            raise RuntimeError(f"an episode is not what was sampled: {'; '.join(problems)}")
        return branches

    async def end(self) -> None:
        """Cancel the requests in flight, which are no turns, and refuse later ones; no server samples for it
        when this returns.
        """
        self._has_ended = True
        for work in self._in_flight:
            work.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)

    async def _counted(
        self, answers: Coroutine[Any, Any, Result], request: ChatRequest | TextRequest
    ) -> Result:
        self._counts.requests += 1
        self._counts.overridden.update(request.overridden)
        try:
            return await answers
        except GatewayError as error:
            self._counts.refused += 400 <= error.status < 500
            raise
        except asyncio.CancelledError:
            self._counts.requests -= 1
            self._counts.overridden -= Counter(request.overridden)
            self._counts.abandoned += 1
            raise

    async def _chat(self, request: ChatRequest) -> list[Answer]:
        self._check_open()
        self._check_turns()
        try:
            asked = await self.tree.ask(request.messages, request.tools, request.template_kwargs)
        except ValueError as error:
            raise GatewayError(400, "invalid_value", str(error), param="messages") from error
        parse = self._rules.parse if request.parses_tools and request.tools else None
        parts, sampling = await self._sampled(asked, request, param="messages")
        return [self._answer(asked, part, sampling, parse, is_chat=True) for part in parts]

    async def _text(self, request: TextRequest) -> list[Answer]:
        self._check_open()
        self._check_turns()
        try:
            if not isinstance(request.prompt, str):
                checked_prompt_ids(request.prompt, vocab_size=self._client.vocab_size, prompt_index=0)
            asked = await self.tree.ask_raw(request.prompt)
        except ValueError as error:
            raise GatewayError(400, "invalid_value", str(error), param="prompt") from error
        parts, sampling = await self._sampled(asked, request, param="prompt")
        return [self._answer(asked, part, sampling, None, is_chat=False) for part in parts]

    def _check_open(self) -> None:
        if self._has_ended:
            raise GatewayError(401, "invalid_api_key", "the episode of this key has ended")
        if self._failure is not None:
            raise GatewayError(500, "server_error", f"the episode has failed: {self._failure}")

    def _check_turns(self) -> None:
        if self._counts.requests > self._rules.max_turns:
            raise GatewayError(
                400,
                "insufficient_quota",
                f"this episode has had its {self._rules.max_turns} requests (`--rollout-agent-max-turns`)",
            )

    async def _sampled(
        self, asked: AskedTurn, request: ChatRequest | TextRequest, *, param: str
    ) -> tuple[list[Trajectory], SamplingParams]:
        """The servers' answers, and how they were sampled."""
        self._check_open()  # it may have ended while a long text was tokenised
        sampling = self._sampling_of(asked, request, param)
        calls = []
        for _ in range(request.n):
            draw = replace(self._draw, turn=self._answers)
            self._answers += 1
            calls.append(
                self._client.turn(
                    asked.line.ids,
                    sampling,
                    draw,
                    prefer=asked.server or self.tree.last_server,
                    routes_from=asked.routes_known,
                )
            )
        sampled = all_or_first_failure(calls)
        work = asyncio.get_running_loop().create_task(sampled, context=self._context)
        self._in_flight.add(work)
        try:
            parts = await work
        except RolloutError as error:
            self._failure = self._failure or error
            raise GatewayError(500, "server_error", f"the rollout servers failed: {error}") from error
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling() or not self._has_ended:
                raise
            raise GatewayError(401, "invalid_api_key", "the episode of this key has ended") from None
        finally:
            self._in_flight.discard(work)
        if self._has_ended:
            raise GatewayError(401, "invalid_api_key", "the episode of this key has ended")
        if any(not part.output_ids.numel() for part in parts):
            raise GatewayError(503, "server_error", "sampling was cut before the first token; ask again")
        return parts, sampling

    def _sampling_of(
        self, asked: AskedTurn, request: ChatRequest | TextRequest, param: str
    ) -> SamplingParams:
        prompt, most = asked.line.ids.numel(), self._rules.max_tokens
        if asked.added.numel() and int(asked.added.max()) >= self._client.vocab_size:
            what = f"token id {int(asked.added.max())} is outside the model's vocabulary"
            raise GatewayError(400, "invalid_value", what, param=param)
        if prompt >= most:
            raise GatewayError(
                400,
                "context_length_exceeded",
                f"This model's maximum context length is {most} tokens. However, your messages resulted in "
                f"{prompt} tokens. Please reduce the length of the messages.",
                param=param,
                anthropic=f"prompt is too long: {prompt} tokens > {most - 1} maximum",
            )
        wanted = self._sampling.max_new_tokens if request.max_tokens is None else request.max_tokens
        tokens = min(wanted, self._sampling.max_new_tokens, most - prompt)
        stop = tuple(dict.fromkeys((*self._sampling.stop, *request.stop)))
        try:
            sampling = replace(self._sampling, max_new_tokens=tokens, stop=stop)
            self._client.check_sampling(sampling)
        except ValueError as error:
            raise GatewayError(400, "invalid_value", str(error)) from error
        return sampling

    def _answer(
        self,
        asked: AskedTurn,
        part: Trajectory,
        sampling: SamplingParams,
        parse: ParseCalls | None,
        *,
        is_chat: bool,
    ) -> Answer:
        """Makes a turn of what was sampled, and says it as the harness gets it."""
        ids = part.output_ids.tolist()
        has_stopped = part.finish_reason == "stop"
        ended = self._templates.control_text(ids[-1]) if has_stopped else None
        text = self._templates.decode(ids if ended is None else ids[:-1])
        end, stop_text = _stop(text, ended, sampling.stop) if has_stopped else (len(text), None)
        said, reasoning, kept, calls = text[:end], "", "", []
        if is_chat and self._rules.thoughts is not None:
            begun = asked.added_text.rstrip().endswith(THOUGHTS)
            reasoning, rest = self._rules.thoughts(said, begun=begun)
            if not self._rules.separates:
                reasoning, kept = "", said[: len(said) - len(rest.lstrip())]
            said = rest if self._rules.separates else said[len(kept) :]
        if parse is not None:
            cut = None if ended is not None else "stop" if has_stopped else "length"
            said, calls = parse(said, asked.tools, turn=str(self.tree.next_number), cut=cut)
        said = (kept + said).strip() if calls else kept + said
        message: dict[str, Any] | None = None
        if is_chat:
            # As requests bring it back, to the letter, so that the tree makes its forms once.
            message = {"role": "assistant", "content": said}
            message |= {"reasoning_content": reasoning} if reasoning else {}
            message |= {"tool_calls": calls} if calls else {}
        turn = self.tree.add(asked, part, ended=ended, text=text, answer=message)
        return Answer(
            id=str(turn.number),
            text=said,
            finish_reason="length" if not has_stopped else "tool_calls" if calls else "stop",
            prompt_tokens=asked.line.ids.numel(),
            cached_tokens=part.cached_tokens,
            output_ids=part.output_ids,
            spelled=partial(self._templates.token_texts, ids),
            logprobs=part.rollout_logprobs,
            tool_calls=calls,
            reasoning=reasoning,
            stop_text=stop_text,
        )


def _stop(text: str, ended: str | None, stops: Sequence[str]) -> tuple[int, str | None]:
    """(where what was said ends, the stop text that ended it, None: none did).

    Args:
        text: what was sampled, without the control token at its end.
        ended: the text of that token, which a stop text may end with; None: there is none.
        stops: the first of them ended the answer.
    """
    if ended is None:
        found = [(at, one) for one in stops if (at := text.find(one)) >= 0]
    else:
        whole = text + ended
        found = [(len(whole) - len(one), one) for one in stops if one.endswith(ended) and whole.endswith(one)]
    return min(found, default=(len(text), None), key=lambda one: one[0])
