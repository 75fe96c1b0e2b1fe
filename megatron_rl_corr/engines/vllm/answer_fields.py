"""What vLLM's control answers hold, as far as this package reads them."""

from megatron_rl_corr.engines.answer_types import (
    COUNT,
    DONE,
    FLAG,
    IDS,
    LIST,
    OBJECT,
    OBJECTS,
    TEXT,
    Fields,
    Kind,
)

FIELDS: dict[str, Fields] = {
    "/server_info": {
        "system_env": {"vllm_version": TEXT.or_null()},
        "vllm_env": {"VLLM_BATCH_INVARIANT": FLAG},
        "vllm_config": {
            "parallel_config": {
                **dict.fromkeys(
                    ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "world_size"),
                    COUNT,
                ),
                "worker_extension_cls": TEXT.or_null(),
            },
            "model_config": {
                **dict.fromkeys(("model", "dtype", "quantization", "logprobs_mode"), TEXT.or_null()),
                **dict.fromkeys(("skip_tokenizer_init", "return_sampling_mask"), FLAG),
                "max_model_len": COUNT.or_null(),
                "logits_processors": LIST.or_null(),
            },
            "device_config": {"device_type": TEXT.or_null()},
            "cache_config": {
                "cache_dtype": TEXT.or_null(),
                "block_size": COUNT.or_null(),
                "enable_prefix_caching": FLAG,
            },
        },
    },
    "/weight_info": {"weight_version": TEXT.always()},
    "/pause": {"status": Kind('"paused"', lambda value: value == "paused").always()},
    "/resume": {"status": Kind('"resumed"', lambda value: value == "resumed").always()},
    "/update_weight_version": {"success": DONE},
    "/reset_prefix_cache": {"success": DONE},
    "/collective_rpc": {"results": LIST.always()},
    "/is_paused": {"is_paused": FLAG},
    "/v1/models": {"data": OBJECTS},
    "/tokenize": {"tokens": IDS},
    "/openapi.json": {"paths": OBJECT},
}
"""Endpoint -> name of a field -> what it holds."""

EMPTY = ("/health",)
"""Endpoints whose answer has no body."""
