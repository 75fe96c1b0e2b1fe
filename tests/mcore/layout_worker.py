"""Loss, gradients and metrics of one corrected step under several layouts against a saved reference; run by torchrun.

layout_worker.py MODEL_DIR REFERENCE.pt '{"tp": 2, "sp": true}' ...  prints one JSON line of errors for each.
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
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl_corr.config import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch import RolloutBatch, microbatches
from megatron_rl_corr.mcore.forward_step import make_forward_step
from megatron_rl_corr.mcore.loss import CorrectedLoss, LogprobSettings
from megatron_rl_corr.mcore.scoring import score
from megatron_rl_corr.mcore.targets import batch_metrics, make_targets
from megatron_rl_corr.parallel.groups import ParallelGroups
from megatron_rl_corr.parallel.reduce import all_gather_metrics, merge
from megatron_rl_corr.rollout.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.weight_sync.export import StageExporter
from megatron_rl_corr.weight_sync.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.weight_sync.names import NameTable
from megatron_rl_corr.weight_sync.shards import load_shards, local_parameters

LENGTH, GROUP_SIZE, PADDED_VOCAB = 20, 4, 96
CONFIG = RolloutCorrectionConfig(
    rollout_is="token", rollout_is_upper=1.02, rollout_rs=(RejectionRule("seq_mean", "ratio", 0.98, 1.03),)
)


def transformer_config(hf, layout, per_token):
    return TransformerConfig(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"], ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"], num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"], num_moe_experts=hf.get("num_experts") or hf["num_local_experts"],
        moe_router_topk=hf["num_experts_per_tok"], moe_ffn_hidden_size=hf["moe_intermediate_size"],
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", moe_router_dtype="fp32",
        normalization="RMSNorm", layernorm_epsilon=hf["rms_norm_eps"], qk_layernorm=True, gated_linear_unit=True,
        activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
        attention_softmax_in_fp32=True, use_cpu_initialization=True, pipeline_dtype=torch.float32,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, calculate_per_token_loss=per_token,
        tensor_model_parallel_size=layout.get("tp", 1), sequence_parallel=layout.get("sp", False),
        pipeline_model_parallel_size=layout.get("pp", 1), expert_model_parallel_size=layout.get("ep", 1),
        expert_tensor_parallel_size=layout.get("etp", 1),
    )  # fmt: skip


def build(hf, config):
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
        ),
        vocab_size=PADDED_VOCAB, max_sequence_length=LENGTH, parallel_output=True,
        pre_process=ps.is_pipeline_first_stage(), post_process=ps.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False, position_embedding_type="rope", rotary_base=10000,
    )  # fmt: skip
    model.model_type = ModelType.encoder_or_decoder
    return model


def replica_batch(samples, layout):
    """This data-parallel replica's rows, as the collector would make them."""
    share = len(samples) // layout.dp_size
    mine = samples[layout.dp_rank * share : (layout.dp_rank + 1) * share]
    first_group = mine[0]["group"]
    trajectories = [
        Trajectory(
            prompt_index=s["group"] - first_group, sample_index=0, prompt_ids=s["prompt"], output_ids=s["output"],
            rollout_logprobs=s["rollout"].float(), finish_reason="length",
            weight_versions=(VersionSpan("0", 0, len(s["output"])),), cached_tokens=0, server="http://none",
        )
        for s in mine
    ]
    rewards = torch.tensor([s["reward"] for s in mine], dtype=torch.float32)
    batch = RolloutBatch.from_trajectories(trajectories, rewards, length=LENGTH, version=0)
    shift = torch.zeros(len(mine), LENGTH)
    for row, s in enumerate(mine):
        start = len(s["prompt"]) - 1
        shift[row, start : start + len(s["output"])] = s["old_shift"].float()
    return batch.broadcast(layout), shift.view(-1)


