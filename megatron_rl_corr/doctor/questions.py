"""The questions that change nothing at a server: a few rounds of short requests."""

import asyncio
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.doctor import judgements
from megatron_rl_corr.doctor.distances import distance, grid_step
from megatron_rl_corr.doctor.findings import Examination, Finding, Row, found
from megatron_rl_corr.doctor.probe import Answer, Probe, Scores
from megatron_rl_corr.engines.errors import RolloutError, RolloutServerError
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.rollout.client import RolloutClient

TOKENS = 24
MASK_TOKENS = 8
TAIL = 8


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
    """Answers that later questions use."""

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
    """The defects of a client's servers, without changing anything there.

    Sends 20 requests of at most 24 tokens to each server, most of them at once.

    Args:
        client: of the servers.
        expected: what the run needs; None: any temperature, no truncation, no routed experts.
        timeout_s: limit of one request.

    Raises:
        RolloutError: a server could not be asked.
    """
    expected = expected or Expected()
    probes = [Probe(client, url, timeout_s) for url in client.base_urls]
    asked = await asyncio.gather(*[ask_quick(probe, expected) for probe in probes])
    findings = []
    for probe, (rows, _) in zip(probes, asked, strict=True):
        findings += Examination(probe.url, rows).findings
    same = await ask_same(probes, [facts for _, facts in asked])
    return findings + [Finding(row.defect, url, row.message, row.numbers) for url, row in same if row.defect]


async def ask_quick(probe: Probe, expected: Expected) -> tuple[list[Row], Facts]:
    """All rows of one server, and the answers that later questions use."""
    [info], [model], paths = await asyncio.gather(probe.server_info(), probe.model_info(), _paths(probe))
    rows = [
        judgements.judge_version(str(info.get("version"))),
        judgements.judge_model(model, probe.client.vocab_size),
        judgements.judge_endpoints(paths),
    ]
    fixed, tail = probe.fixed_prompt()[:-TAIL], probe.fixed_prompt()[-TAIL:]
    repeated = probe.fresh_prompt()
    plain, hot, cold, top_p, mask, first, cached, (*seeded, again) = await asyncio.gather(
        probe.generate(probe.fresh_prompt(), TOKENS, return_routed_experts=True),
        probe.generate(probe.fresh_prompt(), TOKENS, temperature=judgements.HOT),
        probe.generate(probe.fresh_prompt(), TOKENS, temperature=judgements.COLD),
        probe.generate(probe.fresh_prompt(), TOKENS, top_p=judgements.TOP_P),
        _mask(probe),
        probe.generate(repeated, TOKENS, temperature=0.0),
        probe.score(fixed, tail, cached=True),
        _seeded(probe, [*judgements.SEEDS, judgements.SEEDS[0]]),
    )
    scores: list[Scores] = await asyncio.gather(
        *[probe.score(answer.prompt, answer.output) for answer in (plain, hot, top_p)],
        probe.score(fixed, tail),
    )
    second = await probe.generate(repeated, TOKENS, temperature=0.0)
    dtype, step = str(info.get("dtype")), grid_step((plain.top[:, :1] - plain.top[:, 1:]).ravel())
    half = judgements.is_half(dtype, step, bool(info.get("enable_fp32_lm_head")))
    tokens = len(plain.prompt) + len(plain.output)
    rows += [
        judgements.judge_temperature(hot, scores[1], cold, expected.temperature_matters),
        judgements.judge_top_p(top_p, scores[2], half),
        judgements.judge_mask(mask, expected.truncated),
        judgements.judge_seeds(seeded, again),
        judgements.judge_precision(dtype, step, expected.dtype),
        judgements.judge_decode(plain, scores[0], half),
        judgements.judge_repeats(first, second, half),
        judgements.judge_cache(cached, scores[3], half),
        judgements.judge_routes(
            plain.meta.get("routed_experts"), tokens, expected.experts, expected.routed_experts
        ),
    ]
    return rows, Facts(info, model, half, plain)


async def ask_same(probes: list[Probe], facts: list[Facts]) -> list[tuple[str, Row]]:
    """Compare the servers' log-probs of the first server's sample: (server, row) for all but the first."""
    sample = facts[0].plain
    scores = await asyncio.gather(*[probe.score(sample.prompt, sample.output) for probe in probes])
    rows = []
    for probe, own, score in list(zip(probes, facts, scores, strict=True))[1:]:
        far = distance(scores[0].logprobs, score.logprobs)
        message = f"the same tokens as {probes[0].url}: {far}"
        if far.is_rounding(facts[0].half or own.half):
            rows.append((probe.url, Row("servers", "ok", message, far.numbers())))
        else:
            rows.append((probe.url, found("servers", "servers_differ", message, **far.numbers())))
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
    """One response to one prompt for each seed."""
    prompt = probe.fresh_prompt()
    return await asyncio.gather(*[probe.generate(prompt, TOKENS, seed=seed) for seed in seeds])


async def _mask(probe: Probe) -> Answer | str:
    """A response with its sampling mask, or the reason why the server refused the request."""
    try:
        return await probe.generate(
            probe.fresh_prompt(), MASK_TOKENS, top_p=judgements.MASK_TOP_P, top_k=judgements.MASK_TOP_K,
            return_sampling_mask=True, top_logprobs_num=2 * judgements.MASK_TOP_K,
        )
    except RolloutError as error:
        if isinstance(error, RolloutServerError) and error.status is None:
            raise
        return error.detail


