"""One rank of a scale.py user, in a process of its own: prints as JSON what a batch's way to it asks for.

python benchmarks/scale_batch_worker.py '{"model": "KIMI_K2", "rank": 0, "parallel": {...}, ...}'

The package's own BatchCollector runs: samples are counted, dealt out over replicas, laid out and sent to the
ranks of the replica with their routed experts. Samples are as many as in the job and a part as long: bytes,
and most of the seconds, are linear in tokens.
"""

import concurrent.futures
import json
import pickle
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

warnings.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # behind the package that is measured, which PYTHONPATH names

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.fake_rank import Counts, HeldBytes, Parallel, counted, start  # noqa: E402
from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig  # noqa: E402
from megatron_rl_corr.engines.routes import ExpertShape  # noqa: E402
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory, VersionSpan  # noqa: E402
from megatron_rl_corr.mcore import compat  # noqa: E402
from megatron_rl_corr.mcore.batch import deal  # noqa: E402
from megatron_rl_corr.mcore.batch.collect_metrics import COUNTED, count_samples  # noqa: E402
from megatron_rl_corr.mcore.batch.collector import BatchCollector  # noqa: E402
from megatron_rl_corr.mcore.batch.packing import PackLimits  # noqa: E402
from megatron_rl_corr.mcore.batch.packs import Packs  # noqa: E402
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape, RolloutBatch  # noqa: E402
from megatron_rl_corr.mcore.loss import make_loss_inputs  # noqa: E402
from megatron_rl_corr.mcore.scoring import OldPass  # noqa: E402
from megatron_rl_corr.mcore.step_metrics import batch_metrics  # noqa: E402
from megatron_rl_corr.moe.routes import ReplayedRoutes, Routes  # noqa: E402
from megatron_rl_corr.reduce.collectives import all_reduce_metrics  # noqa: E402
from megatron_rl_corr.reduce.layout import Layout  # noqa: E402
from megatron_rl_corr.reduce.metrics import Max, Metric, Sum  # noqa: E402
from megatron_rl_corr.rollout.groups import Group, Taken  # noqa: E402
from tests.commands.planner import published  # noqa: E402

GROUP_SIZE = 8
PROMPT = 16
ATTENTION_SHARE = 3e-5
CORRECTION = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_upper=2.0,
    rollout_rs=(RejectionRule("seq_mean", "ratio", 0.5, 2.0), RejectionRule("token", "k2", None, 0.5)),
    rollout_is_batch_normalize=True,
)
"""Weights, rules of two levels and a normalisation: what takes every collective of a correction."""


class FakeBatches(BatchCollector):
    """Takes made-up samples in the place of servers'."""

    def __init__(self, samples: list[Trajectory], layout: Layout, shape: BatchShape, routes: Routes):
        sampling = SamplingParams(max_new_tokens=shape.seq_length, temperature=1.0)
        super().__init__(
            layout, shape, sampling, num_turns=None, truncated_samples="train", routes=routes, by_lag=True
        )
        self._samples = samples

    def _submit_take(self, number: int) -> concurrent.futures.Future[Taken]:
        taking: concurrent.futures.Future[Taken] = concurrent.futures.Future()
        groups = [
            Group(place, self._samples[start : start + GROUP_SIZE], [0.5] * GROUP_SIZE)
            for place, start in enumerate(range(0, len(self._samples), GROUP_SIZE))
        ]
        taking.set_result(Taken(groups, ready=0, running=0, dropped=0))
        return taking

    def _has_arrived(self, taking: concurrent.futures.Future, batch: int, since: float) -> bool:
        return True

    def _count(self, taken: Taken, version: int) -> list[float]:
        shape = self._routes.server_shape
        own = count_samples(taken, version, None if shape is None else shape.experts)
        return [float(own.get(name, 0)) for name in COUNTED]

    def _origin(self, group: Group) -> None:
        """Nobody asks."""

    def cursor_of_all_replicas(self, batches: int, *, with_last: bool) -> None:
        """There are no prompts."""

    def _share_failures(self) -> None:
        """Nothing fails."""

    def close(self) -> None:
        """Nothing is open."""


