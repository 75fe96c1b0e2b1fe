"""The replay of servers' keys in a run: they are asked for, handed out, replayed and compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.engines.routes import ExpertShape, has_routes
from megatron_rl_corr.features.indexer_replay.attention import ReplayedAttention
from megatron_rl_corr.features.indexer_replay.metrics import FLAG
from megatron_rl_corr.mcore.feature import Feature
from megatron_rl_corr.models.megatron_flags import SPARSE
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.moe.scatter import scatter_routed_experts
from megatron_rl_corr.reduce.collectives import all_gather_stacked, collective
from megatron_rl_corr.reduce.failure import communication_device
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.metrics import Mean, Metric

MOST_TOKENS = 1 << 15
"""Positions are kept as int16."""


class RoutesWithKeys(Routes):
    """What steers the routers, and the servers' keys beside it."""

    def __init__(
        self,
        routes: Routes,
        attention: ReplayedAttention,
        layout: Layout,
        *,
        stage_layers: tuple[tuple[int, ...], ...],
        shape: ExpertShape,
    ):
        """Steer both.

        Args:
            routes: what steers the routers.
            attention: of this rank.
            layout: this rank's process groups.
            stage_layers: the layers of each pipeline stage.
            shape: of the keys, as `SamplingParams.keys`.
        """
        self._routes, self._attention, self._layout = routes, attention, layout
        self.stage_layers, self.key_shape = stage_layers, shape
        self.server_shape, self.needs_scoring = routes.server_shape, routes.needs_scoring
        self._keys: Tensor | None = None
        """[T + 1, l, K], of this rank's layers."""
        self.scatter, self.replaying_others = routes.scatter, routes.replaying_others
        self.share_recorded, self.measure_disagreement = routes.share_recorded, routes.measure_disagreement
        self.shares_of_ranks, self.write_statistics = routes.shares_of_ranks, routes.write_statistics

    @collective
    def scatter_keys(self, samples: Sequence[Tensor | None] | None, boundaries: Sequence[int]) -> None:
        self._keys = None  # the batch before: not beside this one
        self._keys = scatter_routed_experts(
            samples,
            boundaries,
            shape=self.key_shape,
            stage_layers=self.stage_layers,
            layout=self._layout,
        )

    def begin_batch(
        self, seq_ids: Tensor, positions: Tensor, *, samples: int, compare_in_training: bool
    ) -> None:
        self._routes.begin_batch(seq_ids, positions, samples=samples, compare_in_training=compare_in_training)
        self._attention.compared_phase = "train" if compare_in_training else "score"
        self._attention.shared = torch.zeros_like(self._attention.shared)

    def begin_update(self) -> None:
        self._routes.begin_update()
        if self._attention.compared_phase == "train":
            self._attention.shared = torch.zeros_like(self._attention.shared)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        with self._routes.scoring(), self._attention.passes("score", self._keys):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        with self._routes.training(), self._attention.passes("train", self._keys):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        with self._routes.replaying(), self._attention.passes("measure", self._keys):
            yield

    def before_forward(self, chunk: nn.Module, places: Tensor) -> None:
        self._routes.before_forward(chunk, places)
        self._attention.before_forward(chunk, places)

    @collective
    def measure_agreement(self, step: int, name_of: Callable[[int], str]) -> dict[str, Metric]:
        metrics = self._routes.measure_agreement(step, name_of)
        known = has_routes(self._keys[:-1], self.key_shape.experts)
        replayed = torch.stack([known.sum(), known.sum().new_tensor(known.numel())])
        counted = torch.cat([self._attention.shared.to(known.device), replayed.double()])
        for group in (self._layout.tp_group, self._layout.pp_group):  # tensor ranks may see other tokens
            if group.size() > 1:
                dist.all_reduce(counted, group=group)
        if not self._layout.is_last_stage:
            return {}
        names = ("indexer_replay/overlap", "indexer_replay/replayed")
        return metrics | dict(zip(names, map(Mean, counted.split(2)), strict=True))


class IndexerReplayFeature(Feature):
    """--rollout-indexer-replay."""

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        return options.indexer_replay

    @classmethod
    def check_arguments(cls, args: argparse.Namespace) -> None:
        if not args.rollout_indexer_replay:
            return
        if vars(args).get("experimental_attention_variant") != SPARSE:
            raise ValueError(
                f"{FLAG} has no effect without --experimental-attention-variant {SPARSE}; leave it out"
            )
        if (backend := args.dsa_kernel_backend) != "none":
            raise ValueError(
                f"--dsa-kernel-backend {backend} chooses keys in a kernel, where {FLAG} can't be; use none, "
                f"or leave {FLAG} out"
            )
        for name in ("rollout_ledger_interval", "router_replay_effect_every"):  # of features that may lack
            if (given := vars(args).get(name)) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} {given} measures passes without the servers' keys, another "
                    f"policy than the one that {FLAG} trains; leave one of them out"
                )
        if args.cuda_graph_impl != "none":
            raise ValueError(
                f"--cuda-graph-impl {args.cuda_graph_impl} captures attention with one microbatch's keys; "
                f"use none, or leave {FLAG} out"
            )
        if args.seq_length <= args.dsa_indexer_topk:
            raise ValueError(
                f"{FLAG} has no effect with --seq-length {args.seq_length}, of which --dsa-indexer-topk "
                f"{args.dsa_indexer_topk} takes all keys; leave it out"
            )
        if args.seq_length > MOST_TOKENS:
            raise ValueError(
                f"{FLAG} keeps positions below {MOST_TOKENS}, and --seq-length is {args.seq_length}; use a "
                f"shorter one, or leave {FLAG} out"
            )

    @collective
    def steered(self, routes: Routes, model: list, args: argparse.Namespace, layout: Layout) -> Routes:
        attention = ReplayedAttention(model, layout.tp_group)
        own = torch.full((args.num_layers,), -1, dtype=torch.int64)
        own[: len(attention.layers)] = torch.tensor(attention.layers, dtype=torch.int64)
        stages = all_gather_stacked(own.to(communication_device()), layout.pp_group).tolist()
        layers = tuple(tuple(layer for layer in stage if layer >= 0) for stage in stages)
        every = tuple(range(args.num_layers))
        shape = ExpertShape(args.num_layers, every, args.dsa_indexer_topk, args.seq_length)
        return RoutesWithKeys(routes, attention, layout, stage_layers=layers, shape=shape)


FEATURE = IndexerReplayFeature
