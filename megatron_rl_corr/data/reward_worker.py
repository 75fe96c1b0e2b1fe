"""The process that computes rewards with the user's function for `RewardProcess`, and the check of a reward.

The process imports the user's file, and neither torch nor Megatron. Messages are JSON behind their length, over a
socket that it inherits; standard output and error are the trainer's.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import inspect
import math
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable
from numbers import Real
from types import ModuleType
from typing import Any, BinaryIO

import orjson

from megatron_rl_corr.data.loading import load_with_module
from megatron_rl_corr.data.prompts import Prompt

FLAG = "`reward_function`"
DEFAULT_WORKERS = 4
"""Processes of a replica."""


def checked_reward(value: object, source: str) -> float:
    """The reward rounded to float32.

    Args:
        value: what the user's code returned.
        source: that code, for the error.

    Raises:
        ValueError: not a number, or not finite in float32.
    """
    if not isinstance(value, Real):
        raise ValueError(f"{source} must return a number, got {value!r} ({type(value).__name__})")
    try:
        reward = struct.unpack("f", struct.pack("f", float(value)))[0]
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise ValueError(f"{source} must return a number that is finite in float32, got {value!r}")
    return reward


LENGTH_BYTES = 8

PR_SET_PDEATHSIG = 1


def frame(message: dict[str, Any]) -> bytes:
    """The message as it is sent."""
    body = orjson.dumps(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """{"value": what the user's code returns} or {"error": the traceback of what it raises}, exit() included.

    A process that the code has forked, and that returns from it, ends here: two would answer over one socket.
    """
    own_pid = os.getpid()
    try:
        return {"value": call()}
    except BaseException as error:  # noqa: BLE001  the trainer counts it, and shows the traceback
        if isinstance(error, ValueError) and str(error).startswith(FLAG):  # from this package: no traceback needed
            return {"error": str(error)}
        own = error.__traceback__.tb_next  # without this frame
        return {"error": "".join(traceback.format_exception(type(error), error, own)).strip()}
    finally:
        if os.getpid() != own_pid:
            os._exit(0)


def score(function: Callable, prompt: Prompt, output_ids: list[int], finish_reason: str) -> float:
    """The reward that the function returns for a sample.

    Raises:
        ValueError: as `checked_reward`.
    """
    return checked_reward(function(prompt, output_ids, finish_reason), FLAG)


def serve(spec: str, descriptor: int, parent: int) -> None:
    """Load the function, call its file's setup() if there is one, then score samples until the trainer hangs up.

    The first message received is {"text": the file's}. The first sent is {"value": "async"} for an `async def`, which
    the trainer runs itself, else {"value": "plain"}.

    Args:
        spec: "path/to/file.py:name" or "package.module:name".
        descriptor: number of the inherited socket to the trainer.
        parent: process number of the trainer: this process ends with it.
    """
    _die_with(parent)
    os.set_inheritable(descriptor, False)  # what the function starts does not get it
    sys.stdout.reconfigure(line_buffering=True)  # a worker that is killed has shown what it printed
    with socket.socket(fileno=descriptor) as channel, channel.makefile("rb") as received:
        functions: list[Callable] = []
        begun = _received(received)
        if begun is None:
            return
        channel.sendall(frame(_prepare(spec, begun["text"], functions)))
        while functions and (job := _received(received)):
            prompt = Prompt(job["index"], job["input_ids"], job["metadata"])
            given = functions[0], prompt, job["output_ids"], job["finish_reason"]
            channel.sendall(frame(attempt(functools.partial(score, *given))))


def _received(channel: BinaryIO) -> dict[str, Any] | None:
    """The next message; None once the trainer has hung up."""
    head = channel.read(LENGTH_BYTES)
    return orjson.loads(channel.read(int.from_bytes(head, "big"))) if head else None


def _prepare(spec: str, text: str | None, functions: list[Callable]) -> dict[str, Any]:
    """The first message; a plain function is put into `functions` once all is set up."""

    def prepare() -> str:
        module, function = load_with_module(spec, FLAG, text)
        if inspect.iscoroutinefunction(function):
            return "async"
        done = set_up(module)
        if inspect.isawaitable(done):
            asyncio.run(_awaited(done))
        functions.append(function)
        return "plain"

    return attempt(prepare)


def set_up(module: ModuleType) -> Any:
    """Call the file's setup(), if there is one."""
    setup = getattr(module, "setup", None)
    return None if setup is None else setup()


async def _awaited(answer: Awaitable[Any]) -> None:
    await answer


def _die_with(parent: int) -> None:
    """End with the trainer, however it ends: the kernel kills this process when the thread that started it is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