def main() -> None:
    asked = json.loads(sys.argv[1])
    parallel, hf = Parallel(**asked["parallel"]), getattr(published, asked["model"])
    start(parallel, asked["rank"])
    layout = compat.layout()
    shape = expert_shape(hf)
    stages = stage_layers(shape, parallel.pipeline)
    routers = SimpleNamespace(
        kind="R3", watch=False, shape=shape, stage_layers=stages, layers=stages[layout.pp_rank]
    )
    routes = ReplayedRoutes(routers, layout)
    longest, share = asked["tokens"], asked["samples"]
    lengths = np.clip(
        np.random.default_rng(0).lognormal(np.log(longest / 2), 0.6, (layout.dp_size, share)),
        2 * PROMPT,
        longest,
    ).astype(np.int64)
    batch_shape = BatchShape(
        share * layout.dp_size, GROUP_SIZE, 1, longest, packing=PackLimits(2 * longest, ATTENTION_SHARE)
    )
    goes = deal.destinations(lengths.tolist(), batch_shape.packing)
    moved = np.asarray(goes) != np.arange(layout.dp_size)[:, None]
    come = {
        other: [int(n) for n, to in zip(lengths[other], goes[other], strict=True) if to == layout.dp_rank]
        for other in range(layout.dp_size)
    }
    kept = come.pop(layout.dp_rank)
    dealt = [*kept, *(length for other in sorted(come) for length in come[other])]
    samples = (
        [made_sample(int(length), shape) for length in lengths[layout.dp_rank]]
        if layout.is_data_leader
        else []
    )
    names = {
        layout.tp_group: "tensor",
        layout.cp_group: "context",
        layout.tp_cp_group: "stage of a replica",
        layout.pp_group: "stages",
        layout.dp_cp_group: "data x context",
        dist.group.WORLD: "world",
    }
    plant_dealing(lengths, come, shape, layout)
    collect = FakeBatches(samples, layout, batch_shape, routes).collect
    with counted(names, {}, lengths_that_come(dealt)) as counts:
        before = time.thread_time()
        batch = collect(0)
        Packs.balanced(batch, batch_shape, layout)
        seconds = time.thread_time() - before
    routes.given = batch = None
    with counted(names, {}, lengths_that_come(dealt)), HeldBytes() as held:
        batch = collect(0)
    with counted(names, {}, lengths_that_come(dealt)) as without_routes:
        FakeBatches(samples, layout, batch_shape, Routes()).collect(0)
    print(
        json.dumps(
            {
                "is_leader": layout.is_data_leader,
                "is_last": layout.is_last_stage,
                "tokens_of_replica": int(np.sum(dealt)),
                "samples_moved": float(moved.mean()),
                "tokens_moved": float(lengths[moved].sum() / lengths.sum()),
                "interpreter_s": seconds,
                "held": held.most,
                "kept": held.now,
                "groups": counts.table(),
                "without_routes": without_routes.table(),
                "correction": correction(batch, batch_shape, layout, names) if layout.is_last_stage else None,
            }
        )
    )


def expert_shape(hf: dict) -> ExpertShape:
    """What servers of a published model return for a token."""
    layers, dense = hf["num_hidden_layers"], hf.get("first_k_dense_replace", 0)
    experts = hf.get("num_experts") or hf["n_routed_experts"]
    return ExpertShape(layers, tuple(range(dense, layers)), hf["num_experts_per_tok"], experts)


def stage_layers(shape: ExpertShape, stages: int) -> tuple[tuple[int, ...], ...]:
    """The layers with experts of each stage, where stages have about equally many layers."""
    parts = np.array_split(np.arange(shape.num_layers), stages)
    return tuple(tuple(int(layer) for layer in part if layer in shape.layers) for part in parts)


def made_sample(length: int, shape: ExpertShape) -> Trajectory:
    """A sample of so many positions, with routes."""
    response = length + 1 - PROMPT
    routes = torch.empty(length, len(shape.layers), shape.top_k, dtype=shape.dtype)
    routes.copy_(torch.arange(shape.top_k))
    return Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=torch.arange(PROMPT),
        output_ids=torch.arange(response),
        rollout_logprobs=torch.full((response,), -0.5),
        finish_reason="stop",
        weight_versions=(VersionSpan("0", 0, response),),
        cached_tokens=0,
        server="",
        routed_experts=routes,
    )


def lengths_that_come(dealt: list[int]) -> dict:
    """The lengths of a replica's samples, as its leader broadcasts them: alone, or first of five rows."""
    alone = torch.tensor(dealt)
    rows = torch.zeros(5, len(dealt), dtype=torch.float64)
    rows[0] = alone
    return {(value.dtype, tuple(value.shape)): value for value in (alone, rows)}


def plant_dealing(
    lengths: np.ndarray, come: dict[int, list[int]], shape: ExpertShape, layout: Layout
) -> None:
    """Let the lengths of all replicas be gathered, and the samples come that others send to this one."""
    gather, exchange = deal.all_gather_stacked, deal._exchange_samples
    pickles = {}
    if layout.is_data_leader:
        pickles = {
            other: torch.frombuffer(
                bytearray(pickle.dumps([deal.Rewarded(made_sample(n, shape), 0.5) for n in own])),
                dtype=torch.uint8,
            )
            for other, own in come.items()
            if own
        }

    def gathered(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        gather(own, group)
        return torch.from_numpy(lengths)[:, None].repeat_interleave(layout.cp_size, dim=0)

    def exchanged(arriving: dict, go: dict, ranks: dict, layout: Layout) -> None:
        exchange(arriving, go, ranks, layout)
        for other, tensor in arriving.items():
            tensor.copy_(pickles[other] if tensor.dtype == torch.uint8 else len(pickles[other]))

    deal.all_gather_stacked, deal._exchange_samples = gathered, exchanged


def correction(batch: RolloutBatch, shape: BatchShape, layout: Layout, names: dict) -> dict:
    """What a correction and its metrics ask of process groups: as they are, and with 1,000 metrics more."""
    old = OldPass(batch.rollout_logprobs + 0.01, entropy=batch.rollout_logprobs.clone())
    found = {}
    for more in (0, 1000):
        with counted(names, {}) as counts:
            inputs = make_loss_inputs(
                batch, old, CORRECTION, layout.groups, group_size=GROUP_SIZE, seq_length=shape.seq_length
            )
            metrics: dict[str, Metric] = batch_metrics(batch, inputs.correction, old.entropy, layout.groups)
            zero = torch.zeros(1, dtype=torch.float64)
            metrics |= {f"made_up/{i}": (Sum if i % 2 else Max)(zero) for i in range(more)}
            all_reduce_metrics(metrics, layout.dp_cp_group)
        found[str(more)] = {"metrics": len(metrics), "groups": collectives_of(counts)}
    return found


def collectives_of(counts: Counts) -> dict[str, dict[str, int]]:
    """Calls and bytes, by "operation over group"."""
    return {name: {"calls": one["calls"], "bytes": one["sent"]} for name, one in counts.table().items()}


if __name__ == "__main__":
    main()
