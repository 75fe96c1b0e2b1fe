"""Tiny random models of families that Megatron-Bridge has and the table lacks, with logits in float64."""

import json
from copy import deepcopy

import torch

LENGTH, ROWS, VOCAB = 48, 2, 90  # as in tiny_models.py
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": VOCAB - 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWED = {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}
MODELS = {
    "deepseek_v2": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "n_group": None,
        "topk_group": None,
    },
    "gemma": {"head_dim": 8},
    "gemma2": WINDOWED,
    "gemma3_text": {**WINDOWED, "num_hidden_layers": 6},
    "minimax_m2": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "mistral": {"head_dim": 8, "sliding_window": None},
    "nemotron": {},
    "olmoe": {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
}
"""`model_type` -> its settings beside SHAPE."""
WITHOUT_TP = ("minimax_m2", "olmoe")
"""Of which Bridge's layers are not right on tensor-parallel ranks."""
OTHER_MODEL = {
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    }
}
"""A family whose model Bridge builds otherwise than transformers."""


def make_bridge_model(kind, folder, save_gradients=lambda *given: None):
    """Save a model whose weights are far from their initial ones, and its logits in float64 in reference.pt.

    save_gradients: of tiny_models.py, where these are wanted.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = SHAPE | (MODELS | OTHER_MODEL)[kind]
    config = AutoConfig.for_model(kind, **settings)
    config._attn_implementation = "eager"
    torch.manual_seed(len(kind))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms and biases
                weight.add_(torch.randn_like(weight) * 0.2)
            else:
                weight.normal_(0, 1 if name.endswith("gate.weight") else 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0, 0.1)
    model.save_pretrained(folder)
    # not 0: transformers takes the gradient of the padding token out of some embeddings
    tokens, pull = torch.randint(1, VOCAB, (ROWS, LENGTH)), torch.randn(ROWS, LENGTH, VOCAB)
    exact = deepcopy(model).double()
    exact.config._experts_implementation = "eager"  # the grouped kernel takes no float64
    with torch.no_grad():
        logits = exact(tokens).logits
    torch.save({"tokens": tokens, "logits": logits, "pull": pull}, folder / "reference.pt")
    save_gradients(model, tokens, pull, folder / "gradients")
    saved = folder / "config.json"
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"torch_dtype": "float32"}))
