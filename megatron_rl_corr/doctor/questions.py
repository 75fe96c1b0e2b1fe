"""The questions that change nothing at a server: a few rounds of short requests."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.doctor import distribution, judgements
from megatron_rl_corr.doctor.distances import grid_step
from megatron_rl_corr.doctor.findings import Finding, Row, found
from megatron_rl_corr.doctor.probe import NotAnswered, Probe, attempt, if_supported, known, row_of
from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.inspection import DetailedSample, ServedModel, TokenScores, UpdateSupport
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.models.quantization import BlockFP8
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.weight_sync.quantization import served_quantization

TOKENS = 24
MASK_TOKENS = 8
CACHED_TOKENS = 8


@dataclass(frozen=True)
class Expected:
    """What a run needs of its servers; a default needs nothing."""

    sampling: SamplingParams | None = None
    """Its sampling parameters; None: any temperature, no truncation."""
    dtype: str | None = None
    """The trainer's, for instance "bfloat16"."""
    routed_experts: bool = False
    """The run replays routed experts."""
    experts: ExpertShape | None = None
    """How its model routes; None: unknown, or dense."""

    @property
    def temperature_matters(self) -> bool:
        return self.sampling is None or self.sampling.temperature not in (0, 1)

    @property
    def truncated(self) -> bool:
        return self.sampling is not None and self.sampling.truncated


@dataclass(frozen=True)
class Facts:
    """Answers that later questions use, each of them as `if_supported` returns it."""

    info: dict[str, Any] | NotAnswered
    """As `Engine.server_info` brings it."""
    model: ServedModel | NotAnswered
    half: bool | NotAnswered
    """The server computes in 16 bits."""
    plain: DetailedSample | NotAnswered
    """Sampled at temperature 1."""


async def quick_check(
    client: RolloutClient, expected: Expected | None = None, *, timeout_s: float = 60.0
) -> list[Finding]:
    """The defects of a client's servers, without changing anything there.

    Sends 20 requests of at most 24 tokens to each server, at most 7 at once. Questions that the engine does
    not support are named on stderr, and so is a version that was not tested or can't do everything.

    Args:
        client: of the servers.
        expected: what the run needs; None: any temperature, no truncation, no routed experts.
        timeout_s: limit of one request.

    Raises:
        RolloutError: a server could not be asked.
    """
    expected = expected or Expected()
    for url in client.left_out:
        warn(f"{url}: it is not sampled from now, and not checked")
    probes = [Probe(client, url, timeout_s) for url in client.control().base_urls]
    asked = await asyncio.gather(*[ask_quick(probe, expected) for probe in probes])
    rows = [(probe.url, row) for probe, (own, _) in zip(probes, asked, strict=True) for row in own]
    remedies = {probe.url: probe.engine.remedies for probe in probes}
    rows += await ask_same(probes, [facts for _, facts in asked])
    for url, row in rows:
        if row.status == "failed":
            warn(f"{url}: {row.check} is not checked: {row.message}")
        elif (row.check, row.status) == ("version", "note"):
            warn(f"{url}: {row.message}")
    return [row.finding(url, remedies[url]) for url, row in rows if row.defect]


async def ask_quick(probe: Probe, expected: Expected) -> tuple[list[Row], Facts]:
    """Ask one server everything that changes nothing.

    Args:
        probe: of the server.
        expected: what the run needs.

    Returns:
        All rows, failed ones where the engine does not support the question, and answers that
        later questions use.

    Raises:
        RolloutError: the server could not be asked.
    """
    engine, vocab_size = probe.engine, probe.client.vocab_size
    info = await if_supported(probe.info())
    model, updates = await asyncio.gather(if_supported(probe.served_model()), if_supported(_updates(probe)))
    fixed = attempt(probe.fixed_prompt, await if_supported(probe.cacheable()))
    cold_at = max(distribution.COLD, engine.limits.min_temperature)
    repeated = probe.fresh_prompt()
    plain, hot, cold, top_p, mask, first, cached = await asyncio.gather(
        *map(
            if_supported,
            [
                probe.generate(probe.fresh_prompt(), TOKENS, routed_experts=True, experts=expected.experts),
                probe.generate(probe.fresh_prompt(), TOKENS, temperature=distribution.HOT),
                probe.generate(probe.fresh_prompt(), TOKENS, temperature=cold_at),
                probe.generate(probe.fresh_prompt(), TOKENS, top_p=distribution.TOP_P),
                _mask(probe),
                probe.generate(repeated, TOKENS, temperature=0.0),
                _greedy(probe, fixed),
            ],
        )
    )
    plain_scores, hot_scores, top_p_scores, fixed_scores = await asyncio.gather(
        *map(
            if_supported,
            [
                _scored(probe, plain),
                _scored(probe, hot),
                _scored(probe, top_p),
                _scored(probe, cached),
            ],
        )
    )
    second = await if_supported(probe.generate(repeated, TOKENS, temperature=0.0))
    # By themselves: SGLang draws a whole batch by rank and not by id once a truncated or greedy
    # request has joined it.
    seeded = await if_supported(_seeded(probe, [*distribution.SEEDS, distribution.SEEDS[0]]))
    dtype, step, float32_head = (
        attempt(engine.dtype, info),
        attempt(_grid_step, plain),
        attempt(engine.has_float32_head, info),
    )
    half = attempt(judgements.is_half, dtype, step, float32_head)
    rows = [
        row_of(
            "version", lambda info: judgements.judge_version(engine.name, engine.version_support(info)), info
        ),
        row_of("model", lambda model: judgements.judge_model(model, vocab_size), model),
        row_of(
            "weight updates", judgements.judge_updates, updates, attempt(_quantization(engine), info, model)
        ),
        row_of(
            "temperature",
            distribution.judge_temperature,
            hot,
            hot_scores,
            cold,
            cold_at,
            expected.temperature_matters,
        ),
        row_of(
            "top-p",
            distribution.judge_top_p_kept if engine.renormalises else distribution.judge_top_p,
            top_p,
            top_p_scores,
            half,
            expected.truncated,
        ),
        row_of("sampling mask", distribution.judge_mask, mask, expected.truncated),
        row_of("seeds", lambda seeded: distribution.judge_seeds(seeded[:-1], seeded[-1]), seeded),
        row_of("precision", judgements.judge_precision, dtype, step, expected.dtype),
        row_of("decode and prefill", judgements.judge_decode, plain, plain_scores, half),
        row_of("repeats", judgements.judge_repeats, first, second, half),
        row_of("prefix cache", judgements.judge_cache, cached, fixed_scores, half),
        routes_row(plain, attempt(engine.routes_problem, info), expected),
    ]
    return rows, Facts(info, model, half, plain)


