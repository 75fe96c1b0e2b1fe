"""Calls reward functions, the user's and built-in ones: plain ones in processes or a thread, async
ones on the loop.
"""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections.abc import Collection, Sequence
from typing import Any

import orjson

from megatron_rl_corr.config.reward_specs import RewardSpec
from megatron_rl_corr.data.loading import source_of
from megatron_rl_corr.data.reward_input import Form, RewardInput
from megatron_rl_corr.data.reward_process import RewardProcess
from megatron_rl_corr.data.reward_worker import FLAG, LoadedReward, attempt, load_rewards, set_up
from megatron_rl_corr.data.worker_pool import CallTimeout, ThreadWorker, WorkerGone, WorkerPool, awaited
from megatron_rl_corr.engines.errors import SampleFailure

DEFAULT_WORKERS = 4
"""Processes of a replica."""


class RewardFunctions:
    """The reward functions of a run. Start, use and close it on one event loop.

    Args:
        specs: of the functions.
        workers: processes for the plain ones together; 0: a thread of this process. None: DEFAULT_WORKERS.
        limit_s: seconds that a call may take.
        hidden: variables of the environment that processes do not get.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        workers: int | None,
        limit_s: float,
        hidden: Collection[str] = (),
    ):
        self._specs, self._workers, self._limit_s = list(specs), workers, limit_s
        self._hidden = hidden
        self._loaded: dict[str, LoadedReward] = {}
        """By name, those that this process calls itself."""
        self._forms: dict[str, Form] = {}
        self._pool: WorkerPool | None = None

    def form_of(self, name: str) -> Form:
        """The form of the function that is called so."""
        return self._forms[name]

    async def start(self) -> None:
        """Load the functions and start their workers.

        Raises:
            ValueError: a function cannot be loaded, or `reward_workers` has no effect on them.
        """
        if not self._specs:
            return
        # One text for all workers: one that takes another's place hours later must not bring an
        # edited function.
        texts = [source_of(spec.source) if spec.kind == "function" else None for spec in self._specs]
        workers = DEFAULT_WORKERS if self._workers is None else self._workers
        own = self._specs
        if workers > 0:
            own = await self._start_processes(workers, texts)
        if own:
            await self._load(
                [(spec, text) for spec, text in zip(self._specs, texts, strict=True) if spec in own]
            )

    async def call(
        self, name: str, samples: Sequence[RewardInput], left: list[asyncio.Task]
    ) -> list[dict[str, float]]:
        """The named numbers that a function gives each sample: of one sample, or of a group where
        that is its form.

        Args:
            name: of the function.
            samples: copies, which the function may change.
            left: as `WorkerPool.call`'s.

        Raises:
            SampleFailure: there are none. Its cause is `reward_timeout` past the limit,
                else `reward_error`.
        """
        loaded = self._loaded.get(name)
        if loaded is not None and loaded.is_async:
            return await self._awaited(loaded, samples)
        try:
            if loaded is not None:
                job = functools.partial(attempt, functools.partial(loaded.score, samples))
            else:
                number = [spec.name for spec in self._specs].index(name)
                job = {"function": number, "samples": [vars(sample) for sample in samples]}
            return value_of(await self._pool.call(job, left))
        except (CallTimeout, WorkerGone) as failure:
            raise as_sample_failure(failure, self._source_of(name)) from None
        except orjson.JSONEncodeError as error:
            raise reward_error(
                f"{self._source_of(name)}: the row's metadata holds what no worker can be given ({error}); "
                "leave it out of the row, or use `reward_workers` 0, where an environment may leave objects "
                "there too"
            ) from None

    async def label_problems(self, name: str, labels: Sequence[list[str]]) -> list[str | None]:
        """Why a built-in reward can't read each of these labels; None where it can.

        Labels whose reading takes longer than the limit, or ends the worker, are read again one by one.
        """
        if (loaded := self._loaded.get(name)) is not None:
            job: Any = functools.partial(attempt, functools.partial(loaded.label_problems, labels))
        else:
            job = {"function": [spec.name for spec in self._specs].index(name), "labels": list(labels)}
        try:
            return value_of(await self._pool.call(job))
        except (CallTimeout, WorkerGone) as failure:
            if len(labels) == 1:
                return [f"when it is read, {failure}"]
        return [problem for label in labels for problem in await self.label_problems(name, [label])]

    def _source_of(self, name: str) -> str:
        return next(f"{FLAG} {spec.source}" for spec in self._specs if spec.name == name)

    async def close(self) -> None:
        """End the workers, whatever they are doing."""
        if self._pool is not None:
            await self._pool.close()

    async def _start_processes(self, workers: int, texts: list[str | None]) -> list[RewardSpec]:
        """Start them, if a function is plain. Returns the specs of the functions that are not."""
        forms: list[tuple[Form, bool]] = []

        async def process() -> RewardProcess:
            worker = await RewardProcess.start(self._specs, texts, self._hidden)
            forms[:] = worker.forms
            return worker

        pool = WorkerPool(process, limit_s=self._limit_s)
        await pool.start(1)
        self._forms = {spec.name: form for spec, (form, _) in zip(self._specs, forms, strict=True)}
        waiting = [spec for spec, (_, is_async) in zip(self._specs, forms, strict=True) if is_async]
        if len(waiting) < len(self._specs):
            self._pool = pool
            await pool.start(workers - 1)
            return waiting
        await pool.close()
        if self._workers is not None:
            raise ValueError(
                f"`reward_workers` {workers} has no effect on {FLAG} "
                f"{' '.join(spec.source for spec in waiting)}, "
                f"{'an async function' if len(waiting) == 1 else 'async functions'}, which the event loop "
                "runs; drop it"
            )
        return waiting

    async def _load(self, wanted: list[tuple[RewardSpec, str | None]]) -> None:
        """Load these in this process: async functions, and plain ones for a thread."""
        specs, texts = zip(*wanted, strict=True)
        try:
            loaded = load_rewards(specs, texts)
            for done in set_up(loaded):
                await done
        except SystemExit as error:  # it would end the loop, and the caller wait for ever
            named = " ".join(spec.source for spec in specs)
            raise ValueError(f"{FLAG} {named} called exit({error.code!r}) while it was loaded") from error
        self._loaded = {one.spec.name: one for one in loaded}
        self._forms |= {one.spec.name: one.form for one in loaded}
        if not all(one.is_async for one in loaded):
            self._pool = WorkerPool(_thread, limit_s=self._limit_s)
            await self._pool.start(1)

    async def _awaited(self, loaded: LoadedReward, samples: Sequence[RewardInput]) -> list[dict[str, float]]:
        """The numbers from an async function."""
        try:
            value = await awaited(loaded.call(samples), self._limit_s)
        except CallTimeout as failure:
            raise as_sample_failure(failure, loaded.source) from None
        except Exception as error:  # noqa: BLE001  raised as a failure of this sample
            own = error.__traceback__.tb_next.tb_next  # without the frames here
            raise reward_error("".join(traceback.format_exception(type(error), error, own)).strip()) from None
        try:
            return loaded.checked(value, len(samples))
        except ValueError as error:
            raise reward_error(str(error)) from None


async def _thread() -> ThreadWorker:
    return ThreadWorker("rollout-reward")


def value_of(answer: dict[str, Any]) -> Any:
    """What a worker answered. Raises SampleFailure where its function failed."""
    if "error" in answer:
        raise reward_error(str(answer["error"]))
    return answer["value"]


def reward_error(text: str) -> SampleFailure:
    """The failure of a sample whose reward function failed."""
    return SampleFailure("reward_error", text if text.startswith(FLAG) else f"{FLAG} failed:\n{text}")


def as_sample_failure(error: BaseException, source: str = FLAG) -> SampleFailure:
    """The failure of a sample whose call took too long or whose worker ended."""
    if isinstance(error, CallTimeout):
        return SampleFailure(
            "reward_timeout", f"{source}: {error}; make it faster, or raise `reward_timeout_s`"
        )
    remedy = (
        "a reward function must return or raise" if isinstance(error, WorkerGone) else "see the log above"
    )
    return SampleFailure("reward_error", f"{source}: {error}; {remedy}")
