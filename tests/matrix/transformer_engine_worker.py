"""What Megatron makes of a transformer_engine, the stand-in or a wheel: names, attributes, logits, gradients.

transformer_engine_worker.py OUT.pt [FOLDER of the unpacked wheel]  writes "signatures" -> signatures(), and
(case, processes, rank) -> what that rank found.
"""

import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import pkgutil
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing import start_processes

from tools.cpu.process_environment import TRANSFORMER_ENGINE
from tools.local_server import free_port

if len(sys.argv) > 2:  # before Megatron, which asks for it while it is imported
    import real_transformer_engine

    real_transformer_engine.load(sys.argv[2])
    path = TRANSFORMER_ENGINE / "fused_weight_gradient_mlp_cuda.py"  # Apex's, for Megatron's own output layer
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[path.stem])

from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

VOCAB, LENGTH, ROWS = 64, 16, 2
SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": True,
    "layernorm_epsilon": 1e-6,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_shared_expert_intermediate_size": 24,
}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
    "multi_latent_attention": True,
}
CASES = {
    "dense": {"num_query_groups": 2, "kv_channels": 16, "qk_layernorm": True, "add_qkv_bias": True},
    "layernorm and biases": {
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "layernorm_zero_centered_gamma": True,
        "gradient_accumulation_fusion": False,
        "num_query_groups": 2,
    },
    "experts": {"num_query_groups": 2, "qk_layernorm": True, **EXPERTS},
    "packed": {"num_query_groups": 2, "qk_layernorm": True, **EXPERTS},
    "latent": {**LATENT, **EXPERTS},
}
"""Two processes have TP 2 with sequence parallelism, and EP 2 where there are experts."""


def build(case, processes):
    settings = (
        SHAPE | CASES[case] | {"tensor_model_parallel_size": processes, "sequence_parallel": processes > 1}
    )
    if "num_moe_experts" in settings:
        settings |= {"expert_model_parallel_size": processes, "expert_tensor_parallel_size": 1}
    latent = "multi_latent_attention" in settings
    config = (MLATransformerConfig if latent else TransformerConfig)(**settings)
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.num_moe_experts is not None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=10000,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + dist.get_rank())
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    return model


def run(case, model):
    """(logits, gradients by name) of a product with fixed numbers."""
    generator = torch.Generator().manual_seed(3)
    rows = (1, ROWS * LENGTH) if case == "packed" else (ROWS, LENGTH)
    tokens = torch.randint(0, VOCAB, rows, generator=generator)
    packed = None
    if case == "packed":
        boundaries = torch.tensor([0, 5, 17, ROWS * LENGTH], dtype=torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=15,
            max_seqlen_kv=15,
        )
    positions = torch.arange(rows[1])[None]
    logits = model(tokens, positions, None, packed_seq_params=packed)
    factors = torch.randn(logits.shape, generator=generator)
    (logits * factors).sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        own = 0 if parameter.grad is None or parameter.grad_added_to_main_grad else parameter.grad
        gradients[name] = parameter.main_grad + own
    return logits.detach(), gradients


def parameters(model):
    """Name -> what Megatron reads of a parameter."""
    attributes = (
        "tensor_model_parallel",
        "partition_dim",
        "partition_stride",
        "sequence_parallel",
        "allreduce",
    )
    return {
        name: (tuple(parameter.shape), [getattr(parameter, attribute, None) for attribute in attributes])
        for name, parameter in model.named_parameters()
    }


def kept(model):
    """What a checkpoint of torch's, and what a distributed one holds: names, and what each
    says of its tensor.
    """

    def of(value):
        return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__

    plain = {name: of(value) for name, value in model.state_dict().items()}
    sharded = {}
    for name, value in model.sharded_state_dict().items():
        places = ("key", "global_shape", "global_offset", "local_shape", "axis_fragmentations", "replica_id")
        sharded[name] = [getattr(value, place, None) for place in places]
    return plain, sharded


def rank_main(rank, processes, port, case, out):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    experts = processes if "num_moe_experts" in CASES[case] else 1
    ps.initialize_model_parallel(
        tensor_model_parallel_size=processes,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(1)
    model = build(case, processes)
    plain, sharded = kept(model)
    logits, gradients = run(case, model)
    found = {
        "parameters": parameters(model),
        "plain": plain,
        "sharded": sharded,
        "logits": logits,
        "gradients": gradients,
    }
    torch.save(found, f"{out}.{case}.{processes}.{rank}")
    dist.barrier()
    os._exit(0)


def signatures():
    """Path of a class's method or a function -> [(name, kind, default)], of all that the
    stand-in's modules define.
    """

    def walk(folder, prefix):
        for module in pkgutil.iter_modules([str(folder)]):
            yield f"{prefix}.{module.name}"
            if module.ispkg:
                yield from walk(folder / module.name, f"{prefix}.{module.name}")

    found = {}
    for name in walk(TRANSFORMER_ENGINE / "transformer_engine", "transformer_engine"):
        if importlib.util.find_spec(name) is None:  # a module of the stand-in's own
            continue
        for key, value in vars(importlib.import_module(name)).items():
            if (
                key.startswith("_")
                or not callable(value)
                or "transformer_engine" not in (value.__module__ or "")
            ):
                continue
            parts = {"": value}
            if inspect.isclass(value):
                parts = {
                    f".{part}": method
                    for part, method in inspect.getmembers(value, inspect.isroutine)
                    if part == "__init__"
                    or part in ("forward", "step")
                    or part in vars(value)
                    and not part.startswith("_")
                }
            for part, function in parts.items():
                try:
                    taken = inspect.signature(function).parameters.values()
                except (TypeError, ValueError):
                    continue
                found[f"{name}.{key}{part}"] = [
                    (one.name, one.kind.name, None if one.default is one.empty else repr(one.default))
                    for one in taken
                ]
    return found


if __name__ == "__main__":
    out = sys.argv[1]
    for case in CASES:
        for processes in (1,) if case == "packed" else (1, 2):
            start_processes(rank_main, (processes, free_port(), case, out), processes, start_method="fork")
    everything = {"signatures": signatures()}
    for part in sorted(Path(out).parent.glob(f"{Path(out).name}.*")):
        _, case, processes, rank = part.name.removeprefix(Path(out).name).rsplit(".", 3)
        everything[case, int(processes), int(rank)] = torch.load(part, weights_only=False)
    torch.save(everything, out)
