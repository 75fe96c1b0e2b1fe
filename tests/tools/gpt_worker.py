"""Loss and gradient norm of one tiny Megatron MoE, a JSON line for each layout; run under
torchrun's variables.

python gpt_worker.py '{"tp": 2, "sp": true}' '{"cp": 2, "packed": true}' ...
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

VOCAB, LENGTH, MICROBATCHES = 64, 16, 2
BOUNDARIES = [0, 4, 16]  # two packed sequences; multiples of 2 * cp


def transformer_config(layout: dict) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=48,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        calculate_per_token_loss=True,
        tensor_model_parallel_size=layout.get("tp", 1),
        sequence_parallel=layout.get("sp", False),
        pipeline_model_parallel_size=layout.get("pp", 1),
        context_parallel_size=layout.get("cp", 1),
        expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", 1),
        recompute_granularity="full" if layout.get("recompute") else None,
        recompute_method="uniform" if layout.get("recompute") else None,
        recompute_num_layers=1 if layout.get("recompute") else None,
    )


def set_weights(model: GPTModel, config: TransformerConfig) -> None:
    """The same weights in every layout: each parameter is its shard of a tensor made from its global name."""
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        expert = "local_experts" in parts
        if expert:
            at = parts.index("local_experts") + 1
            per_rank = config.num_moe_experts // config.expert_model_parallel_size
            parts[at] = str(ps.get_expert_model_parallel_rank() * per_rank + int(parts[at]))
        size = config.expert_tensor_parallel_size if expert else config.tensor_model_parallel_size
        rank = ps.get_expert_tensor_parallel_rank() if expert else ps.get_tensor_model_parallel_rank()
        dimension = getattr(parameter, "partition_dim", -1)
        dimension = dimension if size > 1 and getattr(parameter, "tensor_model_parallel", False) else None
        shape = list(parameter.shape)
        if dimension is not None:
            shape[dimension] *= size
        generator = torch.Generator().manual_seed(
            sum(ord(c) * (i + 1) for i, c in enumerate(".".join(parts)))
        )
        full = torch.randn(shape, generator=generator) * 0.15
        full = 1 + full if "norm" in name else full
        if dimension is not None and "linear_fc1" in name:  # gate and up are split separately
            full = torch.cat(
                [half.chunk(size, dimension)[rank] for half in full.chunk(2, dimension)], dimension
            )
        elif dimension is not None:
            full = full.chunk(size, dimension)[rank]
        parameter.data.copy_(full)


def batches(layout: dict):
    """Microbatches of one row: [1, LENGTH], or this CP rank's part of it."""
    generator = torch.Generator().manual_seed(3)
    dp, cp = ps.get_data_parallel_world_size(), layout.get("cp", 1)
    rows = torch.randint(0, VOCAB, (MICROBATCHES * 2, LENGTH + 1), generator=generator)
    for row in rows[ps.get_data_parallel_rank() :: dp]:
        positions = torch.cat([torch.arange(b - a) for a, b in zip(BOUNDARIES, BOUNDARIES[1:], strict=False)])
        batch = {"tokens": row[:-1], "labels": row[1:], "positions": positions}
        if cp > 1:
            from megatron_rl_corr.reduce.context import zigzag_positions

            kept = zigzag_positions(
                ps.get_context_parallel_rank(), cp, BOUNDARIES if "packed" in layout else [0, LENGTH]
            )
            batch = {key: value[kept] for key, value in batch.items()}
        yield {key: value[None] for key, value in batch.items()}


def forward_step(layout: dict):
    cu_seqlens = torch.tensor(BOUNDARIES, dtype=torch.int32)
    packing = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=12, max_seqlen_kv=12)

    def step(iterator, model):
        batch = next(iterator)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        out = model(
            batch["tokens"],
            batch["positions"],
            None if "packed" in layout else mask,
            labels=batch["labels"],
            **({"packed_seq_params": packing} if "packed" in layout else {}),
        )

        def loss(output):
            return (
                output.sum(),
                torch.tensor(output.numel(), dtype=torch.int),
                {"loss": output.sum().detach().clone()},
            )

        return out, loss

    return step


def run(layout: dict) -> dict:
    names = {
        "tp": "tensor_model",
        "pp": "pipeline_model",
        "cp": "context",
        "ep": "expert_model",
        "etp": "expert_tensor",
    }
    ps.initialize_model_parallel(
        **{f"{name}_parallel_size": layout.get(key, 1) for key, name in names.items()}
    )
    model_parallel_cuda_manual_seed(1)
    config = transformer_config(layout)
    spec = get_gpt_layer_local_spec(
        num_experts=4, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    if "packed" in layout:
        from tools.cpu.cp_attention import ContextParallelAttention

        spec.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    set_weights(model, config)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    config.finalize_model_grads_func = finalize_model_grads
    reports = get_forward_backward_func()(
        forward_step_func=forward_step(layout),
        data_iterator=batches(layout),
        model=ddp,
        num_microbatches=2 * MICROBATCHES // ps.get_data_parallel_world_size(),
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    loss = (
        sum(float(report["loss"]) for report in reports) if ps.get_tensor_model_parallel_rank() == 0 else 0.0
    )
    totals = torch.tensor([loss, *gradient_squares(model)], dtype=torch.float64)
    dist.all_reduce(totals)
    ps.destroy_model_parallel()
    return {"layout": layout, "loss": totals[0].item(), "gradient_norm": totals[1].item() ** 0.5}


def gradient_squares(model: GPTModel) -> list[float]:
    """This rank's share of the squared gradient norm: replicas of a parameter count for a fraction each."""
    world, total = dist.get_world_size(), 0.0
    for name, parameter in model.named_parameters():
        expert = "local_experts" in name
        shards = ps.get_pipeline_model_parallel_world_size()
        if expert:
            shards *= ps.get_expert_model_parallel_world_size() * ps.get_expert_tensor_parallel_world_size()
        elif getattr(parameter, "tensor_model_parallel", False):
            shards *= ps.get_tensor_model_parallel_world_size()
        total += parameter.main_grad.double().square().sum().item() * shards / world
    return [total]


def main() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    for layout in sys.argv[1:]:
        result = run(json.loads(layout))
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
