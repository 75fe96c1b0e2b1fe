"""Replays routes in Megatron's routers: the server's (R3), or the old-log-prob pass's own (R2).

N samples of this replica, b of them a microbatch, t tokens of a row on this rank (after the context-parallel slice and,
under sequence parallelism, the tensor-parallel one), M layers with experts of this rank, k experts a token, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor, nn

from megatron_rl_corr.engines.sglang.routed_experts import ExpertShape, has_routes
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.router_flags import check_choice, given, remedy
from megatron_rl_corr.parallel.failure import communication_device
from megatron_rl_corr.parallel.gather import all_gather_stacked
from megatron_rl_corr.parallel.layout import Layout

Observe = Callable[[Tensor, Tensor, Tensor], None]
"""Told of a microbatch's routes [t, b, k], Megatron's own choice [t, b, k] and its scores [t, b, E]."""


class ReplayedRouter(RouterReplay):
    """Stands in for one router's RouterReplay; told before each forward pass what to do in it.

    Megatron's own is steered by one action for all routers, which does not know the microbatch of a pass: between a
    forward pass and its recomputation, other microbatches have gone forward. Here every pass has its own routes, and a
    token without any is routed as without replay.
    """

    def __init__(self, experts: int):
        super().__init__()
        self._experts = experts
        self._next: Tensor | None = None
        self._observe: Observe | None = None
        self._recorded: Callable[[Tensor], None] | None = None
        self._chosen: Callable[[Tensor], None] | None = None
        self._recomputed: deque[Tensor] = deque()
        self.training = False
        """A pass that nothing was told of recomputes an earlier one."""

    def replay(
        self, routes: Tensor, observe: Observe | None, chosen: Callable[[Tensor], None] | None = None
    ) -> None:
        """In the next pass: routes [t, b, k]. chosen() is told where its tokens then went, ids [t * b, k]."""
        self._next, self._observe, self._chosen = routes, observe, chosen

    def record(self, recorded: Callable[[Tensor], None]) -> None:
        """In the next pass: Megatron's own choice [t * b, k] goes to recorded()."""
        self._recorded = recorded

    def forget(self) -> None:
        """The pass over the batch has ended, or failed."""
        self._next = self._observe = self._recorded = self._chosen = None
        self._recomputed.clear()
        self.training = False

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """Megatron's hook: (scores [t * b, k], ids [t * b, k] int64) of the experts that each token goes to."""
        if self._recorded is not None:
            values, ids = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            recorded, self._recorded = self._recorded, None
            recorded(ids)
            return values, ids
        routes, observe, chosen = self._next, self._observe, self._chosen
        self._next = self._observe = self._chosen = None
        if routes is None and not self.training:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if routes is None:
            if not self._recomputed:
                raise RuntimeError(
                    f"the router of layer {self.layer_number} ran without routes to replay: a recomputation that "
                    "megatron_rl_corr does not know; train without it, or with --router-replay off"
                )
            routes = self._recomputed.popleft()
        elif self.training and not torch.is_grad_enabled():
            # Activations are recomputed later, and a microbatch's backward passes come in the order of its forward's.
            self._recomputed.append(routes)
        known = has_routes(routes, self._experts).reshape(-1, 1)
        with torch.no_grad():
            _, natural = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if observe is not None:
            sizes = routes.shape[:2]
            observe(routes, natural.detach().view(*sizes, -1), scores.detach().view(*sizes, -1))
        ids = torch.where(known, routes.reshape(-1, topk).long(), natural)
        if chosen is not None:
            chosen(ids)
        return scores.gather(1, ids), ids


