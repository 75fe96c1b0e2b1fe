"""After a push the trainer scores a fixed text by its own forward pass, and compares with what every server says of it.

N ids of the text, of which the last R = N - 1 are scored.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rows import BadRow
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.mcore.batch import BatchShape, RolloutBatch
from megatron_rl_corr.mcore.collect import SampleSource
from megatron_rl_corr.mcore.first_step import FLOAT32_KL, HALF_KL, first_step_bound
from megatron_rl_corr.mcore.forward import LogprobSettings
from megatron_rl_corr.mcore.packed_batch import PackedBatch, sequence_multiple
from megatron_rl_corr.mcore.packing import microbatch_multiple
from megatron_rl_corr.mcore.packs import Packs
from megatron_rl_corr.mcore.reference import ReferencePass
from megatron_rl_corr.parallel.failure import all_reduce_failure, all_reduce_results, communication_device
from megatron_rl_corr.parallel.layout import Layout
from megatron_rl_corr.weight_sync import probe, probe_history
from megatron_rl_corr.weight_sync.probe import (
    PROBE_TOKENS,
    ProbeAnswer,
    ask_earlier,
    ask_scores,
    compare,
    probe_bound,
)
from megatron_rl_corr.weight_sync.probe_history import Growth, Movement
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.updatable import is_interrupted


@dataclass(frozen=True)
class PushProbe:
    """Compares the servers' log-probs of one text with the trainer's own, right after a push."""

    ids: tuple[int, ...]
    """N of them, the same on every rank and in every push."""
    source: SampleSource
    model: list
    optimizer: Any
    layout: Layout
    shape: BatchShape
    settings: LogprobSettings
    multiple: int
    """A pass of the model takes a multiple of so many microbatches."""
    float32: bool
    """The trainer computes in float32."""
    max_log_ratio: float | None
    """--rollout-max-probe-log-ratio."""
    rounding: str = "none"
    """--rollout-push-rounding: the servers' weights differ from the trainer's by it."""
    movement: Movement = field(default_factory=Movement)
    growth: Growth = field(default_factory=Growth)

    def before_push(self) -> None:
        """Ask the servers for their log-probs before the run's first push, where they are compared with later ones.

        A server that a killed trainer has left paused answers nothing now, and is not asked.
        """
        is_compared = self.max_log_ratio is None and self.rounding == "none" and self.growth.is_first_push
        if dist.get_rank() or not is_compared:
            return
        client, loop = self.source.client, self.source.loop
        try:
            versions = zip(client.base_urls, loop.call(client.reported_versions()), strict=True)
        except RolloutError:  # none answers, which the push itself reports
            versions = ()
        urls = [url for url, version in versions if version is not None and not is_interrupted(version)]
        self.growth.expect_first_push(loop.call(ask_earlier(
            client.control(urls), self.ids, vocab_size=client.vocab_size, cache_key=client.cache_key
        )))  # fmt: skip

    def all_reduce_compared(self, servers: WeightServers, version: str) -> dict[str, float]:
        """The distance of the worst server, by the names of METRICS in weight_sync, on every rank.

        Every rank calls it, with whole and current weights. Three collectives of fixed size beside the forward pass.

        Args:
            servers: of the update that has just ended; they sample again, because a paused server answers nothing.
            version: the name of the weights.

        Raises:
            RolloutError: on rank 0, for a server whose weights differ, or that refuses to score.
            PeerFailure: then, on the other ranks.
        """
        answers: Future[dict[str, ProbeAnswer]] | None = None
        if dist.get_rank() == 0:
            client = self.source.client
            answers = self.source.loop.submit(ask_scores(
                client.control(servers.urls), self.ids, version=version, vocab_size=client.vocab_size,
                cache_key=client.cache_key,
            ))  # fmt: skip
        own = self._all_reduce_logprobs()  # while the servers compute
        found = all_reduce_results(answers, lambda result: self._judge(result, own, servers, version))
        return _broadcast_numbers(found)

    def _judge(
        self, answers: Mapping[str, ProbeAnswer], own: np.ndarray, servers: WeightServers, version: str
    ) -> dict[str, float]:
        self.movement.check(answers, own, servers.loaded, version=version)
        bounds, half, rounded = {}, set(), self.rounding != "none"
        in_fp8 = servers.quantization is not None
        for url, answer in answers.items():
            engine = self.source.client.engine_of(url)
            limit = first_step_bound(self.float32, [engine], [answer.info], rounded=rounded or in_fp8)
            bounds[url] = probe_bound(
                self.max_log_ratio, both_float32=limit == FLOAT32_KL, otherwise=limit, rounding=self.rounding
            )
            # What a quantised server held before its first push was quantised as what it is sent.
            if self.max_log_ratio is None and (limit == HALF_KL or in_fp8):
                half.add(url)
        return compare(answers, own, bounds, version=version) | self.growth.check(answers, own, half, version=version)

    def _all_reduce_logprobs(self) -> np.ndarray:
        """The text's log-probs [R] float64 at temperature 1 under the current weights, on every rank.

        Every replica computes them, because experts may be spread over replicas; the first one's are taken, which are
        the weights that were pushed.
        """
        batch = self._batch()
        packs = None if self.shape.packing is None else Packs.all_reduce(batch, self.shape.packing, self.layout)
        logprobs = ReferencePass(
            self.model, self.optimizer, batch, replace(self.settings, temperature=1.0), self.shape.micro_batch_size,
            self.shape.seq_length, packs,
        ).run()  # fmt: skip
        own = torch.zeros(len(self.ids) - 1, dtype=torch.float64, device=communication_device())
        if logprobs is not None and self.layout.dp_rank == 0 and self.layout.tp_group.rank() == 0:
            positions = batch.flat_positions
            ours = (batch.seq_ids == 0) & (positions < len(own))
            own[positions[ours]] = logprobs[ours].double()
        dist.all_reduce(own)
        return own.cpu().numpy()

    def _batch(self) -> RolloutBatch | PackedBatch:
        """The text as a batch of the same shape as the run's, as often as a pass of the model needs sequences."""
        ids = torch.tensor(self.ids, dtype=torch.int64)
        scored = len(ids) - 1
        text = Trajectory(
            prompt_index=0, sample_index=0, prompt_ids=ids[:1], output_ids=ids[1:],
            rollout_logprobs=torch.zeros(scored), finish_reason="stop",
            weight_versions=(VersionSpan("0", 0, scored),), cached_tokens=0, server="",
        )  # fmt: skip
        cp_rank, cp_size = self.layout.cp_group.rank(), self.layout.cp_size
        made: RolloutBatch | PackedBatch
        if self.shape.packing is None:
            count = self.shape.micro_batch_size * self.multiple
            made = RolloutBatch.from_trajectories(
                [text] * count, torch.zeros(count), length=self.shape.seq_length, version=0
            )
        else:
            count = self.multiple
            made = PackedBatch.from_trajectories(
                [text] * count, torch.zeros(count), length=self.shape.seq_length, version=0,
                multiple=sequence_multiple(cp_size),
            )  # fmt: skip
        return made.context_slice(cp_rank, cp_size)


