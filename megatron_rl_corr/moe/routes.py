"""A step's work with routed experts in one object: collect, replay, compare with Megatron's choice, count.

`Routes` is the null form, for --router-replay off without --expert-statistics: every method does nothing. A
step calls the same methods in the same order whatever the flags are.

S samples of this replica, T tokens of them on this context-parallel rank, L layers with experts of this
rank, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_rl_corr.engines.routes import ExpertShape, has_routes
from megatron_rl_corr.moe.agreement import RouteAgreement, RoutesRefused, agreement_metrics, judge
from megatron_rl_corr.moe.scatter import scatter_routed_experts
from megatron_rl_corr.moe.statistics import COLUMNS, ExpertLog, expert_table, means, summary
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import all_reduce_failure, communication_device
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.metrics import Metric, Sum

if TYPE_CHECKING:
    from megatron_rl_corr.moe.replay import ReplayedRouters


class Routes:
    """The null form: the routers choose by themselves, and their choice is not watched."""

    server_shape: ExpertShape | None = None
    """Shape of the experts that servers must return for each token; None: no experts."""
    needs_scoring: tuple[str, ...] = ()
    """The flags that need the pass for old log-probs."""
    key_shape: ExpertShape | None = None
    """Shape of the keys of sparse attention that servers must return, as `SamplingParams.keys`."""

    def scatter_keys(self, samples: Sequence[Tensor | None] | None, boundaries: Sequence[int]) -> None:
        """As `scatter`, of the keys that the servers' sparse attention took."""

    def scatter(self, samples: Sequence[Tensor | None] | None, boundaries: Sequence[int]) -> None:
        """Hand out the servers' experts of a step's samples; every rank of a replica calls it.

        Args:
            samples: on the data leader each sample's [tokens - 1, all layers with experts, K], or
                None; None on others.
            boundaries: [S + 1] where each sample begins in the whole batch: `cu_seqlens`.
        """

    def begin_batch(
        self, seq_ids: Tensor, positions: Tensor, *, samples: int, compare_in_training: bool
    ) -> None:
        """Start a step.

        The servers' experts are compared in the first pass that replays them.

        Args:
            seq_ids: [T] int64, the sample of each token.
            positions: [T] int64, where it stands in its sample.
            samples: S.
            compare_in_training: there is no pass for old log-probs, so the training pass compares, and the
                update waits for `measure_agreement`.
        """

    def begin_update(self) -> None:
        """Start an update of the step's samples, before `training`: what is compared there
        is counted anew.
        """

    def scoring(self) -> AbstractContextManager:
        """Context of the pass for old log-probs."""
        return nullcontext()

    def training(self) -> AbstractContextManager:
        """Context of Megatron's train step."""
        return nullcontext()

    def replaying(self) -> AbstractContextManager:
        """Context of forward passes with the servers' experts, of which nothing is kept or compared."""
        return nullcontext()

    @contextmanager
    def replaying_others(
        self, samples: Sequence[Tensor | None] | None, boundaries: Sequence[int]
    ) -> Iterator[Routes]:
        """As `replaying`, over samples that are not the step's; every rank of a replica calls it.

        It yields what steers the routers: as the servers did with R3, else by themselves.
        Arguments: as `scatter`'s.
        """
        yield Routes()

    def before_forward(self, chunk: nn.Module, places: Tensor) -> None:
        """Call it before a model chunk's forward pass, inside `scoring`, `training` or `replaying`.

        Args:
            chunk: of the model.
            places: [C, b] int64, where the microbatch's tokens stand among the T; T for one that is no token.
        """

    @collective
    def share_recorded(self) -> None:
        """With R2, call it on every rank after `scoring`: one all-reduce over ranks that see other tokens."""

    @collective
    def measure_agreement(self, step: int, name_of: Callable[[int], str]) -> dict[str, Metric]:
        """Metrics of how far the servers' experts are Megatron's own choice; every rank calls it
        after that pass.

        With experts of servers it takes three all-reduces: over the ranks that hold other tokens of the same
        samples, over all ranks for a failure, and over the pipeline.

        Args:
            step: counted from 1, for the error.
            name_of: what a sample, by its number among the S, is called in the error.

        Returns:
            This replica's share, on the last stage; {} on other stages.

        Raises:
            RoutesRefused: on one rank that found experts which are not those of its samples' tokens.
            PeerFailure: on all other ranks.
        """
        return {}

    @collective
    def measure_disagreement(self) -> Tensor | None:
        """[T]: share of each token's experts that only the server chose. None without experts of servers.

        Every rank calls it, where a rule needs it: one all-reduce over tensor ranks that see other tokens,
        and one over the pipeline, which holds other layers.
        """
        return None

    @collective
    def shares_of_ranks(self, places: Tensor, ranks: int) -> Tensor | None:
        """[N, R] float32: which share of a token's experts, by the servers, each expert-parallel rank holds,
        over all layers; 0 of a token without routes. None without experts of servers.

        Every rank calls it: one all-reduce over the pipeline, which holds other layers.

        Args:
            places: [N] int64 among the T.
            ranks: R.
        """
        return None

    @collective
    def write_statistics(self, step: int, values: Tensor | None) -> dict[str, Metric]:
        """--expert-statistics: write the experts' tables, return their curves on the last stage;
        every rank calls it.

        Args:
            step: counted from 1.
            values: `statistics.token_values` of the T tokens on the last stage, None on others.
        """
        return {}


