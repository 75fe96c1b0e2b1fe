"""What SGLang's control answers hold, as far as this package reads them."""

from typing import Any

from megatron_rl_corr.engines.answer_types import (
    COUNT,
    FLAG,
    IDS,
    LIST,
    OBJECT,
    OBJECTS,
    SCALAR,
    TEXT,
    Fields,
    check_types,
)

FIELDS: dict[str, Fields] = {
    "/server_info": {
        "version": TEXT, "dtype": TEXT, "device": TEXT, "model_path": TEXT.or_null(), "load_format": TEXT.or_null(),
        "kv_cache_dtype": TEXT.or_null(), "quantization": TEXT.or_null(),
        "tp_size": COUNT, "pp_size": COUNT, "dp_size": COUNT, "ep_size": COUNT,
        **dict.fromkeys(
            ("enable_dp_attention", "disable_overlap_schedule", "disable_radix_cache", "skip_tokenizer_init",
             "enable_deterministic_inference", "enable_fp32_lm_head"), FLAG,
        ),
        **dict.fromkeys(  # compared with those of other servers
            ("moe_runner_backend", "moe_a2a_backend", "enable_dp_lm_head", "moe_dense_tp_size", "enable_eplb",
             "ep_num_redundant_experts", "init_expert_location", "disable_shared_experts_fusion"), SCALAR,
        ),
    },
    "/model_info": dict.fromkeys(("weight_version", "model_path", "served_model_name", "model_type"), TEXT.or_null()),
    "/weights_checker": {"ranks": OBJECTS},
    "/v1/loads": {"loads": OBJECTS},
    "/v1/models": {"data": OBJECTS},
    "/v1/tokenize": {"tokens": IDS},
    "/openapi.json": {"paths": OBJECT},
    "/workers": {"workers": LIST},
}  # fmt: skip
"""Endpoint -> name of a field -> what it holds."""


def check_fields(answer: dict[str, Any], endpoint: str) -> dict[str, Any]:
    """The answer, if its fields hold what they should. Raises ValueError that names the field.

    Args:
        answer: to a control request.
        endpoint: of the request, with its query.
    """
    check_types(answer, FIELDS.get(endpoint.partition("?")[0], {}))
    return answer
