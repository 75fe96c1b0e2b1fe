"""config.json of published models, as far as the planner and `model_flags` read it, and what their cards say."""

_ROPE = {"rope_theta": 1000000.0, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}

QWEN3_4B = _ROPE | {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_30B_A3B = _ROPE | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
QWEN3_235B_A22B = QWEN3_30B_A3B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "tie_word_embeddings": False,
    "first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_theta": 10000, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1,
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
    "first_k_dense_replace": 1, "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
    "rope_theta": 50000, "max_position_embeddings": 131072, "num_nextn_predict_layers": 0,
}  # fmt: skip
GLM_4_5_AIR = {
    "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "attention_bias": True,
    "use_qk_norm": False, "tie_word_embeddings": False, "first_k_dense_replace": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rope_theta": 1000000, "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1,
}  # fmt: skip
GLM_4_5 = GLM_4_5_AIR | {
    "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92, "use_qk_norm": True,
    "first_k_dense_replace": 3, "n_routed_experts": 160, "moe_intermediate_size": 1536, "routed_scaling_factor": 2.5,
}  # fmt: skip
QWEN2_5_7B = _ROPE | {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
QWEN1_5_MOE = _ROPE | {
    "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936, "tie_word_embeddings": False,
    "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": False,
    "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MIXTRAL_8X7B = _ROPE | {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
LLAMA_2_7B = _ROPE | {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip

CARDS = {
    "Qwen3-4B": (QWEN3_4B, 4.0, 4.0),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.5, 3.3),
    "Qwen3-235B-A22B": (QWEN3_235B_A22B, 235, 22),
    "DeepSeek-V3": (DEEPSEEK_V3, 671, 37),
    "Kimi-K2": (KIMI_K2, 1040, 32.6),
    "GLM-4.5": (GLM_4_5, 355, 32),
    "GLM-4.5-Air": (GLM_4_5_AIR, 106, 12),
    "Qwen2.5-7B": (QWEN2_5_7B, 7.61, 7.61),
    "Qwen1.5-MoE-A2.7B": (QWEN1_5_MOE, 14.3, 2.7),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46.7, 12.9),
    "Llama-2-7B": (LLAMA_2_7B, 6.74, 6.74),
}
"""(config.json, billions of parameters, of them for a token), as published."""
