"""Replay in models of dense and sparse layers: what test_router_replay.py expects of it.

Of one process with multi-token prediction, and of two pipeline stages, of which the first has
dense layers only.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.multiprocessing import start_processes

from megatron_rl_corr.engines.routes import no_routes
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.moe import routes as routes_module
from megatron_rl_corr.moe.replay import ReplayedRouters
from megatron_rl_corr.moe.routes import ReplayedRoutes
from megatron_rl_corr.moe.statistics import token_values
from tools.local_server import free_port

sys.path.insert(0, str(Path(__file__).parent))
from replay_worker import keeping

LENGTH, ROWS, EXPERTS, TOP_K = 8, 2, 8, 2
PLACES = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH).t()


def made_model(layer_freq, *, rank=0, stages=1, mtp=False):
    torch.set_num_threads(1)
    ps.initialize_model_parallel(pipeline_model_parallel_size=stages)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=48,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=16,
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_layer_freq=layer_freq,
        mtp_num_layers=1 if mtp else None,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    predicts = {}
    if mtp:
        predicts["mtp_block_spec"] = get_gpt_mtp_block_spec(
            config, spec.layer_specs[-1], use_transformer_engine=False
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=64,
        max_sequence_length=LENGTH,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        pre_process=rank == 0,
        post_process=rank == stages - 1,
        **predicts,
    )


def several_tokens():
    """Which experts each router used, beside those that were to be replayed."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    model = made_model([0, 1, 0, 1], mtp=True)
    replay = ReplayedRouters("R3", [model], compat.layout(), num_layers=4)
    routes = torch.rand(ROWS, LENGTH, 2, EXPERTS).topk(TOP_K).indices.to(torch.uint8)
    used = {}
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda _, inputs, output, name=name: used.update({name: output[1]}))
    ids = torch.randint(0, 64, (ROWS, LENGTH))
    with replay.training(torch.cat([routes.flatten(0, 1), no_routes(replay.shape, 1)])):
        replay.before_forward(model, PLACES)
        model(ids, torch.arange(LENGTH).expand(ROWS, LENGTH), None, labels=ids)
    expected = torch.zeros(ROWS, LENGTH, 2, EXPERTS, dtype=torch.bool).scatter(3, routes.long(), True)
    same = {
        name: [
            torch.equal(chosen.view(LENGTH, ROWS, 8).transpose(0, 1), expected[:, :, place])
            for place in range(2)
        ]
        for name, chosen in used.items()
    }
    print("RESULT " + json.dumps({"layers": replay.layers, "shape": replay.shape.layers, "same": same}))


def dense_stage(rank, port):
    """Each stage's expert table, and whether the routes were found to be those of the tokens,
    by kind of replay.
    """
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model, layout = made_model([0, 0, 1, 1], rank=rank, stages=2), compat.layout()
    generator = torch.Generator().manual_seed(2)
    packed = torch.rand(ROWS, LENGTH, 2, EXPERTS, generator=generator).topk(TOP_K).indices.to(torch.uint8)
    ones = torch.ones(ROWS * LENGTH)
    values = token_values(ones.bool(), ones, ones, ones.bool()) if rank == 1 else None
    results = {}
    for kind in ("R3", "off"):
        replay = ReplayedRouters(kind, [model], layout, num_layers=4, watch=True)
        routes = ReplayedRoutes(replay, layout, min_agreement=-1.0)
        routes.scatter(list(packed) if rank == 0 else None, [0, LENGTH, 2 * LENGTH])
        seq_ids, positions = torch.arange(ROWS).repeat_interleave(LENGTH), torch.arange(LENGTH).repeat(ROWS)
        routes.begin_batch(seq_ids, positions, samples=ROWS, compare_in_training=False)
        with torch.no_grad(), routes.scoring():
            routes.before_forward(model, PLACES)
            forward(model, rank)
        metrics = routes.measure_agreement(1, str)
        apart = routes.measure_disagreement()
        tables = []
        with keeping(routes_module, "expert_table", tables.append):
            routes.write_statistics(1, values)
        [table] = tables
        results[kind] = {
            "layers": replay.layers,
            "stages": replay.stage_layers,
            "table": table.tolist(),
            "metrics": sorted(metrics),
            "apart": None if apart is None else apart.tolist(),
        }
    if rank == 1:
        results["routes"] = packed.tolist()
    stages = [None, None]
    dist.all_gather_object(stages, results)
    if rank == 0:  # one writer: a line and its end may be two writes, and another's line come between
        for stage in stages:
            print("STAGE " + json.dumps(stage), flush=True)
    dist.barrier()
    os._exit(0)  # Megatron's leftovers may wait for each other at interpreter exit


def forward(model, rank):
    ids, positions = torch.zeros(ROWS, LENGTH, dtype=torch.int64), torch.arange(LENGTH).expand(ROWS, LENGTH)
    if rank == 0:
        dist.send(model(ids, positions, None).contiguous(), 1)
    else:
        hidden = torch.empty(LENGTH, ROWS, 32)
        dist.recv(hidden, 0)
        model.set_input_tensor(hidden)
        model(ids, positions, None)


if __name__ == "__main__":
    if sys.argv[1:] == ["stages"]:
        start_processes(dense_stage, (free_port(),), 2, start_method="fork")
    else:
        several_tokens()
