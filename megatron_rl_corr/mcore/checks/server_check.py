"""Checks at a run's start that its servers sample from the model that will be trained."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.doctor import Expected, Finding, quick_check
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.mcore.feature import FurtherSampling
from megatron_rl_corr.mcore.first_step import FirstStep, first_step_bound
from megatron_rl_corr.mcore.number_types import trains_quantized
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import StartupError, all_reduce_failure, broadcast_made
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient

REPLAYED = ("routed_experts_missing", "routed_experts_wrong")
"""Findings, asked for by a run that replays routed experts alone, without which none of its
samples can be used.
"""


@collective
def check_servers(
    kind: str,
    sampling: SamplingParams,
    client: RolloutClient,
    loop: LoopThread,
    further: Sequence[FurtherSampling] = (),
    urls: Sequence[str] | None = None,
) -> None:
    """Whether the servers can sample so, and the doctor's quick check; from rank 0, after the first push.

    A server that comes back later is asked for the same before it is sampled from. Every rank calls it.

    Args:
        kind: --rollout-server-check: off, semantic or all.
        sampling: of the run.
        client: of the servers.
        loop: the event loop of the client.
        further: what they must be able to sample beside it.
        urls: of the servers that are asked; None: all that are sampled from.

    Raises:
        StartupError: a server was started so that it can't sample so; a semantic finding, or with
            `all` any finding.
        RolloutError: a server could not be asked.
    """
    client.require_sampling([sampling, *(one.sampling for one in further)])
    error = None
    if dist.get_rank() == 0:
        try:
            error = _sampling_problem(sampling, client, loop, urls)
            for one in further:
                if error is None and (refused := _sampling_problem(one.sampling, client, loop, urls)):
                    error = StartupError(one.explain(str(refused)))
            if error is None and kind != "off":
                expected = Expected(
                    sampling, routed_experts=client.experts is not None, experts=client.experts
                )
                error = judge(loop.call(quick_check(client, expected)), kind)
        except RolloutError as failure:
            error = failure
    all_reduce_failure(error)


def _sampling_problem(
    sampling: SamplingParams, client: RolloutClient, loop: LoopThread, urls: Sequence[str] | None
) -> StartupError | None:
    try:
        client.check_sampling(sampling)  # now that it is known what the servers run
    except ValueError as refusal:
        return StartupError(str(refusal))
    problem = loop.call(client.control(urls).sampling_problem(sampling))
    return None if problem is None else StartupError(problem)


@collective
def bound_first_step(
    given: float | None,
    args: argparse.Namespace,
    client: RolloutClient,
    loop: LoopThread,
    *,
    rounded: bool = False,
) -> FirstStep:
    """The bound of the KL in the first step after this start; every rank calls it.

    Args:
        given: --rollout-max-first-step-kl; None: rank 0 derives it from the servers' dtypes.
        args: Megatron's.
        client: of the servers.
        loop: the event loop of the client.
        rounded: what is pushed is rounded by --rollout-push-rounding.

    Raises:
        RolloutError: a server could not be asked.
        UnsupportedByEngine: the servers do not tell their dtypes; give a bound.
    """

    def bound() -> float:
        if given is not None:
            return given
        servers = client.control()
        infos = loop.call(servers.server_info())
        engines = [client.engine_of(url) for url in servers.base_urls]
        coarse = rounded or trains_quantized(args)
        return first_step_bound(args.params_dtype == torch.float32, engines, infos, rounded=coarse)

    return FirstStep(args.iteration, broadcast_made(bound))


def judge(findings: list[Finding], kind: str) -> StartupError | None:
    """The error for findings that end the run, or None; the other findings are printed."""
    fatal = [one for one in findings if kind == "all" or one.kind == "semantic" or one.name in REPLAYED]
    for finding in findings:
        if finding not in fatal:
            warn(finding)
    if not fatal:
        return None
    return StartupError(
        "the servers do not sample from what would be trained: "
        + "; ".join(map(str, fatal))
        + ". Fix it, or train nevertheless with --rollout-server-check off"
    )