def routes_row(
    plain: DetailedSample | NotAnswered, problem: str | NotAnswered | None, expected: Expected
) -> Row:
    """What the server says of itself comes first: a new prompt has all its routes where others lack some."""
    if isinstance(problem, str):
        return found("routed experts", "routed_experts_wrong", problem)
    return row_of("routed experts", judgements.judge_routes, plain, expected.experts, expected.routed_experts)


async def ask_same(probes: list[Probe], facts: list[Facts]) -> list[tuple[str, Row]]:
    """Compare the servers' log-probs of the first server's sample.

    Args:
        probes: of S servers.
        facts: of each, from `ask_quick`.

    Returns:
        (server, row) for all servers but the first.

    Raises:
        RolloutError: a server could not be asked.
    """
    scores = await asyncio.gather(*[if_supported(_scored(probe, facts[0].plain)) for probe in probes])
    rows = []
    for probe, own, score in list(zip(probes, facts, scores, strict=True))[1:]:
        half = attempt(lambda *halves: any(halves), facts[0].half, own.half)
        rows.append(
            (probe.url, row_of("servers", judgements.judge_same, probes[0].url, scores[0], score, half))
        )
    return rows


async def _updates(probe: Probe) -> UpdateSupport | str:
    """How weights can be updated, or why the server does not list its endpoints."""
    try:
        answer = await probe.control(probe.engine.list_endpoints())
    except RolloutServerError as error:
        if error.status is None:
            raise
        return error.detail
    try:
        return probe.engine.update_support(probe.url, answer, await probe.info())
    except RolloutProtocolError as error:
        return error.detail


def _quantization(engine: Engine) -> Callable[[dict[str, Any], ServedModel], BlockFP8 | str | None]:
    """From a server's answers to how it has its weights, or why no push can send them so."""

    def judged(info: dict[str, Any], model: ServedModel) -> BlockFP8 | str | None:
        try:
            return served_quantization(engine, info, model)
        except ValueError as error:
            return str(error)

    return judged


async def _scored(probe: Probe, sample: DetailedSample | NotAnswered) -> TokenScores:
    """The server's scores of a sample's tokens."""
    sample = known(sample)
    return await probe.score(sample.prompt, sample.output)


async def _greedy(probe: Probe, prompt: list[int] | NotAnswered) -> DetailedSample:
    """A few greedy tokens after a prompt, on its cached keys and values, if there are any."""
    return await probe.generate(known(prompt), CACHED_TOKENS, temperature=0.0)


async def _seeded(probe: Probe, seeds: list[int]) -> list[DetailedSample]:
    """One response to one prompt for each seed."""
    prompt = probe.fresh_prompt()
    return await asyncio.gather(*[probe.generate(prompt, TOKENS, seed=seed) for seed in seeds])


async def _mask(probe: Probe) -> DetailedSample | str:
    """A response with its sampling mask, or the reason why the server refused the request."""
    try:
        return await probe.generate(
            probe.fresh_prompt(),
            MASK_TOKENS,
            top_p=distribution.MASK_TOP_P,
            top_k=distribution.MASK_TOP_K,
            likeliest=2 * distribution.MASK_TOP_K,
            sampling_mask=True,
        )
    except RolloutError as error:
        if isinstance(error, RolloutServerError) and error.status is None:
            raise
        return error.detail


def _grid_step(sample: DetailedSample) -> float | None:
    return grid_step((sample.top[:, :1] - sample.top[:, 1:]).ravel())
