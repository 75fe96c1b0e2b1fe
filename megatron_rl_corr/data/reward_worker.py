"""The process that computes rewards with the user's functions for `RewardProcess`.

The process imports the users' files, and neither numpy nor torch nor Megatron. Messages are JSON behind
their length, over a socket that it inherits; standard output and error are the trainer's.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import os
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, BinaryIO

from megatron_rl_corr.config.reward_specs import RewardSpec
from megatron_rl_corr.data import json_text
from megatron_rl_corr.data.builtin_rewards import builtin_reward
from megatron_rl_corr.data.loading import load_with_module
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.reward_input import Form, RewardInput, form_of
from megatron_rl_corr.data.reward_value import checked_group, checked_parts

FLAG = "`reward_function`"
LENGTH_BYTES = 8

PR_SET_PDEATHSIG = 1


def frame(message: dict[str, Any]) -> bytes:
    """The message as it is sent."""
    body = json_text.dumps(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """{"value": what the user's code returns} or {"error": the traceback of what it raises}, exit() included.

    A process that the code has forked, and that returns from it, ends here: two would answer over one socket.
    """
    own_pid = os.getpid()
    try:
        return {"value": call()}
    except BaseException as error:  # noqa: BLE001  the trainer counts it, and shows the traceback
        # from this package: no traceback needed
        if isinstance(error, ValueError) and str(error).startswith(FLAG):
            return {"error": str(error)}
        own = error.__traceback__.tb_next  # without this frame
        return {"error": "".join(traceback.format_exception(type(error), error, own)).strip()}
    finally:
        if os.getpid() != own_pid:
            os._exit(0)


@dataclass(frozen=True)
class LoadedReward:
    """A reward function, its own or a built-in one."""

    spec: RewardSpec
    form: Form
    function: Callable
    module: ModuleType | None = None
    """Its file; None for a built-in one."""

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def source(self) -> str:
        """What it is called in errors."""
        return f"{FLAG} {self.spec.source}"

    def call(self, samples: Sequence[RewardInput]) -> Any:
        """What the function returns: for one sample, or for a whole group where that is its form."""
        if self.form == "group":
            return self.function(tuple(samples))  # a list sorted in place would give rewards to other samples
        [sample] = samples
        if self.form == "sample":
            return self.function(sample)
        prompt = Prompt(
            sample.row, sample.prompt_ids, sample.metadata, vars(sample).get("prompt"), sample.label
        )
        return self.function(prompt, sample.output_ids, sample.finish_reason)

    def checked(self, value: Any, count: int) -> list[dict[str, float]]:
        """What it returned for `count` samples as named numbers, by sample. Raises ValueError as
        `checked_group`.
        """
        if self.form == "group":
            return checked_group(value, count, self.spec.name, self.source)
        return [checked_parts(value, self.spec.name, self.source)]

    def label_problems(self, labels: Sequence[list[str]]) -> list[str | None]:
        """Why each label, of one or several texts, can't be read; None where it can. Of a built-in reward."""
        return [self.function.label_problem(label) for label in labels]

    def score(self, samples: Sequence[RewardInput]) -> list[dict[str, float]]:
        """`call`, `checked`."""
        return self.checked(self.call(samples), len(samples))


def load_rewards(specs: Sequence[RewardSpec], texts: Sequence[str | None]) -> list[LoadedReward]:
    """The functions of the specs; a file that several name is run once.

    Args:
        specs: functions and built-in rewards.
        texts: the text of each one's file, as `source_of` read it.

    Raises:
        ValueError: a function can't be found, or has a signature of no form.
        Exception: what the user's own file raises.
    """
    found, modules = [], {}
    for spec, text in zip(specs, texts, strict=True):
        if spec.kind == "builtin":
            found.append(LoadedReward(spec, "sample", builtin_reward(spec)))
            continue
        module, function = load_with_module(spec.source, FLAG, text, modules)
        found.append(LoadedReward(spec, form_of(function, f"{FLAG} {spec.source}"), function, module))
    return found


def serve(descriptor: int, parent: int) -> None:
    """Load the functions, call their files' setup() if there is one, then score samples until the
    trainer hangs up.

    The first message received is {"specs": [...], "texts": [the files']}. The first sent is {"value": [[form,
    whether it is async], ...]}; the trainer runs async functions itself. Then {"function": its number,
    "samples": [...]} is answered by {"value": [named numbers of each sample]} or {"error": a traceback}; with
    "labels" in the place of "samples" by what `label_problems` says.

    Args:
        descriptor: number of the inherited socket to the trainer.
        parent: process number of the trainer: this process ends with it.
    """
    _die_with(parent)
    os.set_inheritable(descriptor, False)  # what the function starts does not get it
    sys.stdout.reconfigure(line_buffering=True)  # a worker that is killed has shown what it printed
    with socket.socket(fileno=descriptor) as channel, channel.makefile("rb") as received:
        functions: list[LoadedReward] = []
        begun = _received(received)
        if begun is None:
            return
        channel.sendall(
            frame(_prepare([RewardSpec(**spec) for spec in begun["specs"]], begun["texts"], functions))
        )
        while functions and (job := _received(received)):
            function = functions[job["function"]]
            if "labels" in job:
                channel.sendall(frame(attempt(functools.partial(function.label_problems, job["labels"]))))
                continue
            samples = [
                RewardInput(**{"prompt": None, "response": None, **sample}) for sample in job["samples"]
            ]
            channel.sendall(frame(attempt(functools.partial(function.score, samples))))


def first_message(specs: Sequence[RewardSpec], texts: Sequence[str | None]) -> dict[str, Any]:
    """What `serve` begins with."""
    return {"specs": [asdict(spec) for spec in specs], "texts": list(texts)}


def _received(channel: BinaryIO) -> dict[str, Any] | None:
    """The next message; None once the trainer has hung up."""
    head = channel.read(LENGTH_BYTES)
    return json_text.loads(channel.read(int.from_bytes(head, "big")), unique_keys=False) if head else None


def _prepare(
    specs: list[RewardSpec], texts: list[str | None], functions: list[LoadedReward]
) -> dict[str, Any]:
    """The first answer; `functions` is filled once all is set up."""

    def prepare() -> list[tuple[str, bool]]:
        loaded = load_rewards(specs, texts)
        for done in set_up([one for one in loaded if not one.is_async]):
            asyncio.run(_awaited(done))
        functions.extend(loaded)
        return [(one.form, one.is_async) for one in loaded]

    return attempt(prepare)


def set_up(loaded: Sequence[LoadedReward]) -> list[Awaitable]:
    """Call the setup() of each file that has one, once. Returns what is still to be awaited."""
    modules = {id(one.module): one.module for one in loaded if one.module is not None}
    setups = [module.setup for module in modules.values() if hasattr(module, "setup")]
    return [done for setup in setups if inspect.isawaitable(done := setup())]


async def _awaited(answer: Awaitable[Any]) -> None:
    await answer


def _die_with(parent: int) -> None:
    """End with the trainer, however it ends: the kernel kills this process when the thread that
    started it is gone.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
