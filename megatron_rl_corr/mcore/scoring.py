"""Log-probs of sampled tokens under the current weights, by Megatron's forward-only schedule.

N samples of L tokens (this context-parallel rank's of a row), b rows a microbatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.run import UPDATES_PER_BATCH
from megatron_rl_corr.mcore.batch import RolloutBatch, microbatches
from megatron_rl_corr.mcore.forward_step import make_forward_step
from megatron_rl_corr.mcore.logprobs import LogprobSettings, label_logprobs

if TYPE_CHECKING:
    from megatron_rl_corr.moe.replay import Replay


def reasons_to_score(
    config: RolloutCorrectionConfig, *, saves: bool = False, experts: bool = False, records: bool = False
) -> tuple[str, ...]:
    """What needs the whole batch's log-probs before the loss, in the user's words; with none the pass is left out.

    With one update a batch pi_old is the policy that is trained, so the loss has its log-probs anyway, and corrects
    them microbatch by microbatch. saves: --rollout-save-trajectories; experts: --expert-statistics; records:
    --router-replay R2. Bypass mode never scores.
    """
    if config.bypass_mode:
        return ()
    reasons = {
        "--rollout-rs " + ",".join(rule.name for rule in config.rollout_rs): config.rollout_rs,
        "--rollout-m2-threshold": config.rollout_m2_threshold is not None,
        "--rollout-batch-filter-kl": config.rollout_batch_filter_kl is not None,
        "--rollout-is-batch-normalize": config.rollout_is_batch_normalize,
        "--rollout-loss-denominator kept": config.loss_denominator == "kept",
        "--rollout-save-trajectories": saves,
        "--expert-statistics": experts,
        "--router-replay R2": records,
        f"{UPDATES_PER_BATCH} updates a batch": UPDATES_PER_BATCH > 1,
    }
    return tuple(reason for reason, given in reasons.items() if given)


def describe_scoring(config: RolloutCorrectionConfig, reasons: tuple[str, ...]) -> str:
    """One line for the user: whether each step scores its samples before it trains on them, and why."""
    if reasons:
        return f"scoring pass: kept for {', '.join(reasons)}"
    if config.bypass_mode:
        return "scoring pass: left out (bypass mode: pi_rollout stands in for pi_old)"
    return "scoring pass: left out (with one update a batch pi_old is the policy that is trained, known in the loss)"


@torch.no_grad()
def score(
    model: list, batch: RolloutBatch, settings: LogprobSettings, *, micro_batch_size: int, seq_length: int,
    replay: Replay | None = None,
) -> tuple[Tensor, Tensor] | None:
    """(log-probs, entropies), each [N * L] float32, on the last pipeline stage; None on the others.

    seq_length is that of whole rows. The model is in evaluation mode meanwhile (no dropout), and back in training mode
    after. replay: within its `scoring`.
    """
    rows = len(batch.tokens)
    forward_step = make_forward_step(
        lambda micro, output: label_logprobs(output, micro, settings, with_entropy=True), settings, with_entropy=True,
        replay=replay,
    )
    iterators = [microbatches(batch, micro_batch_size) for _ in model]
    for chunk in model:
        chunk.eval()
    try:
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=model,
            num_microbatches=rows // micro_batch_size,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=True,
            collect_non_loss_data=True,
        )
    finally:
        for chunk in model:
            chunk.train()
    if not results:
        return None
    return torch.cat([logprobs for logprobs, _ in results]), torch.cat([entropy for _, entropy in results])
