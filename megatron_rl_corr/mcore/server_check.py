"""Correctness before corrections: a run asks its servers whether they sample from what it will train on."""

from __future__ import annotations

import sys

import torch.distributed as dist

from megatron_rl_corr.mcore.refusal import Refusal
from megatron_rl_corr.parallel.failure import all_reduce_failure
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.doctor import Expected, Finding, quick_check
from megatron_rl_corr.rollout.errors import RolloutError
from megatron_rl_corr.rollout.trajectory import SamplingParams


def check_servers(kind: str, sampling: SamplingParams, client: RolloutClient, loop: LoopThread) -> None:
    """Ask them, from rank 0, with the first weights pushed; every rank calls it.

    kind is --rollout-server-check's. Raises Refusal for a semantic finding, or with `all` for any.
    """
    error = None
    if kind != "off" and dist.get_rank() == 0:
        try:
            error = judge(loop.call(quick_check(client, Expected(sampling=sampling))), kind)
        except RolloutError as failure:
            error = failure
    all_reduce_failure(error)


def judge(findings: list[Finding], kind: str) -> Refusal | None:
    """The error that ends the run, if one of the findings must; the others are printed."""
    fatal = [finding for finding in findings if kind == "all" or finding.kind == "semantic"]
    for finding in findings:
        if finding not in fatal:
            print(f"[rollout] {finding}", file=sys.stderr, flush=True)
    if not fatal:
        return None
    return Refusal(
        "the servers do not sample from what would be trained: " + "; ".join(map(str, fatal))
        + ". Mend it, or train in spite of it with --rollout-server-check off"
    )
