"""Checks one server that would join a run, before weights are sent to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.mcore.checks.model_check import difference
from megatron_rl_corr.mcore.checks.source_check import difference_of_ids
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.quantization import BlockFP8
from megatron_rl_corr.reduce.failure import StartupError
from megatron_rl_corr.rollout.agents.agents import longest_sequence
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.weight_sync.drafts import find_drafting
from megatron_rl_corr.weight_sync.quantization import find_quantization
from megatron_rl_corr.weight_sync.transports.ipc import check_same_host
from megatron_rl_corr.weight_sync.updatable import wait_updatable

REACH_S = 5.0
"""How long a server may take to answer that it can sample; it is asked again later."""


@dataclass(frozen=True)
class FoundAtStart:
    """What the servers that the run began with have in common, and all that join must have too."""

    engines: Sequence[str]
    """Names in config/run.py ENGINES."""
    dtypes: Sequence[str]
    """What they compute in."""
    quantization: BlockFP8 | None
    drafts: bool
    """They draft with the trained layers that predict further tokens."""
    longest: int
    """Tokens of the longest sequence that each of them takes."""


async def found_at_start(
    client: RolloutClient, quantization: BlockFP8 | None, *, drafts: bool
) -> FoundAtStart:
    """What the servers of a client have, as the start has found it. Raises RolloutError."""
    infos = await client.server_info()
    dtypes = [client.engine_of(url).dtype(info) for url, info in zip(client.base_urls, infos, strict=True)]
    longest = await longest_sequence(client)
    return FoundAtStart(
        tuple(client.fleet.engines), tuple(dict.fromkeys(dtypes)), quantization, drafts, longest
    )


async def check_joining(
    client: RolloutClient,
    options: RunConfig,
    *,
    samplings: Sequence[SamplingParams],
    texts: Mapping[str, list[int]],
    found: FoundAtStart | None,
) -> Mapping[str, str]:
    """Ask a server for all that the run's own servers are asked for at the start without new weights.

    Args:
        client: of that one address.
        options: the run's.
        samplings: it must be able to sample so.
        texts: text -> the ids that the run's tokenizer makes of it.
        found: None: the run has not begun, and it may be the first one.

    Returns:
        Address -> name of the engine there.

    Raises:
        RolloutServerError: it does not answer, or can't sample yet.
        StartupError, RolloutError, ValueError: it can't be a server of this run.
    """
    (url,) = client.base_urls
    if url in [other.rstrip("/") for other in options.scoring_urls]:
        raise StartupError("it serves the reference or the teacher, which weights must not be pushed to")
    names = await client.find_servers(REACH_S)
    if tuple(names) != (url,):
        raise StartupError("it is a router; give its address itself to --rollout-servers-file")
    await wait_updatable(client, REACH_S)
    if options.weight_transport == "tensor":
        check_same_host([url])
    for sampling in samplings:
        client.check_sampling(sampling)
        if (problem := await client.control([url]).sampling_problem(sampling)) is not None:
            raise StartupError(problem)
    if options.server_check != "off":
        checkpoint = HFCheckpoint(options.hf_checkpoint)
        if (
            other := await difference(client, checkpoint, with_names=options.verify_push != "off")
        ) is not None:
            raise StartupError(f"it has another model than --rollout-hf-checkpoint: {other[1]}")
        if (error := await difference_of_ids(client, texts)) is not None:
            raise error
        # The doctor asks for this after the push, while all ranks wait, and SGLang takes seconds to make it,
        # once. A server may keep it to itself.
        with suppress(RolloutServerError):
            await client.control([url]).ask(url, client.engine_of(url).list_endpoints())
    if found is not None:
        await _check_like_others(client, url, options, found)
    return names


async def _check_like_others(
    client: RolloutClient, url: str, options: RunConfig, found: FoundAtStart
) -> None:
    engine, (info,) = client.engine_of(url), await client.server_info()
    endpoint = engine.server_info().endpoint
    if client.fleet.name_of(url) not in found.engines:
        raise RolloutProtocolError(
            url, endpoint, f"it is {engine.name}, and no server was when the run began; start the run anew"
        )
    if engine.dtype(info) not in found.dtypes:
        raise RolloutProtocolError(
            url,
            endpoint,
            f"it computes in {engine.dtype(info)}, and the servers at the start in {', '.join(found.dtypes)}",
        )
    if (longest := await longest_sequence(client)) < found.longest:
        raise RolloutProtocolError(
            url, endpoint, f"it takes sequences of {longest} tokens, and those at the start {found.longest}"
        )
    if await find_quantization(client, options.quantized_checkpoint) != found.quantization:
        raise RolloutProtocolError(url, endpoint, "its weights are quantised otherwise than at the start")
    if await find_drafting(client, found.quantization) != found.drafts:
        raise RolloutProtocolError(url, endpoint, "it drafts tokens otherwise than the servers at the start")
    if options.push == "delta" and (problem := engine.changes_problem(info)) is not None:
        raise RolloutProtocolError(url, endpoint, f"--rollout-push delta: {problem}")
