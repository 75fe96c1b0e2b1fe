"""What SGLang's control answers hold, as far as this package reads them."""

from megatron_rl_corr.engines.answer_types import (
    COUNT,
    DONE,
    FLAG,
    IDS,
    LIST,
    OBJECT,
    OBJECTS,
    OK,
    SCALAR,
    TEXT,
    Fields,
)

FIELDS: dict[str, Fields] = {
    "/server_info": {
        "version": TEXT,
        "dtype": TEXT,
        "device": TEXT,
        "model_path": TEXT.or_null(),
        "load_format": TEXT.or_null(),
        "kv_cache_dtype": TEXT.or_null(),
        "quantization": TEXT.or_null(),
        **dict.fromkeys(
            ("attention_backend", "rl_on_policy_target"),
            TEXT.or_null(),
        ),
        **dict.fromkeys(
            ("speculative_algorithm", "weight_cache_mode", "hicache_storage_backend", "radix_cache_backend"),
            TEXT.or_null(),
        ),
        "tp_size": COUNT,
        "pp_size": COUNT,
        "dp_size": COUNT,
        "ep_size": COUNT,
        **dict.fromkeys(("max_req_input_len", "max_total_num_tokens", "page_size"), COUNT),
        **dict.fromkeys(
            (
                "enable_dp_attention",
                "disable_overlap_schedule",
                "disable_radix_cache",
                "skip_tokenizer_init",
                "enable_deterministic_inference",
                "enable_fp32_lm_head",
                "enable_memory_saver",
                "enable_hierarchical_cache",
                "enable_lmcache",
                "enable_flexkv",
                "enable_unified_cache_external_linker",
            ),
            FLAG,
        ),
        **dict.fromkeys(  # compared with those of other servers
            (
                "moe_runner_backend",
                "moe_a2a_backend",
                "enable_dp_lm_head",
                "moe_dense_tp_size",
                "enable_eplb",
                "ep_num_redundant_experts",
                "init_expert_location",
                "disable_shared_experts_fusion",
            ),
            SCALAR,
        ),
    },
    "/model_info": {
        "weight_version": TEXT.always(),
        **dict.fromkeys(("model_path", "served_model_name", "model_type"), TEXT.or_null()),
    },
    "/pause_generation": {"status": OK},
    "/continue_generation": {"status": OK},
    **dict.fromkeys(
        (
            "/begin_weight_update",
            "/end_weight_update",
            "/init_weights_update_group",
            "/destroy_weights_update_group",
            "/update_weights_from_distributed",
            "/update_weights_from_tensor",
            "/update_weights_from_disk",
            "/update_weight_version",
        ),
        {"success": DONE},
    ),
    "/weights_checker": {"success": DONE, "ranks": OBJECTS},
    "/v1/loads": {"loads": OBJECTS},
    "/v1/models": {"data": OBJECTS},
    "/v1/tokenize": {"tokens": IDS},
    "/openapi.json": {"paths": OBJECT},
    "/workers": {"workers": LIST},
}
"""Endpoint -> name of a field -> what it holds."""

SENTENCES = {
    "/flush_cache": b"Cache flushed",
    "/release_memory_occupation": b"null",
    "/resume_memory_occupation": b"null",
}
"""Endpoint whose answer is no JSON object -> how it begins when all went well."""
EMPTY = ("/health", "/ready", "/abort_request")
"""Endpoints whose answer has no body."""