def run(model_dir, reference, spec):
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(
        tensor_model_parallel_size=spec.get("tp", 1), pipeline_model_parallel_size=spec.get("pp", 1),
        expert_model_parallel_size=spec.get("ep", 1), expert_tensor_parallel_size=spec.get("etp", 1),
    )
    model_parallel_cuda_manual_seed(1)
    layout, checkpoint = compat.layout(), HFCheckpoint(model_dir)
    per_token, micro = spec.get("per_token", False), spec.get("micro", 2)
    config = transformer_config(checkpoint.config, spec, per_token)
    chunk = build(checkpoint.config, config)
    table = NameTable(checkpoint.config, padded_vocab_size=PADDED_VOCAB)
    parameters = local_parameters([chunk], table, experts_per_rank=config.num_moe_experts // spec.get("ep", 1))
    load_shards(parameters, checkpoint, layout.shard)
    model = [DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk)]
    config.finalize_model_grads_func = finalize_model_grads

    batch, shift = replica_batch(reference["samples"], layout)
    settings = LogprobSettings(layout.tp_group, 1.0, checkpoint.config["vocab_size"])
    groups = ParallelGroups(cp=layout.cp_group, dp_cp=layout.dp_cp_group)
    scored, targets, metrics = score(model, batch, settings, micro_batch_size=micro), None, {}
    if scored is not None:
        targets = make_targets(batch, scored[0] + shift, CONFIG, groups, group_size=GROUP_SIZE)
        metrics = batch_metrics(batch, targets, scored[1])
    rows = len(batch.tokens)
    loss = CorrectedLoss(
        CONFIG, settings, num_microbatches=rows // micro, dp_size=layout.dp_size, per_token=per_token,
        global_positions=len(reference["samples"]) * LENGTH,
    )
    model[0].zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=make_forward_step(loss), data_iterator=microbatches(batch, micro, targets), model=model,
        num_microbatches=rows // micro, seq_length=LENGTH, micro_batch_size=micro, forward_only=False,
    )
    metrics |= merge(loss.metrics)
    numbers = all_gather_metrics(metrics, layout.dp_cp_group) if layout.is_last_stage else {}
    return numbers, whole_gradients(parameters, layout)


def whole_gradients(parameters, layout):
    """Hugging Face names -> whole gradients of this stage, on its sender: the exporter run over main_grad."""
    from dataclasses import replace

    grads = [replace(p, tensor=p.tensor.main_grad) for p in parameters]
    exporter = StageExporter(grads, layout.shard, layout.stage_groups, stage=layout.pp_rank, num_stages=layout.pp_size)
    tensors = {name: tensor.clone() for name, tensor in exporter.tensors()}
    return tensors if exporter.sends else {}


def errors(reference, numbers, grads):
    worst = {
        name: float((grads[name].double() - grad).norm() / grad.norm().clamp(min=1e-6))
        for name, grad in reference["grads"].items()
    }
    name = max(worst, key=worst.get)
    checked = {"policy": "policy", "clip_fraction": "clip_fraction", "kept_fraction": "rollout_corr/kept_fraction",
               "kept_sequence_fraction": "rollout_corr/kept_sequence_fraction"}
    return {
        "gradient": worst[name], "worst": name, "parameters": len(worst),
        "metrics": {key: abs(numbers[ours] - reference[key]) for key, ours in checked.items()},
        "numbers": numbers,
    }


def main(model_dir, reference_path, *specs):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    reference = torch.load(reference_path, weights_only=True)
    for spec in map(json.loads, specs):
        numbers, grads = run(model_dir, reference, spec)
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, (numbers, grads))
        if dist.get_rank() == 0:
            merged = {name: grad for _, part in everything for name, grad in part.items()}
            last = next(found for found, _ in reversed(everything) if found)
            print("RESULT " + json.dumps({"layout": spec, **errors(reference, last, merged)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Megatron's leftovers may wait for each other at interpreter exit


if __name__ == "__main__":
    main(*sys.argv[1:])
