"""A tiny DeepSeek-V3 with its MTP layer in real Megatron: logits, exports, and the gradients of
one corrected step.

mtp_worker.py 1|4 MODEL_DIR SAMPLES.pt OUT  (4: TP 2, PP 2, EP 2) saves OUT.RANK with each rank's results:
both kinds of logits, the exported tensors, gradients of each of CASES; and writes OUT.hf, a folder as
--rollout-save-hf makes it of trained weights, OUT.megatron, a Megatron checkpoint of those, and
OUT.without.* of a model without the layer.
"""

import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hf_models_worker import all_gather_logits, arguments, build
from layout_cases import CONFIGS, LENGTH
from layout_worker import (
    assert_changes_are_exact,
    gradient_exporter,
    replica_batch,
    step,
    whole_gradients,
)
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.argument_utils import core_transformer_config_from_args
from torch.multiprocessing import start_processes

from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.forward import LogprobSettings, compute_log_probs
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.hf_folder import UnfinishedFolder
from megatron_rl_corr.models.names import NameTable
from megatron_rl_corr.models.shards import load_shards, local_parameters
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.weight_sync.export import StageExporter, write_stage
from tools.local_server import free_port

FACTOR = 0.3
MTP = ["--mtp-num-layers", "1", "--mtp-detach-heads", "--mtp-loss-scaling-factor", str(FACTOR)]
CASES = {
    "without": [],
    "with": MTP,
    "attached": [*MTP[:2], *MTP[3:]],
    "recomputed": [
        *MTP,
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        "1",
    ],
}
"""Of the gradients."""
MICROBATCHES = 4


def load(checkpoint, extra):
    """As Megatron's own script builds the model, with the checkpoint's weights."""
    args = arguments(checkpoint.config, extra=extra)
    config, spec = core_transformer_config_from_args(args), None
    if args.mtp_num_layers:
        layers = get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, normalization=args.normalization
        )
        spec = get_gpt_mtp_block_spec(config, layers.layer_specs[-1], use_transformer_engine=True)
    model = build(args, config, mtp_block_spec=spec)
    table = NameTable(checkpoint.config, padded_vocab_size=args.padded_vocab_size)
    parameters = local_parameters(
        [model], table, experts_per_rank=args.num_experts // args.expert_model_parallel_size
    )
    load_shards(parameters, checkpoint, compat.layout(sequence_parallel=args.sequence_parallel).shard)
    return args, config, model, parameters


def both_logits(model, tokens, layout):
    """The policy's logits, and those of the MTP layer, on the last stage."""
    if not layout.is_last_stage:
        all_gather_logits(model, tokens, layout)
        return None
    made = []
    # Copies: Megatron's cross entropy makes probabilities of its logits.
    hook = model.output_layer.register_forward_hook(
        lambda module, given, output: made.append(output[0].clone())
    )
    policy = all_gather_logits(model, tokens, layout)
    hook.remove()
    assert len(made) == 2 * len(tokens), "the MTP layer's logits come before the policy's"
    shard = torch.cat(made[::2], dim=1).contiguous()
    shards = [torch.empty_like(shard) for _ in range(layout.tp_group.size())]
    dist.all_gather(shards, shard, group=layout.tp_group)
    return policy, torch.cat(shards, dim=-1).transpose(0, 1)[..., : policy.shape[-1]]


def gradients(config, model, parameters, layout, samples, vocab_size):
    """Whole gradients of this stage after one corrected step, on its sender."""
    wrapped = [
        DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model.train()
        )
    ]
    config.finalize_model_grads_func = finalize_model_grads
    batch, _ = replica_batch(samples, layout)
    settings = LogprobSettings(layout.tp_group, 1.0, vocab_size, before_copies=True)
    packs = Packs.of_rows(batch, batch.num_sequences // MICROBATCHES, LENGTH)
    scored = compute_log_probs(wrapped, packs, settings, routes=Routes())
    step(
        wrapped,
        layout,
        CONFIGS["once token"],
        packs,
        scored,
        settings,
        config,
        updates=1,
        in_loss=True,
    )
    trained = [p for p in parameters if not p.local_name.endswith("expert_bias")]
    found = whole_gradients(trained, layout)
    assert_changes_are_exact(gradient_exporter(trained, layout))
    return found


def exporter_of(parameters, layout):
    return StageExporter(
        parameters, layout.shard, layout.stage_groups, stage=layout.pp_rank, num_stages=layout.pp_size
    )


def save_trained(model, parameters, layout, checkpoint, out):
    """Weights after a step that adds 1 to all, as --rollout-save-hf writes them, and as
    Megatron saves them.
    """
    with torch.no_grad():
        for parameter in parameters:
            parameter.tensor.add_(1)
    folder = UnfinishedFolder(Path(f"{out}.hf"), {"step": 1})
    if dist.get_rank() == 0:
        folder.begin()
    dist.barrier()
    assert write_stage(folder.path, exporter_of(parameters, layout)) is None
    dist.barrier()
    if dist.get_rank() == 0:
        folder.finish(checkpoint)
    saved = Path(f"{out}.megatron")
    saved.mkdir(exist_ok=True)
    dist_checkpointing.save(model.sharded_state_dict(), str(saved))


def task(path, samples, out):
    checkpoint = HFCheckpoint(path)
    size = dist.get_world_size()
    parts = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
    }
    ps.initialize_model_parallel(**(parts if size == 4 else {}), expert_tensor_parallel_size=1)
    model_parallel_cuda_manual_seed(1)
    vocab_size, found = checkpoint.config["vocab_size"], {}
    for case, extra in CASES.items():
        args, config, model, parameters = load(checkpoint, extra)
        layout = compat.layout(sequence_parallel=args.sequence_parallel)
        found[case] = gradients(config, model, parameters, layout, samples["samples"], vocab_size)
    args, config, model, parameters = load(checkpoint, [])
    save_trained(model, parameters, layout, checkpoint, f"{out}.without")
    args, config, model, parameters = load(checkpoint, MTP)
    found["logits"] = both_logits(model, samples["tokens"], layout)
    exporter = exporter_of(parameters, layout)
    units = [[(name, tensor.clone()) for name, tensor in unit] for unit in exporter.units()]
    found["sent"] = {name: tensor for unit in units for name, tensor in unit}
    found["units"] = [[name for name, _ in unit] for unit in units]
    planned = exporter.planned()
    assert not exporter.sends or planned == {
        name: list(tensor.shape) for name, tensor in found["sent"].items()
    }
    found["sent"] = found["sent"] if exporter.sends else {}
    save_trained(model, parameters, layout, checkpoint, out)
    return found


def rank_main(rank, size, port, path, samples, out):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    get_write_results_queue("fork")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    torch.save(task(path, samples, out), f"{out}.{rank}")
    dist.barrier()
    for writer in multiprocessing.active_children():  # of the checkpoint: os._exit would leave them behind
        writer.terminate()
    os._exit(0)  # Megatron's leftovers may wait for each other at interpreter exit


def main(size, path, samples, out):
    arguments = (int(size), free_port(), Path(path), torch.load(samples, weights_only=True), out)
    start_processes(rank_main, arguments, int(size), start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
