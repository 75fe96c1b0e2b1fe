"""Makes the batches of test_batch.py in a process that can import Megatron, and saves them:
batch_worker.py FILE.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.engines.trajectory import Support, Trajectory, VersionSpan
from megatron_rl_corr.mcore.batch.microbatch import LossInputs
from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch
from megatron_rl_corr.mcore.batch.sampling_masks import cut_sampling_masks, scatter_sampling_masks
from megatron_rl_corr.mcore.batch.slices import share_batch
from megatron_rl_corr.mcore.loss import make_loss_inputs
from megatron_rl_corr.mcore.scoring import OldPass
from megatron_rl_corr.mcore.step_metrics import batch_metrics
from megatron_rl_corr.reduce.collectives import ParallelGroups, all_reduce_metrics
from tools.local_server import free_port

NAN = float("nan")
LENGTH = 5


def sample(
    prompt_index: int, prompt: list[int], output: list[int], logprobs: list[float], *versions: str
) -> Trajectory:
    ends = [*range(1, len(versions)), len(output)]  # a token each, and the rest
    spans = tuple(
        VersionSpan(version, i, end) for (i, version), end in zip(enumerate(versions), ends, strict=True)
    )
    return Trajectory(
        prompt_index=prompt_index,
        sample_index=0,
        prompt_ids=torch.tensor(prompt),
        output_ids=torch.tensor(output, dtype=torch.int64),
        rollout_logprobs=torch.tensor(logprobs),
        finish_reason="stop",
        weight_versions=spans,
        cached_tokens=0,
        server="http://127.0.0.1:1",
    )


SAMPLES = [
    sample(0, [11, 12, 13], [21, 22], [-0.1, NAN], "7"),
    sample(0, [14], [], [], "7"),  # aborted before its first token
    sample(1, [15, 16], [31, 32, 33, 34], [-0.3, -0.4, -0.5, -0.6], "5", "6"),  # fills the row
    sample(1, [17, 18], [41], [-0.7], "4"),
]


def episode(
    prompt_index: int, prompt: list[int], output: list[int], logprobs: list[float], turn_ids: list[int]
) -> Trajectory:
    whole = sample(prompt_index, prompt, output, logprobs, "7")
    return replace(whole, turn_ids=torch.tensor(turn_ids))


EPISODES = [
    episode(0, [11, 12], [21, 22, 91, 23], [-0.1, -0.2, NAN, -0.3], [0, 0, -1, 1]),
    episode(0, [14], [31, 92, 93, 32, 94, 33], [-0.4, NAN, NAN, -0.5, NAN, -0.6], [0, -1, -1, 1, -1, 2]),
    sample(1, [15], [41], [-0.7], "7"),
    episode(1, [16], [51], [-0.8], [0]),
]


def drawn_from(sample: Trajectory, *sets: list[int]) -> Trajectory:
    lengths = torch.tensor([len(ids) for ids in sets], dtype=torch.int32)
    ids = torch.tensor([i for ids in sets for i in ids], dtype=torch.int32)
    return replace(sample, support=Support(ids, lengths))


TRUNCATED = [
    drawn_from(EPISODES[0], [21, 5], [22], [91], [7, 23, 1]),
    drawn_from(EPISODES[1], [31], [92], [93], [32, 2], [94], [33]),
    drawn_from(EPISODES[2], [41, 40, 42, 43]),
    drawn_from(EPISODES[3], [51]),
    sample(1, [14], [], [], "7"),  # aborted before its first token
]


def plain(parts: list) -> list:
    return [(lengths.view(-1, 8 // len(parts)).tolist(), ids.tolist()) for lengths, ids in parts]


def support_errors() -> list[str]:
    """Of a sample without sampling_masks, and of one whose second token is not among its own."""
    found = []
    for bad in (EPISODES[0], drawn_from(EPISODES[0], [21, 5], [23, 24], [91], [23])):
        try:
            cut_sampling_masks([*TRUNCATED[1:], bad], range(0, 41, 8), 1)
        except ValueError as error:
            found.append(str(error))
    return found


def turns(layout: SimpleNamespace, cp: dist.ProcessGroup | None = None) -> dict:
    """Rows of 8 with up to three turns, corrected by turns, with three policies; of two cp ranks,
    each its columns.
    """
    rank = 0 if cp is None else cp.rank()
    made = None
    if rank == 0:
        made = RolloutBatch.from_trajectories(
            EPISODES, torch.arange(4.0), length=8, version=7, multiple=8, num_turns=3
        )
    batch = share_batch(made, 4, layout, multiple=8, num_turns=3)
    log_ratio = torch.full((4, 8), 50.0)  # nobody may look at it outside the mask
    log_ratio[0, [1, 2, 4]] = torch.tensor([0.1, -0.35, 0.5])
    log_ratio[1, [0, 3, 5]] = torch.tensor([0.2, -0.4, 0.9])
    log_ratio[2:, 0] = 0.0
    config = RolloutCorrectionConfig(
        rollout_is="turn", rollout_is_upper=1.5, rollout_rs=(RejectionRule("turn_mean", "ratio", 0.7, 1.7),)
    )
    groups = ParallelGroups(cp=cp, dp_cp=cp)
    old = batch.rollout_logprobs + log_ratio[batch.seq_ids, batch.positions]
    targets = make_loss_inputs(batch, OldPass(old), config, groups, group_size=2)
    return {
        "batch": fields(batch),
        "weights": targets.correction.weights.view(4, -1),
        "mask": targets.correction.mask.view(4, -1),
        "metrics": all_reduce_metrics(batch_metrics(batch, targets.correction, None, groups), cp),
    }


def two_ranks(rank: int, port: int, path: str) -> None:
    """`turns` of each of two context-parallel ranks, where only the first has the samples:
    saved in `path`.RANK.
    """
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    cp, own = dist.group.WORLD, [dist.new_group([other]) for other in range(2)][rank]
    layout = SimpleNamespace(
        pp_rank=0,
        tp_cp_group=cp,
        pp_group=own,
        cp_group=cp,
        tp_group=own,
        pp_size=1,
        cp_size=2,
        is_last_stage=True,
        replica_rank=lambda stage, context: context,
    )
    sampling_masks = {}
    # Of the last two no token is on the second rank.
    for name, samples in (("all", TRUNCATED), ("last", TRUNCATED[3:])):
        parts = cut_sampling_masks(samples, range(0, 8 * len(samples) + 1, 8), 2) if rank == 0 else None
        mine = scatter_sampling_masks(parts, 4 * len(samples), layout=layout)
        sampling_masks[name] = {
            "ids": mine.ids,
            "offsets": mine.offsets,
            "host": torch.from_numpy(mine.host_offsets),
        }
    torch.save(turns(layout, cp) | {"sampling_masks": sampling_masks}, f"{path}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def fields(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    """The batch, its tokens as rows; tensors alone can be read again."""
    rows = {
        name: value.view(batch.num_sequences, -1)
        for name, value in vars(batch).items()
        if isinstance(value, torch.Tensor) and len(value) == len(batch.tokens)
    }
    rows["padding"] = batch.padding.view(batch.num_sequences, -1)
    return {name: value for name, value in vars(batch).items() if not isinstance(value, np.ndarray)} | rows


def error_of(output_tokens: int) -> str:
    long = sample(0, [1, 2, 3], list(range(output_tokens)), [-1.0] * output_tokens, "1")
    try:
        RolloutBatch.from_trajectories([long], torch.ones(1), length=LENGTH, version=1, multiple=LENGTH)
    except ValueError as error:
        return str(error)
    return "accepted"


def cut(batch: RolloutBatch) -> list[dict]:
    """Microbatches of two rows with targets that are numbered through."""
    tokens = len(batch.tokens)
    numbers = torch.arange(tokens, dtype=torch.float32)
    correction = compute_correction(
        -numbers,
        -numbers - 0.25,
        batch.loss_mask,
        batch.seq_ids,
        num_sequences=4,
        config=RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=2.0),
    )
    made = LossInputs(
        numbers - 0.25,
        batch.loss_mask,
        batch.loss_mask,
        numbers + 100,
        correction,
        numbers + 200,
        numbers,
    )
    micros = Packs.of_rows(batch, 2, LENGTH).microbatches(made)
    return [
        {
            "tokens": micro.tokens,
            "labels": micro.labels,
            "position_ids": micro.position_ids,
            "old_logprobs": micro.loss_inputs.old_logprobs,
            "advantages": micro.loss_inputs.advantages,
            "mask": micro.loss_inputs.correction.mask,
            "valid_tokens": micro.loss_inputs.correction.valid_tokens,
        }
        for micro in micros
    ]


def targets(batch: RolloutBatch) -> dict:
    """Two groups of two; the rule rejects row 0 (D = 3), row 1 has no tokens, rows 2 and 3 agree (D = 0)."""
    old = batch.rollout_logprobs.nan_to_num(0.0)
    old[2] += 3
    config = RolloutCorrectionConfig(
        rollout_rs=(RejectionRule("seq_mean", "ratio", 0.5, 2.0),), advantage="group_mean"
    )
    made = make_loss_inputs(batch, OldPass(old), config, ParallelGroups(), group_size=2)
    entropy = torch.arange(20, dtype=torch.float32)
    metrics = batch_metrics(batch, made.correction, entropy, ParallelGroups())
    return {
        "advantages": made.advantages,
        "mask": made.correction.mask,
        "metrics": {name: metric.value() for name, metric in metrics.items()},
    }


def main(path: str) -> None:
    rewards = torch.tensor([1.0, 5.0, 2.0, 4.0])
    batch = RolloutBatch.from_trajectories(SAMPLES, rewards, length=LENGTH, version=7, multiple=LENGTH)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    layout = SimpleNamespace(
        pp_rank=0,
        pp_size=1,
        cp_size=1,
        is_last_stage=True,
        tp_cp_group=alone,
        pp_group=alone,
        cp_group=alone,
        tp_group=alone,
    )
    torch.save(
        {
            "batch": fields(batch),
            "seq_ids": batch.seq_ids,
            "broadcast": fields(share_batch(batch, 4, layout, multiple=LENGTH)),
            "fits": error_of(3),
            "too long": error_of(4),
            "microbatches": cut(batch),
            "without targets": [one.loss_inputs for one in Packs.of_rows(batch, 1, LENGTH).microbatches()],
            "targets": targets(batch),
            "turns": turns(layout),
            "support errors": support_errors(),
            "cut": {cp: plain(cut_sampling_masks(TRUNCATED, range(0, 41, 8), cp)) for cp in (1, 2, 4)},
        },
        path,
    )
    start_processes(two_ranks, (free_port(), path), 2, start_method="fork")


if __name__ == "__main__":
    main(sys.argv[1])
