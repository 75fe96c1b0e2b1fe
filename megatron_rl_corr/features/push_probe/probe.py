"""After a push the trainer scores texts by its own forward pass, and compares with what every
server says of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.features.push_probe import verdict
from megatron_rl_corr.features.push_probe.judge import ROUNDS, Asked, PushJudge
from megatron_rl_corr.features.push_probe.rows import RANK_TOKENS, RowShapes, keeps_shape
from megatron_rl_corr.features.push_probe.simulated_rounding import simulated_rounding
from megatron_rl_corr.mcore.batch.packing import microbatch_multiple
from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape, RolloutBatch, chunk_multiple
from megatron_rl_corr.mcore.feature import RunParts
from megatron_rl_corr.mcore.forward import BatchForward, LogprobSettings
from megatron_rl_corr.mcore.number_types import trained_type
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import (
    all_reduce_failure,
    all_reduce_results,
    broadcast_made,
    communication_device,
)
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.weight_sync.servers import WeightServers

SIMULATIONS = 4
"""Forward passes with simulated rounding, in each round that has some."""

Texts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class PushProbe:
    """Compares the servers' log-probs with the trainer's own, right after a push."""

    model: list
    optimizer: Any
    layout: Layout
    shape: BatchShape
    settings: LogprobSettings
    shapes: RowShapes
    """Shapes of padded rows; packs, too, come in its multiples."""
    judge: PushJudge | None
    """On rank 0: asks the servers, and judges them."""

    def before_push(self) -> None:
        """Ask the servers before the run's first push, with the weights that they have loaded themselves."""
        if self.judge is not None:
            self.judge.ask_earlier()

    @collective
    def compare_servers(self, servers: WeightServers, version: str) -> dict[str, float]:
        """The distance of the worst server, by the names of verdict.METRICS, on every rank.

        Every rank calls it, with whole and current weights.

        Args:
            servers: of the update that has just ended; they sample again, because a paused server
                answers nothing.
            version: the name of the weights.

        Raises:
            RolloutError: on rank 0, for a server whose weights differ, or that refuses to score.
            PeerFailure: then, on the other ranks.
        """
        judge = self.judge
        asked = broadcast_made(lambda: judge.begin(servers, version))
        answers = None if judge is None else judge.ask(0)
        own, moved = self._simulate_rounding(asked)  # while the servers compute
        all_reduce_results(answers, lambda found: judge.screen(found, own, moved))
        for number in range(1, ROUNDS + 1):
            if not broadcast_made(lambda: judge.goes_on):
                break
            answers = None if judge is None else judge.ask(number)
            all_reduce_results(answers, lambda found: judge.take(found))
            asked = broadcast_made(lambda: judge.asked)
            own, moved = self._simulate_rounding(asked)
            all_reduce_failure(None if judge is None else judge.judge(own, moved))
        return _share_numbers({} if judge is None else judge.numbers)

    @collective
    def _simulate_rounding(self, asked: Asked) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Each text's log-probs by the trainer [T], and how far simulated rounding moves them [R, T], on
        every rank.
        """
        own = self._logprobs_of_texts(asked.texts)
        if not asked.relative_error:
            return own, []
        others = []
        for draw in range(1, SIMULATIONS + 1):
            with simulated_rounding(self.model, asked.relative_error, draw):
                others.append(self._logprobs_of_texts(asked.texts, simulates=True))
        return own, [np.stack([other[i] for other in others]) - own[i] for i in range(len(own))]

    @collective
    def _logprobs_of_texts(self, texts: Texts, *, simulates: bool = False) -> list[np.ndarray]:
        """Each text's log-probs [T] float64 at temperature 1 under the current weights, on every rank.

        Every replica computes them, because experts may be spread over replicas; the first one's are
        taken, which are the weights that were pushed.
        """
        settings = replace(self.settings, temperature=1.0)
        # a server rounds its logits, which there would be none of
        if simulates and not settings.fp32_lm_head:
            settings = replace(settings, from_hidden=False)
        starts = np.concatenate([[0], np.cumsum([len(ids) - 1 for ids in texts])])
        own = torch.zeros(int(starts[-1]), dtype=torch.float64, device=communication_device())
        for places, forward in self._passes(texts, settings):
            logprobs, batch = forward.run(), forward.batch
            if logprobs is not None and self.layout.dp_rank == 0 and self.layout.tp_group.rank() == 0:
                # Where each sequence of the batch begins among the texts' tokens, and ends; a
                # repeated one has none.
                borders = torch.from_numpy(np.stack([starts[:-1], starts[1:]])[:, places]).to(own.device)
                begin, end = borders[:, batch.seq_ids]
                to = begin + batch.positions
                ours = (batch.seq_ids < len(set(places))) & (to < end)
                own[to[ours]] = logprobs[ours].double()
        dist.all_reduce(own)
        return np.split(own.cpu().numpy(), starts[1:-1])

    @collective
    def _passes(
        self, texts: Texts, settings: LogprobSettings
    ) -> Iterator[tuple[Sequence[int], BatchForward]]:
        """Forward passes that have each text once at least, and of each which texts its sequences are."""
        if self.shape.packing is not None:
            places = [row % len(texts) for row in range(max(len(texts), self.shapes.multiple))]
            batch = self._batch(texts, places, self.shape.seq_length, chunk_multiple(self.layout.cp_size))
            packs = Packs.balanced(batch, self.shape, self.layout)
            yield places, BatchForward(self.model, self.optimizer, packs, settings)
            return
        for rows in self.shapes.rows([len(text) for text in texts]):
            batch = self._batch(texts, rows.places, rows.length, rows.length)
            packs = Packs.of_rows(batch, rows.micro_batch_size, rows.length)
            yield rows.places, BatchForward(self.model, self.optimizer, packs, settings)

    def _batch(self, texts: Texts, places: Sequence[int], length: int, multiple: int) -> RolloutBatch:
        """This rank's tokens of the texts at these places."""
        whole = RolloutBatch.from_trajectories(
            [_trajectory(texts[place]) for place in places],
            torch.zeros(len(places)),
            length=length,
            version=0,
            multiple=multiple,
        )
        own = whole.context_slice(self.layout.cp_group.rank(), self.layout.cp_size)
        return own.to(communication_device())


