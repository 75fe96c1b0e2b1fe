"""Measures what --router-replay R3 removes of the mismatch: a microbatch with the servers' experts
and without them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.features.router_replay_effect.metrics import effect_metrics
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch.microbatch import Microbatch
from megatron_rl_corr.mcore.feature import CorrectedBatch, Feature
from megatron_rl_corr.mcore.forward import label_logprobs, make_forward_step
from megatron_rl_corr.mcore.forward_only import run_forward_only
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.reduce.metrics import Metric


class ReplayEffectFeature(Feature):
    """--router-replay-effect-every: with 10 it measures in batches 0, 10, 20 and so on."""

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        return options.router_replay_effect_every is not None

    def after_scoring(self, scored: CorrectedBatch) -> dict[str, Metric]:
        """`effect_metrics` of the batch's first microbatch under the current weights.

        With virtual pipeline stages it is the first group of microbatches, as Megatron runs no fewer. Two
        forward-only passes in evaluation mode; training does not notice: routers are reset behind each, and
        the maxima of attention logits are put back.

        Returns:
            This rank's share, on the last pipeline stage; {} on others, and for a batch that
            is not measured.
        """
        if scored.number % self.options.router_replay_effect_every:
            return {}
        forward, routes = scored.forward, scored.routes
        batch, settings = forward.batch, forward.settings

        def log_probs(micro: Microbatch, output: Tensor) -> tuple[Tensor, Tensor]:
            return label_logprobs(output, micro, settings)[0], micro.places.t().reshape(-1)

        def run(routes: Routes) -> list[tuple[Tensor, Tensor]]:
            return run_forward_only(
                make_forward_step(log_probs, settings, with_entropy=False, routes=routes),
                forward.model,
                forward.packs,
                count=compat.smallest_schedule(forward.model),
            )

        with forward.gathered(), compat.attention_logits_kept(forward.model):
            with routes.replaying():
                replayed = run(routes)
            chosen = run(Routes())  # outside of `routes`' contexts Megatron's routers choose by themselves
        if not replayed:
            return {}
        places = torch.cat([place for _, place in replayed])
        return effect_metrics(
            *(torch.cat([logprobs for logprobs, _ in results]) for results in (replayed, chosen)),
            _behind(batch.rollout_logprobs)[places],
            _behind(batch.loss_mask)[places],
        )


def _behind(values: Tensor) -> Tensor:
    """[T] -> [T + 1]: behind them a zero, of what is no token."""
    return torch.cat([values, values.new_zeros(1)])


FEATURE = ReplayEffectFeature
