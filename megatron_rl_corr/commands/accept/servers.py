"""The run's servers, asked by the command itself: which weights pushes left, and how much memory they take.

At learning rate 0 a push sends the checkpoint's own weights. A server that then loads its folder again, with
its own loader, must hold the same: that needs no table of names, and finds what trainer and push have wrong
together.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl_corr.commands.accept.judgement import TrialNumber
from megatron_rl_corr.commands.accept.trial import CHECKPOINT, value_of, values_of
from megatron_rl_corr.engines.errors import RolloutError, RolloutServerError
from megatron_rl_corr.engines.types import UnsupportedByEngine
from megatron_rl_corr.models.hf_checkpoint import read_model
from megatron_rl_corr.rollout import RolloutClient
from megatron_rl_corr.tables import readable

SERVERS = "servers"
"""What the page has in the place of a trial's name."""
CONNECT_S = 10.0
NOT_THE_CHECKPOINTS = "weights that are not the checkpoint's after the pushes"
SHOWN = 8
"""Parameters that a row names."""
HALF = {"--bf16": "bfloat16", "--fp16": "float16"}


@dataclass(frozen=True)
class Served:
    """What a server said before the trials."""

    path: str | None
    """The folder that it was started with; None: it does not tell."""
    version: str
    """The name of its weights."""
    engine: str
    release: str
    """The engine's."""


def served_before(words: Sequence[str]) -> dict[str, Served] | str:
    """Address -> what each server has; the reason, where one does not answer.

    Args:
        words: the run's command line.
    """

    async def ask(client: RolloutClient) -> dict[str, Served]:
        infos, models = await client.server_info(), await client.model_info()
        found = {}
        for url, info, model in zip(client.base_urls, infos, models, strict=True):
            engine = client.engine_of(url)
            found[url] = Served(
                engine.served_model(model, info).path,
                engine.weight_version(model),
                client.fleet.name_of(url),
                str(info.get("version", "of an unknown release")),
            )
        return found

    return _asked(words, ask)


def server_rows(words: Sequence[str], before: Mapping[str, Served] | str) -> list[TrialNumber]:
    """The rows of the servers after all trials; they have their folder's weights then.

    Args:
        words: the run's command line.
        before: of `served_before`.
    """
    if isinstance(before, str):
        return [_not_compared(before)]

    async def ask(client: RolloutClient) -> list[TrialNumber]:
        infos = await client.server_info()
        rows = []
        for url in client.base_urls:
            engine = client.engine_of(url)
            try:
                memory = engine.memory_in_use(await client.ask(url, engine.memory_report()))
            except RolloutServerError:  # an older one
                continue
            if memory:
                told = ", ".join(f"{name} {readable(gib)} GiB" for name, gib in memory.items())
                rows.append(TrialNumber(SERVERS, f"memory of {url}", told, "-", True))
        types = {client.engine_of(url).dtype(one) for url, one in zip(client.base_urls, infos, strict=True)}
        quantised = any(
            client.engine_of(url).is_quantized(one) for url, one in zip(client.base_urls, infos, strict=True)
        )
        reason = "they hold quantised weights" if quantised else rounding_of(words, types)
        return [*rows, _not_compared(reason) if reason else await _compared(client, before)]

    found = _asked(words, ask)
    return [_not_compared(found)] if isinstance(found, str) else found


def where(rows: Sequence[TrialNumber]) -> list[str]:
    """Which side a mismatch is on, by the servers' weights, as notes: [] where nothing failed or they are not
    known.
    """
    [compared] = [row for row in rows if row.what == NOT_THE_CHECKPOINTS]
    if not compared.passed:
        return [
            f"{SERVERS}: the push is wrong, or its weights are not the checkpoint's: servers held others "
            "than those that they load from their folder themselves"
        ]
    if compared.bar == "-" or all(row.passed for row in rows):
        return []
    return [
        f"{SERVERS}: the pushes are right, as servers held the weights of their folder: what is named above "
        "is in the trainer (its flags, or where its weights were loaded to), or in how servers compute"
    ]


async def _compared(client: RolloutClient, before: Mapping[str, Served]) -> TrialNumber:
    if {*client.base_urls} != {*before}:
        return _not_compared("there are other servers than before the trials")
    if any(one.path is None for one in before.values()):
        return _not_compared("a server does not tell its folder")
    versions = await client.reported_versions()
    names = zip(client.base_urls, versions, strict=True)
    if any(version in (None, before[url].version) for url, version in names):
        return _not_compared("a server was not pushed to")
    pushed = await _parameters(client)
    for url, one in before.items():
        control = client.over([url])
        await control.update_weights_from_disk(one.path)
        await control.update_weight_version(one.version)
        await control.flush_cache()
    loaded = await _parameters(client)
    # `.get`: a parameter of one of them alone is not the other's
    wrong = sorted(
        {key[-1] for key in {*pushed, *loaded} if pushed.get(key) != loaded.get(key)}, key=_by_number
    )
    every = len({key[-1] for key in loaded})
    told = f"{len(wrong)} of {every}" + (f": {', '.join(wrong[:SHOWN])}" if wrong else "")
    told += ", ..." if len(wrong) > SHOWN else ""
    return TrialNumber(SERVERS, NOT_THE_CHECKPOINTS, told, "0", not wrong)


async def _parameters(client: RolloutClient) -> dict[tuple[str, int, str], str]:
    """(address, place of the rank, parameter) -> checksum."""
    answers, infos = await client.weights_checker(), await client.server_info()
    return {
        (url, rank, name): checksum
        for url, info, answer in zip(client.base_urls, infos, answers, strict=True)
        for rank, (_, sums) in enumerate(client.engine_of(url).checksums(url, info, answer).ranks)
        for name, checksum in sums.items()
    }


def _by_number(name: str) -> list[tuple[int, str]]:
    """Layer 10 behind layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def rounding_of(words: Sequence[str], served: set[str]) -> str | None:
    """Why servers hold other numbers than the checkpoint after a right push; None: they do not.

    Args:
        words: the run's command line.
        served: number types that the servers compute in.
    """
    kind = value_of("--rollout-push-rounding", words)
    if kind not in (None, "none"):
        return f"--rollout-push-rounding {kind}"
    config = read_model(str(value_of(CHECKPOINT, words)))
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    trained = next((name for flag, name in HALF.items() if flag in words), "float32")
    if trained in ("float32", stored) or served == {trained}:
        return None
    return f"the trainer rounds {stored} to {trained}, and servers hold {', '.join(sorted(served))}"


def _not_compared(reason: str) -> TrialNumber:
    return TrialNumber(SERVERS, NOT_THE_CHECKPOINTS, f"not compared: {reason}", "-", True)


def _asked[Found](words: Sequence[str], ask: Callable[[RolloutClient], Awaitable[Found]]) -> Found | str:
    """The answer; the reason, where servers give none."""

    async def inner() -> Found:
        key = value_of("--rollout-api-key-env", words)
        client = RolloutClient(
            values_of("--rollout-url", words),
            vocab_size=int(read_model(str(value_of(CHECKPOINT, words)))["vocab_size"]),
            engine=value_of("--rollout-engine", words) or "auto",
            connect_timeout_s=CONNECT_S,
            api_key=None if key is None else os.environ.get(key),
            ca_file=value_of("--rollout-ca-file", words),
        )
        async with client:
            await client.find_servers(CONNECT_S)
            return await ask(client)

    try:
        return asyncio.run(inner())
    except (RolloutError, UnsupportedByEngine) as error:
        return str(error)
