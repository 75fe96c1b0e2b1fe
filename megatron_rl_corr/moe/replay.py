"""Makes Megatron's routers take given experts: a server's (R3), or those recorded in the pass for
old log-probs (R2).

T tokens of this replica's batch on this context-parallel rank; a microbatch has [C, b] of them, b rows of
C or one pack of C, of which this rank's routers see [t, b]: all, or a part under sequence parallelism. L
layers with experts of this rank, K experts a token, E experts a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_rl_corr.engines.routes import ExpertShape, has_routes
from megatron_rl_corr.models.hybrid import layers_per_block
from megatron_rl_corr.moe.routers import check_choice, flag_of, moe_routers, remedy
from megatron_rl_corr.reduce.collectives import all_gather_stacked, collective
from megatron_rl_corr.reduce.failure import communication_device
from megatron_rl_corr.reduce.layout import Layout

Observe = Callable[[Tensor, Tensor, Tensor], None]
"""observe(given experts [t, b, K], Megatron's own choice [t, b, K], its scores [t, b, E])."""
ObserveLayer = Callable[[Tensor, int, Tensor, Tensor, Tensor], None]
"""observe(the tokens' places in the batch [t, b], place of the layer on this rank, and the
three of `Observe`).
"""


class ReplayedRouter(RouterReplay):
    """Takes the place of one router's RouterReplay: `replay` or `record` say what the next forward pass does.

    Megatron's own is steered by one action for all routers, which does not know the microbatch of a pass:
    between a forward pass and its recomputation, other microbatches have gone forward. Here each pass has
    its own experts, and a token without any is routed as without replay.
    """

    def __init__(self, experts: int):
        super().__init__()
        self._experts = experts
        self._given: Tensor | None = None
        self._observe: Observe | None = None
        self._on_recorded: Callable[[Tensor], None] | None = None
        self._on_chosen: Callable[[Tensor], None] | None = None
        self._steers = True
        self._to_recompute: deque[Tensor] = deque()
        self.training = False
        """In training, a pass for which nothing was set recomputes an earlier one."""

    def replay(
        self,
        experts: Tensor,
        observe: Observe | None,
        on_chosen: Callable[[Tensor], None] | None = None,
        *,
        steers: bool = True,
    ) -> None:
        """Route the tokens of the next pass to given experts.

        Args:
            experts: [t, b, K]; a token without routes takes Megatron's own choice.
            observe: called with these, Megatron's own choice and its scores.
            on_chosen: on_chosen(ids [t * b, K]) is called with the experts that the tokens went to.
            steers: False: the tokens go where Megatron sends them, and are observed alone.
        """
        self._given, self._observe, self._on_chosen, self._steers = experts, observe, on_chosen, steers

    def record(self, on_recorded: Callable[[Tensor], None]) -> None:
        """Take Megatron's own choice in the next pass, and call on_recorded(ids [t * b, K]) with it."""
        self._on_recorded = on_recorded

    def reset(self) -> None:
        """Drop everything: the passes over the batch have ended, or failed."""
        self._given = self._observe = self._on_recorded = self._on_chosen = None
        self._to_recompute.clear()
        self.training = False

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """Megatron's hook in a router's forward pass: the experts that each token goes to.

        Args:
            scores: [t * b, E], the router's.
            topk: K.
            num_groups, group_topk: Megatron's group-limited routing, passed on to default_compute_topk.
            default_compute_topk: Megatron's own choice.

        Returns:
            (scores [t * b, K], ids [t * b, K] int64).

        Raises:
            RuntimeError: a pass in training that has no routes to replay.
        """
        if self._on_recorded is not None:
            values, ids = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            on_recorded, self._on_recorded = self._on_recorded, None
            on_recorded(ids)
            return values, ids
        given, observe, on_chosen = self._given, self._observe, self._on_chosen
        self._given = self._observe = self._on_chosen = None
        if given is None and not self.training:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if given is None:
            if not self._to_recompute:
                raise RuntimeError(
                    f"the router of layer {self.layer_number} ran without routes to replay: a recomputation "
                    "that megatron_rl_corr does not know; train without it, or with --router-replay off"
                )
            given = self._to_recompute.popleft()
        elif self.training and not torch.is_grad_enabled():
            # Activations are recomputed later, and a microbatch's backward passes come in the order
            # of its forward's.
            self._to_recompute.append(given)
        known = has_routes(given, self._experts).reshape(-1, 1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._steers):
            values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if observe is not None:
            sizes = given.shape[:2]
            observe(given, own.detach().view(*sizes, -1), scores.detach().view(*sizes, -1))
        if not self._steers:
            if on_chosen is not None:
                on_chosen(own)
            return values, own
        ids = torch.where(known, given.reshape(-1, topk).long(), own)
        if on_chosen is not None:
            on_chosen(ids)
        return scores.gather(1, ids), ids


class ReplayedRouters:
    """All routers of this rank, and what they replay or record in the current passes over a batch."""

    def __init__(
        self, kind: str, model: list[nn.Module], layout: Layout, *, num_layers: int, watch: bool = False
    ):
        """Take over the routers of the model. Every rank calls it: two small collectives over the pipeline.

        Args:
            kind: --router-replay's: R2 or R3, compare, or off, which only watches.
            model: this rank's chunks.
            layout: this rank's process groups.
            num_layers: of the whole model, as Megatron counts them.
            watch: keep in `chosen` where the tokens went in the pass for old log-probs.

        Raises:
            ValueError: for a model without experts, or whose routers can't be replayed.
        """
        self.kind, self.watch = kind, watch
        self._routers: dict[nn.Module, list[tuple[int, ReplayedRouter]]] = {}
        layers: list[int] = []
        self.softmax = True
        """The weights of a token's experts are the softmax of their scores alone."""
        block = max(map(layers_per_block, unwrap_model(model)))
        num_layers //= block
        for chunk in model:
            self._routers[chunk] = []
            for router in moe_routers(chunk):
                check_choice(router.config.moe_router_fusion, [router.routing_type], kind, watch)
                replayed = ReplayedRouter(router.config.num_moe_experts)
                replayed.layer_number = router.layer_number
                router.router_replay = replayed
                self._routers[chunk].append((len(layers), replayed))
                layers.append((router.layer_number - 1) // block)
                self._top_k, self._experts = router.topk, router.config.num_moe_experts
                self.softmax = router.score_function == "softmax" and not router.config.moe_router_pre_softmax
        self.layers = tuple(layers)
        """This rank's L layers, by their number in the whole model from 0, in the order of its chunks."""
        self.stage_layers = _layers_of_stages(self.layers, num_layers, layout)
        """The layers of each pipeline stage, in the stage's order."""
        every = sorted(layer for stage in self.stage_layers for layer in stage)
        if not every:
            raise ValueError(
                f"{flag_of(kind)} has no effect on a model without experts; {remedy(kind, watch)}"
            )
        top_k, experts = _agree_on_sizes(self.layers and (self._top_k, self._experts), layout)
        self.shape = ExpertShape(num_layers, tuple(every), top_k, experts)
        self._phase, self._tp = "", layout.tp_group
        self._cut = layout.sequence_parallel and self._tp.size() > 1
        self._given: Tensor | None = None
        self._observe: ObserveLayer | None = None
        self.chosen: Tensor | None = None
        """[T + 1, L, K]: with R2 or `watch`, where each token went in the last pass for old log-probs;
        behind them a row of what is no token.
        """
        self.seen: Tensor | None = None
        """[T + 1] bool: the tokens of `chosen` that this rank's routers saw."""

    @contextmanager
    def scoring(
        self, given: Tensor | None, observe: ObserveLayer | None = None, *, tokens: int
    ) -> Iterator[None]:
        """Context of the forward passes for old log-probs.

        Args:
            given: [T + 1, L, K], the servers' experts, with R3 and compare; None for the other kinds.
            observe: called with every layer's pass, with R3.
            tokens: T.
        """
        if self.kind == "R2" or self.watch:
            sizes, device = (tokens + 1, len(self.layers), self.shape.top_k), communication_device()
            self.chosen = torch.zeros(sizes, dtype=self.shape.dtype, device=device)
            self.seen = torch.zeros(tokens + 1, dtype=torch.bool, device=device)
        with self._passes("score", given, observe):
            yield

    @collective
    def share_recorded(self) -> None:
        """Give R2 what the tensor-parallel ranks' routers chose in `scoring`, where each saw other tokens.

        In training a rank's routers may see those of another: microbatches are not the same.
        """
        if self.kind != "R2" or not self.layers:
            return
        if self._cut:
            # A token's bytes are 0 on all ranks but one; no backend sends int16.
            chosen = self.chosen.masked_fill(~self.seen[:, None, None], 0).view(torch.uint8)
            dist.all_reduce(chosen, group=self._tp)
            self.chosen = chosen.view(self.shape.dtype)
        self.chosen[-1] = torch.iinfo(self.shape.dtype).max  # what is no token is routed as without replay

    @contextmanager
    def training(self, given: Tensor | None, observe: ObserveLayer | None = None) -> Iterator[None]:
        """Context of Megatron's train step. As `scoring`, but R2 replays what was recorded there."""
        with self._passes("train", given, observe):
            yield

    @contextmanager
    def replaying(self, given: Tensor | None) -> Iterator[None]:
        """Context of forward passes that R3 steers as in `scoring`, compare too, and of which nothing is
        kept.
        """
        with self._passes("measure", given, None):
            yield

    @contextmanager
    def _passes(self, phase: str, given: Tensor | None, observe: ObserveLayer | None) -> Iterator[None]:
        self._phase, self._given, self._observe = phase, given, observe
        for router in self._all():
            router.training = phase == "train" and self.kind in ("R2", "R3")
        try:
            yield
        finally:
            self._phase, self._given, self._observe = "", None, None
            for router in self._all():
                router.reset()

    def before_forward(self, chunk: nn.Module, places: Tensor) -> None:
        """Set up the routers for a chunk's forward pass over one microbatch.

        Args:
            chunk: of the model.
            places: [C, b] int64, where its tokens stand in the batch; T for one that is no token.
        """
        routers = self._routers[chunk]
        if not routers or (self.kind == "off" and self._phase != "score"):
            return
        if self._cut:
            places = places.chunk(self._tp.size())[self._tp.rank()]
        given, by_servers = None, self.kind in ("R3", "compare")
        if by_servers or (self.kind == "R2" and self._phase == "train"):
            given = (self._given if by_servers else self.chosen)[places]
        steers = self.kind != "compare" or self._phase == "measure"
        keeps = self._phase == "score" and self.chosen is not None
        if keeps:
            self.seen[places] = True
        for place, router in routers:
            keep = self._keeper(places, place) if keeps else None
            if given is None:
                router.record(keep)
            else:
                router.replay(given[:, :, place], self._observer(places, place), keep, steers=steers)

    def _keeper(self, places: Tensor, place: int) -> Callable[[Tensor], None]:
        def keep(ids: Tensor) -> None:
            self.chosen[places.reshape(-1), place] = ids.detach().to(self.shape.dtype)

        return keep

    def _observer(self, places: Tensor, place: int) -> Observe | None:
        if self._observe is None:
            return None
        observe = self._observe
        return lambda given, own, scores: observe(places, place, given, own, scores)

    def _all(self) -> list[ReplayedRouter]:
        return [router for pairs in self._routers.values() for _, router in pairs]


@collective
def _layers_of_stages(own: tuple[int, ...], num_layers: int, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Each stage's layers in its order: one collective over the pipeline."""
    padded = torch.full((num_layers,), -1, dtype=torch.int64)
    padded[: len(own)] = torch.tensor(own, dtype=torch.int64)
    gathered = all_gather_stacked(padded.to(communication_device()), layout.pp_group).tolist()
    return tuple(tuple(layer for layer in stage if layer >= 0) for stage in gathered)


@collective
def _agree_on_sizes(own: tuple[int, int] | tuple, layout: Layout) -> tuple[int, int]:
    """(K, E), which a stage of dense layers learns from the others."""
    sizes = torch.tensor(own or (0, 0), dtype=torch.int64, device=communication_device())
    if layout.pp_size > 1:
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=layout.pp_group)
    top_k, experts = sizes.tolist()
    return top_k, experts