class ReplayedRoutes(Routes):
    """--router-replay compare, R2 or R3, or --expert-statistics alone, or both."""

    def __init__(
        self,
        routers: ReplayedRouters,
        layout: Layout,
        *,
        min_agreement: float | None = None,
        log: ExpertLog | None = None,
    ):
        """Replay or watch the routers.

        Args:
            routers: of this rank.
            layout: this rank's process groups.
            min_agreement: --router-replay-min-agreement, with R3.
            log: where --expert-statistics are written; None: the flag was not given.
        """
        self.routers, self._layout, self._min_agreement, self._log = routers, layout, min_agreement, log
        flags = {"--expert-statistics": routers.watch, "--router-replay R2": routers.kind == "R2"}
        self.server_shape = routers.shape if routers.kind in ("R3", "compare") else None
        self.needs_scoring = tuple(flag for flag, needs in flags.items() if needs)
        self.given: Tensor | None = None
        """[T + 1, L, K]: the servers' experts of the step's tokens, in this rank's layers; the
        last row has none.
        """
        self._tokens = 0
        self._compare_in_training = False
        self._agreement: RouteAgreement | None = None

    @collective
    def scatter(self, samples: Sequence[Tensor | None] | None, boundaries: Sequence[int]) -> None:
        if self.server_shape is None:
            return
        self.given = None  # the batch before: not beside this one
        self.given = scatter_routed_experts(
            samples,
            boundaries,
            shape=self.server_shape,
            stage_layers=self.routers.stage_layers,
            layout=self._layout,
        )

    def begin_batch(
        self, seq_ids: Tensor, positions: Tensor, *, samples: int, compare_in_training: bool
    ) -> None:
        self._tokens, self._compare_in_training = len(seq_ids), compare_in_training
        self._new_agreement = partial(
            RouteAgreement,
            seq_ids,
            positions,
            samples=samples,
            layers=len(self.routers.layers),
            experts=self.routers.shape.experts,
            softmax=self.routers.softmax,
            parts=self._layout.router_group.size(),
        )
        self._agreement = None if self.given is None else self._new_agreement()

    def begin_update(self) -> None:
        if self._compare_in_training and self.given is not None:
            self._agreement = self._new_agreement()

    def scoring(self) -> AbstractContextManager:
        observe = self._agreement and self._agreement.observe
        return self.routers.scoring(self.given, observe, tokens=self._tokens)

    def training(self) -> AbstractContextManager:
        observe = self._agreement.observe if self._agreement and self._compare_in_training else None
        return self.routers.training(self.given, observe)

    def replaying(self) -> AbstractContextManager:
        return self.routers.replaying(self.given)

    @contextmanager
    def replaying_others(
        self, samples: Sequence[Tensor | None] | None, boundaries: Sequence[int]
    ) -> Iterator[Routes]:
        if self.server_shape is None:
            yield Routes()
            return
        own = self.given
        self.scatter(samples, boundaries)
        try:
            with self.replaying():
                yield self
        finally:
            self.given = own

    def before_forward(self, chunk: nn.Module, places: Tensor) -> None:
        self.routers.before_forward(chunk, places)

    @collective
    def share_recorded(self) -> None:
        self.routers.share_recorded()

    @collective
    def measure_agreement(self, step: int, name_of: Callable[[int], str]) -> dict[str, Metric]:
        if self._agreement is None:
            return {}
        self._agreement.all_reduce(self._layout.router_group)
        found = judge(self._agreement, self.routers.layers, self.routers.shape.top_k, self._min_agreement)
        error = None
        if found is not None:
            error = RoutesRefused(
                f"routed_experts of {name_of(found[0])} of replica {self._layout.dp_rank} in step {step} are "
                f"not those of its tokens, so nothing was trained on them: {found[1]}"
            )
        all_reduce_failure(error)
        by_layer = self._agreement.totals(self.routers.layers, self.routers.shape.num_layers)
        if self._layout.pp_size > 1:
            dist.all_reduce(by_layer, group=self._layout.pp_group)
        if not self._layout.is_last_stage:
            return {}
        if self._layout.cp_group.rank() > 0:  # all ranks of a row have counted all of its tokens by now
            by_layer = torch.zeros_like(by_layer)
        return agreement_metrics(by_layer, self.routers.shape.layers, self.routers.shape.top_k)

    @collective
    def measure_disagreement(self) -> Tensor | None:
        if self._agreement is None:
            return None
        apart, layout = self._agreement.apart, self._layout
        if layout.sequence_parallel and layout.tp_group.size() > 1:
            dist.all_reduce(apart, group=layout.tp_group)
        if layout.pp_size > 1:
            dist.all_reduce(apart, group=layout.pp_group)
        return apart / (len(self.routers.shape.layers) * self.routers.shape.top_k)

    @collective
    def shares_of_ranks(self, places: Tensor, ranks: int) -> Tensor | None:
        if self.given is None:
            return None
        given, experts = self.given[places], self.routers.shape.experts
        rank_of = given.long().where(has_routes(given, experts)[..., None], experts) // (experts // ranks)
        counts = (rank_of[..., None] == torch.arange(ranks, device=given.device)).sum(dim=(1, 2)).float()
        if self._layout.pp_size > 1:
            dist.all_reduce(counts, group=self._layout.pp_group)
        return counts / counts.sum(dim=1, keepdim=True).clamp(min=1)

    @collective
    def write_statistics(self, step: int, values: Tensor | None) -> dict[str, Metric]:
        if not self.routers.watch:
            return {}
        layout, shape = self._layout, self.routers.shape
        if values is None:
            values = torch.empty(self._tokens, len(COLUMNS), device=communication_device())
        table = expert_table(
            values,
            self.routers.chosen[:-1],
            self.routers.seen[:-1],
            layers=self.routers.layers,
            num_layers=shape.num_layers,
            num_experts=shape.experts,
            layout=layout,
        )
        if not layout.is_last_stage:
            return {}
        if self._log is not None and layout.is_job_reporter:
            self._log.write(step, shape.layers, means(table))
        curves = summary(table, shape.layers)
        counts_once = layout.dp_cp_group.rank() == 0
        return (
            curves
            if counts_once
            else {name: Sum(torch.zeros_like(one.values)) for name, one in curves.items()}
        )


def make_routes(
    kind: str,
    model: list[nn.Module],
    layout: Layout,
    *,
    num_layers: int,
    min_agreement: float | None = None,
    log: ExpertLog | None = None,
) -> Routes:
    """The object for the run's flags; every rank calls it.

    Args:
        kind: --router-replay: off, compare, R2 or R3.
        model: this rank's chunks.
        layout: this rank's process groups.
        num_layers: of the whole model.
        min_agreement: --router-replay-min-agreement.
        log: of --expert-statistics; None: the flag was not given.

    Raises:
        ValueError: as `ReplayedRouters`.
    """
    if kind == "off" and log is None:
        return Routes()
    # Imported here, since Megatron before 0.16 has no RouterReplay.
    from megatron_rl_corr.moe.replay import ReplayedRouters

    routers = ReplayedRouters(kind, model, layout, num_layers=num_layers, watch=log is not None)
    if kind == "compare":  # nothing trains on these routes
        min_agreement = -1.0
    return ReplayedRoutes(routers, layout, min_agreement=min_agreement, log=log)