def broadcast_probe(
    options: RunConfig, args: argparse.Namespace, source: SampleSource, model: list, optimizer: Any, layout: Layout,
    shape: BatchShape, settings: LogprobSettings,
) -> PushProbe | None:
    """The probe of a run, whose text rank 0 chooses; None with --rollout-probe-push off. Every rank calls it.

    Raises:
        RolloutError, ValueError, OSError: on rank 0, where its data can't be read.
        PeerFailure: then, on the other ranks.
    """
    if options.probe_push == "off":
        return None
    chosen, error = [()], None
    if dist.get_rank() == 0:
        try:
            # One less: a server samples a token behind a prompt that it scores.
            chosen[0] = probe_text(source.prompts, min(PROBE_TOKENS, args.seq_length - 1))
        except (RolloutError, ValueError, OSError) as failure:
            error = failure
    all_reduce_failure(error)
    dist.broadcast_object_list(chosen, src=0)
    return PushProbe(
        chosen[0], source, model, optimizer, layout, shape, settings, microbatch_multiple(args),
        args.params_dtype == torch.float32, options.max_probe_log_ratio, options.push_rounding,
    )  # fmt: skip


def probe_text(prompts: PromptDataset, count: int) -> tuple[int, ...]:
    """`count` ids: the data's first prompts one behind the other, from the beginning again where they are too few.

    Raises:
        ValueError, OSError: as `PromptDataset.rows`, for a row of another fault than a prompt that can't be used.
    """
    ids: list[int] = []
    for index in itertools.cycle(range(len(prompts))):
        try:
            ids += prompts.rows[index].input_ids
        except BadRow:
            if index == len(prompts) - 1 and not ids:
                raise
        if len(ids) >= count:
            return tuple(ids[:count])
    raise AssertionError("a data set has at least one row")


def print_probe(found: Mapping[str, float]) -> None:
    """One line of the first push's probe, from rank 0."""
    if found and dist.get_rank() == 0:
        worst, mean = (found[f"rollout/probe_{name}_abs_log_ratio"] for name in ("max", "mean"))
        print(f"[rollout] probe of the pushed weights: max |log-ratio| {worst:.2g}, mean {mean:.2g}", flush=True)


def _broadcast_numbers(found: dict[str, float] | None) -> dict[str, float]:
    """Rank 0's numbers on every rank; {} where it has none."""
    names = [spec.name for spec in (*probe.METRICS, *probe_history.METRICS)]
    values = torch.full((len(names),), torch.nan, dtype=torch.float64, device=communication_device())
    if found:
        values.copy_(torch.tensor([found.get(name, torch.nan) for name in names], dtype=torch.float64))
    dist.broadcast(values, src=0)
    return {name: value for name, value in zip(names, values.tolist(), strict=True) if value == value}