def _trajectory(text: tuple[int, ...]) -> Trajectory:
    ids = torch.tensor(text, dtype=torch.int64)
    scored = len(ids) - 1
    return Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=ids[:1],
        output_ids=ids[1:],
        rollout_logprobs=torch.zeros(scored),
        finish_reason="stop",
        weight_versions=(VersionSpan("0", 0, scored),),
        cached_tokens=0,
        server="",
    )


@collective
def make_probe(run: RunParts, *, joining: bool = False) -> PushProbe:
    """The probe of a run; every rank calls it.

    Args:
        run: its collector has the responses of the last batch, on rank 0.
        joining: of servers that join the run, which nobody has asked before.

    Raises:
        RolloutError, ValueError, OSError: on rank 0, where its data can't be read.
        PeerFailure: then, on the other ranks.
    """
    judge, options, args = None, run.settings.options, run.settings.args
    layout, shape = run.settings.layout, run.shape
    if dist.get_rank() == 0:
        judge = PushJudge(
            run.source,
            dtype=trained_type(args),
            max_log_ratio=options.max_probe_log_ratio,
            push_rounding=options.push_rounding,
            responses=lambda: run.collector.trajectories,
            longest=args.seq_length - 1,
            resumed=joining or args.iteration > 0,
        )
    broadcast_made(lambda: judge.texts)
    unit = 0 if keeps_shape(args) else RANK_TOKENS * layout.cp_size * layout.tp_group.size()
    shapes = RowShapes(shape.seq_length, shape.micro_batch_size, microbatch_multiple(args), unit)
    return PushProbe(run.model, run.optimizer, layout, shape, run.logprob_settings, shapes, judge)


@collective
def _share_numbers(found: dict[str, float]) -> dict[str, float]:
    """Rank 0's numbers on every rank; {} where it has none."""
    names = [spec.name for spec in verdict.METRICS]
    values = torch.full((len(names),), torch.nan, dtype=torch.float64, device=communication_device())
    if found:
        values.copy_(torch.tensor([found.get(name, torch.nan) for name in names], dtype=torch.float64))
    dist.broadcast(values, src=0)
    return {name: value for name, value in zip(names, values.tolist(), strict=True) if value == value}
