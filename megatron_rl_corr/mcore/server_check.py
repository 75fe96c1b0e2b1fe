"""Correctness before corrections: a run asks its servers whether they sample from what it will train on."""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist

from megatron_rl_corr.doctor import Expected, Finding, quick_check
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.mcore.first_step import FirstStep, first_step_bound
from megatron_rl_corr.parallel.failure import StartupError, all_reduce_failure
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient


def check_servers(kind: str, sampling: SamplingParams, client: RolloutClient, loop: LoopThread) -> None:
    """Ask them, from rank 0, with the first weights pushed; every rank calls it.

    kind is --rollout-server-check's. Raises StartupError for a semantic finding, or with `all` for any.
    """
    error = None
    if kind != "off" and dist.get_rank() == 0:
        try:
            error = judge(loop.call(quick_check(client, Expected(sampling=sampling))), kind)
        except RolloutError as failure:
            error = failure
    all_reduce_failure(error)


def broadcast_first_step(
    given: float | None, args: argparse.Namespace, client: RolloutClient, loop: LoopThread
) -> FirstStep:
    """The bound of the KL in the first step of this start; every rank calls it.

    given is --rollout-max-first-step-kl; without it rank 0 asks the servers for the types of their numbers. args are
    Megatron's.
    """
    bound, error = [given], None
    if given is None and dist.get_rank() == 0:
        try:
            bound = [first_step_bound(args.params_dtype == torch.float32, loop.call(client.server_info()))]
        except RolloutError as failure:
            error = failure
    all_reduce_failure(error)
    dist.broadcast_object_list(bound, src=0)
    return FirstStep(args.iteration, bound[0])


def judge(findings: list[Finding], kind: str) -> StartupError | None:
    """The error that ends the run, if one of the findings must; the others are printed."""
    fatal = [finding for finding in findings if kind == "all" or finding.kind == "semantic"]
    for finding in findings:
        if finding not in fatal:
            print(f"[rollout] {finding}", file=sys.stderr, flush=True)
    if not fatal:
        return None
    return StartupError(
        "the servers do not sample from what would be trained: " + "; ".join(map(str, fatal))
        + ". Mend it, or train in spite of it with --rollout-server-check off"
    )
