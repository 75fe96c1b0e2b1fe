"""Scores samples as they end: by their environment, or by the user's reward function, beside the event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import orjson

from megatron_rl_corr.data.loading import load, load_with_module, source_of
from megatron_rl_corr.data.prompts import Prompt
from megatron_rl_corr.data.reward_process import RewardProcess
from megatron_rl_corr.data.reward_worker import DEFAULT_WORKERS, FLAG, attempt, checked_reward, set_up
from megatron_rl_corr.data.reward_worker import score as score_one
from megatron_rl_corr.data.worker_pool import CallTimeout, ThreadWorker, WorkerGone, WorkerPool, awaited
from megatron_rl_corr.engines.errors import SampleFailure

if TYPE_CHECKING:
    from megatron_rl_corr.engines.trajectory import Trajectory

RewardFunction = Callable[[Prompt, list[int], str], float | Awaitable[float]]
"""reward(prompt, output_ids, finish_reason) -> a finite number; plain or `async`."""


def load_function(spec: str) -> RewardFunction:
    """The function named by "path/to/file.py:name" or "package.module:name".

    Raises:
        ValueError: as `load_with_module`.
    """
    return load(spec, FLAG)


class Rewards:
    """Scores samples with the user's reward function, or with the reward of their environments.

    An `async def` runs on the event loop; a plain function in processes that load its file themselves, or in one thread
    of this process. Start, use and close it on one event loop.

    Args:
        spec: the function, "path/to/file.py:name" or "package.module:name"; None: the environments score.
        workers: processes for a plain function; 0: a thread of this process. None: DEFAULT_WORKERS.
        limit_s: seconds that a call may take.
        late: late(failure) is called when a call ends that was cancelled meanwhile; None: it had no failure.
    """

    def __init__(
        self, spec: str | None, *, workers: int | None = None, limit_s: float,
        late: Callable[[SampleFailure | None], None] = lambda failure: None,
    ):  # fmt: skip
        self._spec, self._workers, self._limit_s, self.late = spec, workers, limit_s, late
        self._function: RewardFunction | None = None
        self._pool: WorkerPool | None = None

    async def start(self) -> None:
        """Load the function and start its workers.

        Raises:
            ValueError: the function cannot be loaded, or `reward_workers` has no effect on it.
        """
        if self._spec is None:
            return
        workers = DEFAULT_WORKERS if self._workers is None else self._workers
        kinds: set[str] = set()
        # One text for all workers: one that takes another's place hours later must not bring an edited function.
        text = source_of(self._spec)

        async def process() -> RewardProcess:
            worker = await RewardProcess.start(self._spec, text)
            kinds.add(worker.kind)
            return worker

        if workers > 0:
            pool = WorkerPool(process, limit_s=self._limit_s, unheard=self._unheard)
            await pool.start(1)
            if kinds == {"plain"}:
                self._pool = pool
                return await pool.start(workers - 1)
            await pool.close()
            if self._workers is not None:
                raise ValueError(
                    f"`reward_workers` {workers} has no effect on {FLAG} {self._spec}, an async function, "
                    "which runs on the event loop; drop it"
                )
        try:
            module, self._function = load_with_module(self._spec, FLAG, text)
            done = set_up(module)
            if inspect.isawaitable(done):
                await done
        except SystemExit as error:  # it would end the loop, and the caller wait for ever
            raise ValueError(f"{FLAG} {self._spec} called exit({error.code!r}) while it was loaded") from error
        if not inspect.iscoroutinefunction(self._function):
            self._pool = WorkerPool(_thread, limit_s=self._limit_s, unheard=self._unheard)
            await self._pool.start(1)

    async def close(self) -> None:
        """End the workers, whatever they are doing."""
        if self._pool is not None:
            await self._pool.close()

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> float:
        """The sample's reward, finite in float32.

        Args:
            prompt: the row of the data set.
            trajectory: the sample. The function gets all ids after the prompt, those of an environment included.

        Raises:
            SampleFailure: there is no reward. Its cause is `reward_timeout` past the limit, and `reward_error` for an
                exception (with its traceback), for a value that is not a finite number, and where both or neither of
                environment and function give a reward.
        """
        own = trajectory.environment_reward
        if (self._spec is None) == (own is None):
            found = "its environment's reward() gave none" if own is None else f"its environment's reward() gave {own}"
            remedy = "give one of them" if own is None else "drop one of them"
            raise SampleFailure("reward_error", f"{found}, and {FLAG} is {'not ' * (own is None)}given; {remedy}")
        if own is not None:
            return own
        output_ids, reason = trajectory.output_ids.tolist(), trajectory.finish_reason
        if self._pool is None:
            return await self._awaited(prompt.copied(), output_ids, reason)
        try:
            if self._function is None:
                job = {"index": prompt.index, "input_ids": prompt.input_ids, "metadata": prompt.metadata,
                       "output_ids": output_ids, "finish_reason": reason}  # fmt: skip
            else:
                job = functools.partial(
                    attempt, functools.partial(score_one, self._function, prompt.copied(), output_ids, reason)
                )
            return _reward(await self._pool.call(job))
        except (CallTimeout, WorkerGone) as failure:
            raise _failure(failure) from None
        except orjson.JSONEncodeError as error:
            raise _reward_error(
                f"{FLAG}: prompt.metadata holds what no worker can be given ({error}); an environment that leaves "
                "objects there for the reward function needs `reward_workers` 0"
            ) from None

    async def _awaited(self, *given: Any) -> float:
        """The reward from an async function."""
        try:
            value = await awaited(self._function(*given), self._limit_s)
        except CallTimeout as failure:
            raise _failure(failure) from None
        except Exception as error:  # noqa: BLE001  raised as a failure of this sample
            own = error.__traceback__.tb_next.tb_next  # without the frames here
            raise _reward_error("".join(traceback.format_exception(type(error), error, own)).strip()) from None
        try:
            return checked_reward(value, FLAG)
        except ValueError as error:
            raise _reward_error(str(error)) from None

    def _unheard(self, call: asyncio.Task) -> None:
        error = call.exception()
        if error is None:
            try:
                _reward(call.result())
            except SampleFailure as failure:
                return self.late(failure)
        return self.late(None if error is None else _failure(error))


async def _thread() -> ThreadWorker:
    return ThreadWorker("rollout-reward")


def _reward(answer: dict[str, Any]) -> float:
    if "error" in answer:
        raise _reward_error(answer["error"])
    return answer["value"]


def _reward_error(text: str) -> SampleFailure:
    return SampleFailure("reward_error", text if text.startswith(FLAG) else f"{FLAG} failed:\n{text}")


def _failure(error: BaseException) -> SampleFailure:
    cause = "reward_timeout" if isinstance(error, CallTimeout) else "reward_error"
    return SampleFailure(cause, f"{FLAG}: {error}")
