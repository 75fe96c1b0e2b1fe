"""Replays given keys in the sparse attention of real Megatron ranks.

indexer_replay_worker.py MODEL_DIR [recompute]  on 1 or 4 ranks (TP 2 with sequence parallelism, PP 2, EP 2)
saves MODEL_DIR/replayed-RANKS[-recompute]-STAGE.pt: the logits with the keys of MODEL_DIR/keys.pt, the
gradients, Megatron's own logits before and after, and metrics.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hf_models_worker import all_gather_logits, arguments, inputs_of, load
from layout_worker import whole_gradients
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from tiny_models import LENGTH, ROWS

from megatron_rl_corr.features.indexer_replay.feature import FEATURE
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.moe.routes import Routes

TOKENS = ROWS * LENGTH


def places(row):
    return torch.arange(LENGTH)[:, None] + row * LENGTH


def gradients(model, layout, parameters, reference, routes):
    """As hf_models_worker's, of passes that are steered."""
    rank, size = layout.tp_group.rank(), layout.tp_group.size()
    columns = reference["pull"].shape[-1]
    model.config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, settings, model.train())

    def forward_step(iterator, chunk):
        number, row = next(iterator)
        routes.before_forward(model, places(number))

        def loss(logits):
            own = logits.shape[-1]
            pull = torch.nn.functional.pad(reference["pull"][number], (0, own * size - columns))
            pulled = (logits[0] * pull[:, rank * own : (rank + 1) * own]).sum()
            return pulled, {"pulled": pulled.detach()}

        return chunk(*inputs_of(row)), loss

    with routes.training():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=enumerate(reference["tokens"].split(1)),
            model=[wrapped],
            num_microbatches=ROWS,
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
    return whole_gradients([one for one in parameters if one.tensor.requires_grad], layout)


def refusal(args, **given):
    """What the check of a run's flags says."""
    wrong = argparse.Namespace(**vars(args) | {"rollout_indexer_replay": True} | given)
    try:
        FEATURE.check_arguments(wrong)
    except ValueError as error:
        return str(error)


def main(path, *how):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, layout, _, parameters = load(path)
    reference = torch.load(path / "reference.pt", weights_only=True)
    keys, tokens = torch.load(path / "keys.pt", weights_only=True), reference["tokens"]
    args = arguments(HFCheckpoint(path).config)
    if "recompute" in how:
        model.config.recompute_granularity = "full"
        model.config.recompute_method, model.config.recompute_num_layers = "uniform", 1
    before = all_gather_logits(model, tokens, layout)
    routes = FEATURE.steered(FEATURE(None), Routes(), [model], args, layout)
    samples = [row.to(routes.key_shape.dtype) for row in keys]
    routes.scatter_keys(samples if layout.is_data_leader else None, [0, LENGTH, TOKENS])
    positions = torch.arange(LENGTH).repeat(ROWS)
    routes.begin_batch(
        torch.arange(ROWS).repeat_interleave(LENGTH), positions, samples=ROWS, compare_in_training=False
    )

    def steer(row):
        routes.before_forward(model, places(row))

    with routes.scoring():
        logits = all_gather_logits(model, tokens, layout, steer)
    metrics = routes.measure_agreement(1, str)
    found = {
        "layers": routes.stage_layers,
        "logits": logits,
        "before": before,
        "after": all_gather_logits(model, tokens, layout),
        "metrics": {name: one.values.tolist() for name, one in metrics.items()},
        "refused": [
            refusal(args),
            refusal(args, rollout_indexer_replay=False, experimental_attention_variant=None),
            refusal(args, experimental_attention_variant=None),
            refusal(args, dsa_kernel_backend="tilelang"),
            refusal(args, cuda_graph_impl="local"),
            refusal(args, dsa_indexer_topk=LENGTH),
            refusal(args, seq_length=32769),
            refusal(args, rollout_ledger_interval=20),
            refusal(args, router_replay_effect_every=10),
        ],
        "gradients": gradients(model, layout, parameters, reference, routes),
    }
    if layout.tp_group.rank() == 0 and layout.dp_rank == 0:
        name = "-".join(["replayed", str(dist.get_world_size()), *how, str(layout.pp_rank)])
        torch.save(found, path / f"{name}.pt")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
