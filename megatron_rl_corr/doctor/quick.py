"""The questions that change nothing: a few rounds of short requests to one server."""

import asyncio
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.doctor import identity, numerics, sampling
from megatron_rl_corr.doctor.distances import distance, grid_step
from megatron_rl_corr.doctor.findings import Examination, Finding, Row, found
from megatron_rl_corr.doctor.probe import Answer, Probe, Scores
from megatron_rl_corr.engines.errors import RolloutError, RolloutServerError
from megatron_rl_corr.engines.sglang import requests
from megatron_rl_corr.engines.sglang.requests import Request
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout.client import RolloutClient

TOKENS = 24
MASK_TOKENS = 8
TAIL = 8


@dataclass(frozen=True)
class Expected:
    """What the run needs of its servers; a field left alone is not asked for."""

    sampling: SamplingParams | None = None
    """What it samples with; None: any temperature, no truncation."""
    dtype: str | None = None
    """The trainer's, as "bfloat16"."""
    routed_experts: bool = False
    """Whether it replays the routing."""
    experts: tuple[int, int, int] | None = None
    """(layers, experts of a token, experts) of its model."""

    @property
    def temperature_matters(self) -> bool:
        return self.sampling is None or self.sampling.temperature not in (0, 1)

    @property
    def truncated(self) -> bool:
        return self.sampling is not None and self.sampling.truncated


@dataclass(frozen=True)
class Facts:
    """What later checks build on."""

    info: dict[str, Any]
    """/server_info."""
    model: dict[str, Any]
    """/model_info."""
    half: bool
    """The server computes in 16 bits."""
    plain: Answer
    """Sampled at temperature 1."""


async def quick_check(
    client: RolloutClient, expected: Expected | None = None, *, timeout_s: float = 60.0
) -> list[Finding]:
    """What is wrong with the client's servers, asked without changing anything. Raises RolloutError.

    Twenty requests of at most 24 tokens to each server, most of them at once. timeout_s bounds each request.
    """
    expected = expected or Expected()
    probes = [Probe(client, url, timeout_s) for url in client.base_urls]
    asked = await asyncio.gather(*[ask_quick(probe, expected) for probe in probes])
    findings = []
    for probe, (rows, _) in zip(probes, asked, strict=True):
        findings += Examination(probe.url, rows).findings
    same = await ask_same(probes, [facts for _, facts in asked])
    return findings + [Finding(row.defect, url, row.said, row.numbers) for url, row in same if row.defect]


async def ask_quick(probe: Probe, expected: Expected) -> tuple[list[Row], Facts]:
    """All rows of one server."""
    info, model, paths = await asyncio.gather(
        probe.control(requests.server_info()), probe.control(requests.model_info()), _paths(probe)
    )
    rows = [
        identity.judge_version(str(info.get("version"))),
        identity.judge_model(model, probe.client.vocab_size),
        identity.judge_endpoints(paths),
    ]
    fixed, tail = probe.fixed_prompt()[:-TAIL], probe.fixed_prompt()[-TAIL:]
    repeated = probe.fresh_prompt()
    plain, hot, cold, top_p, mask, first, cached, (*seeded, again) = await asyncio.gather(
        probe.generate(probe.fresh_prompt(), TOKENS, return_routed_experts=True),
        probe.generate(probe.fresh_prompt(), TOKENS, temperature=sampling.HOT),
        probe.generate(probe.fresh_prompt(), TOKENS, temperature=sampling.COLD),
        probe.generate(probe.fresh_prompt(), TOKENS, top_p=sampling.TOP_P),
        _mask(probe),
        probe.generate(repeated, TOKENS, temperature=0.0),
        probe.score(fixed, tail, cached=True),
        _seeded(probe, [*sampling.SEEDS, sampling.SEEDS[0]]),
    )
    scores: list[Scores] = await asyncio.gather(
        *[probe.score(answer.prompt, answer.output) for answer in (plain, hot, top_p)],
        probe.score(fixed, tail),
    )
    second = await probe.generate(repeated, TOKENS, temperature=0.0)
    dtype, step = str(info.get("dtype")), grid_step((plain.top[:, :1] - plain.top[:, 1:]).ravel())
    half = numerics.is_half(dtype, step, bool(info.get("enable_fp32_lm_head")))
    tokens = len(plain.prompt) + len(plain.output)
    rows += [
        sampling.judge_temperature(hot, scores[1], cold, expected.temperature_matters),
        sampling.judge_top_p(top_p, scores[2], half),
        sampling.judge_mask(mask, expected.truncated),
        sampling.judge_seeds(seeded, again),
        numerics.judge_precision(dtype, step, expected.dtype),
        numerics.judge_decode(plain, scores[0], half),
        numerics.judge_repeats(first, second, half),
        numerics.judge_cache(cached, scores[3], half),
        identity.judge_routes(
            plain.meta.get("routed_experts"), tokens, expected.experts, expected.routed_experts
        ),
    ]
    return rows, Facts(info, model, half, plain)


async def ask_same(probes: list[Probe], facts: list[Facts]) -> list[tuple[str, Row]]:
    """Whether every server scores the first one's sample as the first one does: (server, row) for the others."""
    sample = facts[0].plain
    scores = await asyncio.gather(*[probe.score(sample.prompt, sample.output) for probe in probes])
    rows = []
    for probe, own, score in list(zip(probes, facts, scores, strict=True))[1:]:
        far = distance(scores[0].logprobs, score.logprobs)
        said = f"the same tokens as {probes[0].url}: {far}"
        if far.is_rounding(facts[0].half or own.half):
            rows.append((probe.url, Row("servers", "ok", said, far.numbers())))
        else:
            rows.append((probe.url, found("servers", "servers_differ", said, **far.numbers())))
    return rows


async def _paths(probe: Probe) -> list[str] | str:
    try:
        return sorted((await probe.control(Request("GET", "/openapi.json")))["paths"])
    except RolloutServerError as error:
        if error.status is None:
            raise
        return error.detail
    except KeyError:
        return "no paths in /openapi.json"


async def _seeded(probe: Probe, seeds: list[int]) -> list[Answer]:
    """One prompt with each seed."""
    prompt = probe.fresh_prompt()
    return await asyncio.gather(*[probe.generate(prompt, TOKENS, seed=seed) for seed in seeds])


async def _mask(probe: Probe) -> Answer | str:
    """The answer, or why the server refused."""
    try:
        return await probe.generate(
            probe.fresh_prompt(), MASK_TOKENS, top_p=sampling.MASK_TOP_P, top_k=sampling.MASK_TOP_K,
            return_sampling_mask=True, top_logprobs_num=2 * sampling.MASK_TOP_K,
        )
    except RolloutError as error:
        if isinstance(error, RolloutServerError) and error.status is None:
            raise
        return error.detail