class Replay:
    """This rank's routers and, step by step, what they replay.

    kind is --router-replay's: R2 or R3, or off, which only watches. Every rank makes one, once the model is there.
    watch: keep where the tokens went in the pass for old log-probs.
    """

    def __init__(
        self, kind: str, model: list[nn.Module], layout: Layout, *, num_layers: int, watch: bool = False
    ):
        self.kind, self._layout, self._watch = kind, layout, watch
        self._routers: dict[nn.Module, list[tuple[int, ReplayedRouter]]] = {}
        layers: list[int] = []
        self.softmax = True
        """Weights of a token's experts are the softmax of their scores alone."""
        for chunk in model:
            self._routers[chunk] = []
            for router in compat.moe_routers(chunk):
                check_choice(router.config.moe_router_fusion, [router.routing_type], kind, watch)
                stand_in = ReplayedRouter(router.config.num_moe_experts)
                stand_in.layer_number = router.layer_number
                router.router_replay = stand_in
                self._routers[chunk].append((len(layers), stand_in))
                layers.append(router.layer_number - 1)
                self._top_k, self._experts = router.topk, router.config.num_moe_experts
                self.softmax = router.score_function == "softmax" and not router.config.moe_router_pre_softmax
        self.layers = tuple(layers)
        """Of this rank, by their number in the whole model, from 0, in the order of its chunks."""
        self.stage_layers = _all_gather_layers(self.layers, num_layers, layout)
        """Of each pipeline stage, in its own order."""
        every = sorted(layer for stage in self.stage_layers for layer in stage)
        if not every:
            raise ValueError(f"{given(kind)} has no effect on a model without experts; {remedy(kind, watch)}")
        top_k, experts = _all_reduce_sizes(self.layers and (self._top_k, self._experts), layout)
        self.shape = ExpertShape(num_layers, tuple(every), top_k, experts)
        self._routes: Tensor | None = None
        self._recorded: dict[int, dict[int, Tensor]] = {}
        self._observe: Callable[[int, int, Tensor, Tensor, Tensor], None] | None = None
        self._phase = ""
        self.chosen: Tensor | None = None
        """[N, t, M, k]: with `watch`, where each token went in the last pass for old log-probs."""

    @contextmanager
    def scoring(
        self, routes: Tensor | None, observe: Callable[[int, int, Tensor, Tensor, Tensor], None] | None = None,
        *, rows: int,
    ) -> Iterator[None]:
        """Within: forward passes for old log-probs of N = rows samples.

        R3 replays routes [N, t, M, k]; the others take None.
        observe(first row, place of the layer, routes, own choice, scores) is told of every layer's pass.
        """
        self._recorded, self._rows = {}, rows
        with self._pass("score", routes, observe):
            yield

    @contextmanager
    def training(
        self, routes: Tensor | None, observe: Callable[[int, int, Tensor, Tensor, Tensor], None] | None = None
    ) -> Iterator[None]:
        """Within: Megatron's train step. As `scoring`, but that R2 replays what was recorded."""
        with self._pass("train", routes, observe):
            yield

    @contextmanager
    def _pass(self, phase: str, routes: Tensor | None, observe) -> Iterator[None]:
        self._phase, self._routes, self._observe = phase, routes, observe
        for _, router in self._all():
            router.training = phase == "train" and self.kind != "off"
        try:
            yield
        finally:
            self._phase, self._routes, self._observe = "", None, None
            for _, router in self._all():
                router.forget()

    def arm(self, chunk: nn.Module, index: int, rows: int) -> None:
        """Before a chunk's forward pass over microbatch `index` of so many rows."""
        part = slice(index * rows, (index + 1) * rows)
        for place, router in self._routers[chunk]:
            if self.kind == "R3":
                chosen = self._keeper(part, place) if self._watch and self._phase == "score" else None
                routes = self._routes[part, :, place].transpose(0, 1)
                router.replay(routes, self._observer(part.start, place), chosen)
            elif self._phase == "score":
                router.record(lambda ids, place=place: self._record(place, index, ids, rows))
            elif self.kind == "R2":
                router.replay(self._recorded[place][index], None)

    def _keeper(self, part: slice, place: int) -> Callable[[Tensor], None]:
        rows = part.stop - part.start

        def keep(ids: Tensor) -> None:
            by_row = ids.detach().to(self.shape.dtype).view(-1, rows, ids.shape[1]).transpose(0, 1)
            if self.chosen is None or self.chosen.shape[:2] != (self._rows, by_row.shape[1]):
                sizes = (self._rows, by_row.shape[1], len(self.layers), by_row.shape[2])
                self.chosen = by_row.new_empty(sizes)
            self.chosen[part, :, place] = by_row

        return keep

    def _observer(self, first: int, place: int) -> Observe | None:
        if self._observe is None:
            return None
        return lambda routes, natural, scores: self._observe(first, place, routes, natural, scores)

    def _record(self, place: int, index: int, ids: Tensor, rows: int) -> None:
        if self._watch:
            self._keeper(slice(index * rows, (index + 1) * rows), place)(ids)
        if self.kind == "R2":
            recorded = ids.detach().to(self.shape.dtype).view(-1, rows, ids.shape[1])
            self._recorded.setdefault(place, {})[index] = recorded

    def _all(self) -> list[tuple[int, ReplayedRouter]]:
        return [pair for pairs in self._routers.values() for pair in pairs]


def _all_gather_layers(own: tuple[int, ...], num_layers: int, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Each stage's layers in its order: one collective over the pipeline."""
    told = torch.full((num_layers,), -1, dtype=torch.int64)
    told[: len(own)] = torch.tensor(own, dtype=torch.int64)
    gathered = all_gather_stacked(told.to(communication_device()), layout.pp_group).tolist()
    return tuple(tuple(layer for layer in stage if layer >= 0) for stage in gathered)


def _all_reduce_sizes(own: tuple[int, int] | tuple, layout: Layout) -> tuple[int, int]:
    """(k, E), which a stage of dense layers learns from the others."""
    sizes = torch.tensor(own or (0, 0), dtype=torch.int64, device=communication_device())
    if layout.pp_size > 1:
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX, group=layout.pp_group)
    top_k, experts = sizes.tolist()
    return top_k, experts
