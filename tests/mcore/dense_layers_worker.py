"""Replay in a model of dense and sparse layers and multi-token prediction: what test_router_replay.py expects of it."""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.router_replay import Replay
from megatron_rl_corr.rollout.local_server import free_port

LENGTH, ROWS = 8, 2


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    ps.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, bias_dropout_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False, num_moe_experts=8,
        moe_router_topk=2, moe_ffn_hidden_size=16, moe_token_dispatcher_type="alltoall", moe_router_dtype="fp32",
        moe_router_load_balancing_type="none", moe_layer_freq=[0, 1, 0, 1], mtp_num_layers=1,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=64, max_sequence_length=LENGTH, parallel_output=True,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec.layer_specs[-1], use_transformer_engine=False),
    )  # fmt: skip
    replay = Replay("R3", [model], compat.layout(), num_layers=4)
    routes = torch.rand(ROWS, LENGTH, 2, 8).topk(2).indices.to(torch.uint8)
    used = {}
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda _, inputs, output, name=name: used.update({name: output[1]}))
    ids = torch.randint(0, 64, (ROWS, LENGTH))
    with replay.training(routes):
        replay.arm(model, 0, ROWS)
        model(ids, torch.arange(LENGTH).expand(ROWS, LENGTH), None, labels=ids)
    expected = torch.zeros(ROWS, LENGTH, 2, 8, dtype=torch.bool).scatter(3, routes.long(), True)
    same = {
        name: [torch.equal(chosen.view(LENGTH, ROWS, 8).transpose(0, 1), expected[:, :, place]) for place in range(2)]
        for name, chosen in used.items()
    }  # fmt: skip
    print("RESULT " + json.dumps({"layers": replay.layers, "shape": replay.shape.layers, "same": same}))


if __name__ == "__main__":
    main()
