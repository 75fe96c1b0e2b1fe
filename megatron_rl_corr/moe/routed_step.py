"""One step's routes: replayed in its passes, held against Megatron's own before an update, and told as metrics.

N samples of this replica, L = --seq-length, M layers with experts of this rank, H layers of the model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.core.metrics import Mean, Metric
from megatron_rl_corr.mcore.batch import RolloutBatch
from megatron_rl_corr.moe.agreement import (
    GATES_APART,
    OVERLAP,
    SAME_SET,
    TOKENS,
    RouteAgreement,
    RoutesRefused,
    judge,
)
from megatron_rl_corr.moe.scatter import local_positions
from megatron_rl_corr.parallel.failure import all_reduce_failure
from megatron_rl_corr.parallel.gather import all_gather_stacked
from megatron_rl_corr.parallel.layout import Layout

if TYPE_CHECKING:
    from megatron_rl_corr.moe.replay import Replay


class RoutedStep:
    """What --router-replay does in one step; with `replay` None, nothing.

    The server's routes are compared in the first pass that replays them: the one for old log-probs, or in bypass mode
    (observe_training) the training pass, whose update then waits for `all_reduce_check`.
    """

    def __init__(
        self, replay: Replay | None, batch: RolloutBatch, layout: Layout, *, sequence_parallel: bool, length: int,
        observe_training: bool,
    ):
        self.replay, self._routes, self._layout = replay, batch.routes, layout
        self._in_training, self._agreement, self._rows = observe_training, None, len(batch.tokens)
        self._tokens_apart = None
        if self._routes is not None:
            tp = (layout.tp_group.rank(), layout.tp_group.size()) if sequence_parallel else (0, 1)
            positions = local_positions(length, (layout.cp_group.rank(), layout.cp_size), tp).to(batch.tokens.device)
            layers, experts = len(replay.layers), replay.shape.experts
            self._tokens_apart = layout.tp_cp_group if sequence_parallel else layout.cp_group
            self._agreement = RouteAgreement(
                len(batch.tokens), layers, experts, positions, softmax=replay.softmax, parts=self._tokens_apart.size()
            )

    def scoring(self) -> AbstractContextManager:
        """Around the pass for old log-probs."""
        if self.replay is None:
            return nullcontext()
        observe = self._agreement and self._agreement.observe
        return self.replay.scoring(self._routes, observe, rows=self._rows)

    def training(self) -> AbstractContextManager:
        """Around Megatron's train step."""
        if self.replay is None:
            return nullcontext()
        observe = self._agreement.observe if self._agreement and self._in_training else None
        return self.replay.training(self._routes, observe)

    def all_reduce_check(self, minimum: float | None, *, step: int, group_size: int) -> None:
        """Between the pass that compared and the update: RoutesRefused on every rank's behalf, by one that found why.

        Every rank calls it; with routes of servers, one exchange of what was counted over the ranks that hold other
        tokens of the same rows, and one of whether anybody refuses.
        """
        if self._agreement is None:
            return
        self._agreement.all_reduce(self._tokens_apart)
        found = judge(self._agreement, self.replay.layers, self.replay.shape.top_k, minimum)
        error = None
        if found is not None:
            prompt, sample = divmod(found[0], group_size)
            error = RoutesRefused(
                f"routed_experts of sample {sample} of prompt {prompt} of replica {self._layout.dp_rank} in step "
                f"{step + 1} are not those of its tokens, so nothing was trained on them: {found[1]}"
            )
        all_reduce_failure(error)

    def all_gather_disagreement(self) -> Tensor | None:
        """[N, columns of this context-parallel rank]: share of each token's experts that only the server chose.

        Every rank calls it, where a rule looks at it: one exchange over tensor ranks that hold other tokens, and one
        over the pipeline, which holds other layers.
        """
        if self._agreement is None:
            return None
        apart = self._agreement.apart
        if self._tokens_apart is self._layout.tp_cp_group:
            apart = torch.cat(all_gather_stacked(apart, self._layout.tp_group).unbind(), dim=1)
        if self._layout.pp_size > 1:
            dist.all_reduce(apart, group=self._layout.pp_group)
        return apart / (len(self.replay.shape.layers) * self.replay.shape.top_k)

    def all_reduce_metrics(self) -> dict[str, Metric]:
        """Disagreement by layer, on the last stage, this replica's share: one small exchange over the pipeline.

        Every rank calls it, after `all_reduce_check`.
        """
        if self._agreement is None:
            return {}
        own = self._agreement.sums[..., [TOKENS, OVERLAP, SAME_SET, GATES_APART]].double().sum(dim=0)
        by_layer = own.new_zeros(self.replay.shape.num_layers, 4)
        by_layer[list(self.replay.layers)] = own
        if self._layout.pp_size > 1:
            dist.all_reduce(by_layer, group=self._layout.pp_group)
        if not self._layout.is_last_stage:
            return {}
        if self._layout.cp_group.rank() > 0:  # all ranks of a row have counted all of its tokens by now
            by_layer = torch.zeros_like(by_layer)
        return agreement_metrics(by_layer, self.replay.shape.layers, self.replay.shape.top_k)


def agreement_metrics(by_layer: Tensor, layers: tuple[int, ...], top_k: int) -> dict[str, Metric]:
    """by_layer [H, 4]: tokens, experts in both choices, tokens of the same set, weight of experts in one only."""

    def named(tokens: Tensor, shared: Tensor, same: Tensor, apart: Tensor, suffix: str) -> dict[str, Metric]:
        return {
            f"router_replay/disagreement{suffix}": Mean(torch.stack([tokens - same, tokens])),
            f"router_replay/overlap{suffix}": Mean(torch.stack([shared / top_k, tokens])),
            f"router_replay/gate_mass_apart{suffix}": Mean(torch.stack([apart, tokens])),
        }

    metrics = named(*by_layer.sum(dim=0), "")
    for layer in layers:
        metrics |= named(*by_layer[layer], f"/layer_{layer:03d}")
    return metrics
