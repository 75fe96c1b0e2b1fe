"""SGLang behind the seam: every request, answer, limit and remedy of its servers (0.5.6 to 0.5.23)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megatron_rl_corr.config.urls import checked_urls
from megatron_rl_corr.engines import openai_models, stacked_parameters
from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.checksums import checksum
from megatron_rl_corr.engines.http import open_http
from megatron_rl_corr.engines.sglang import (
    detailed_samples,
    memory,
    prefix_caches,
    requests,
    responses,
    router,
    servers,
    tensors,
)
from megatron_rl_corr.engines.sglang.progress import LoadsProgress
from megatron_rl_corr.engines.sglang.remedies import REMEDIES
from megatron_rl_corr.engines.sglang.server_version import version_support
from megatron_rl_corr.engines.types import EngineLimits, Transport


class SGLang(Engine):
    """SGLang servers, and routers before them, over HTTP."""

    name = "SGLang"
    generate_endpoint = responses.GENERATE
    limits = EngineLimits(
        scoring_room=7,  # measured on 0.5.23: of a context of 512 it takes 505
        min_temperature=1e-6,  # below it SGLang samples greedily and returns the log-probs of temperature 1
        # --sampling-mask-max-tokens; for a larger top_k, or none, it returns no sampling mask
        max_top_k=4096,
        top_p_needs_top_k=True,
        max_stop_texts=32,
        pause_modes=requests.PAUSE_MODES,
        weight_transports=("distributed", "tensor", "disk"),
        unusual_weights=True,
        # Not llama: its loader (0.5.23) looks for the scales under another name, and leaves them
        # as they were made.
        fp8_models=(
            "deepseek_v3",
            "glm4_moe",
            "glm4_moe_lite",
            "kimi_k2",
            "mixtral",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
        ),
    )
    quantises_updates_with = servers.QUANTISES_UPDATES_WITH

    checked_urls = staticmethod(checked_urls)
    progress = staticmethod(LoadsProgress)

    open_transport = staticmethod(partial(open_http, remedy=servers.remedy))

    recognizes = staticmethod(router.recognizes)

    async def find_servers(
        self, urls: Sequence[str], transport: Transport, timeout_s: float
    ) -> tuple[str, ...]:
        return await router.servers_behind(urls, transport, timeout_s)

    generate = staticmethod(requests.generate_request)
    parse = staticmethod(responses.parse_generate)
    server_times = staticmethod(responses.server_times)

    parse_control = staticmethod(responses.parse_control)
    health = staticmethod(requests.health)
    alive = staticmethod(requests.model_info)  # health samples a token, which a paused server does not
    holder_alive = staticmethod(requests.server_info)  # of the schedulers
    server_info = staticmethod(requests.server_info)
    model_info = staticmethod(requests.model_info)
    is_quantized = staticmethod(servers.is_quantized)
    quantization = staticmethod(servers.quantization)
    quantises_updates = staticmethod(servers.quantises_updates)
    pause_generation = staticmethod(requests.pause_generation)
    continue_generation = staticmethod(requests.continue_generation)
    pause_problem = staticmethod(prefix_caches.pause_problem)
    sampling_problem = staticmethod(servers.sampling_problem)
    batch_invariance_problem = staticmethod(servers.batch_invariance_problem)
    logprob_type = staticmethod(servers.logprob_type)
    flush_cache = staticmethod(requests.flush_cache)
    memory_problem = staticmethod(memory.memory_problem)
    memory_report = staticmethod(requests.memory_report)
    memory_in_use = staticmethod(memory.memory_in_use)
    release_memory = staticmethod(memory.release_memory)
    resume_memory = staticmethod(memory.resume_memory)

    def weight_version(self, model_info: Mapping[str, Any]) -> str:
        return str(model_info.get("weight_version"))

    def most_likeliest(self, server_info: Mapping[str, Any]) -> int:
        return 1 << 30

    def dtype(self, server_info: Mapping[str, Any]) -> str:
        return str(server_info.get("dtype"))

    ranks = staticmethod(servers.ranks)
    begin_weight_update = staticmethod(requests.begin_weight_update)
    changes_problem = staticmethod(servers.changes_problem)
    begin_changes = staticmethod(requests.begin_changes)
    end_weight_update = staticmethod(requests.end_weight_update)
    update_is_open = staticmethod(servers.update_is_open)
    init_weights_update_group = staticmethod(requests.init_weights_update_group)
    destroy_weights_update_group = staticmethod(requests.destroy_weights_update_group)
    update_weights_from_distributed = staticmethod(requests.update_weights_from_distributed)
    serialized = staticmethod(tensors.serialized)
    update_weights_from_tensor = staticmethod(requests.update_weights_from_tensor)
    update_weights_from_disk = staticmethod(requests.update_weights_from_disk)
    update_weight_version = staticmethod(requests.update_weight_version)

    weights_checker = staticmethod(requests.weights_checker)
    checksums = staticmethod(servers.checksums)
    checksum = staticmethod(checksum)
    hashed = staticmethod(servers.hashed)
    server_parameter = staticmethod(stacked_parameters.server_parameter)
    held_in = staticmethod(stacked_parameters.held_in)
    held_as = staticmethod(stacked_parameters.held_as)
    possible_layouts = staticmethod(stacked_parameters.possible_layouts)

    remedies = REMEDIES
    detailed_sample = staticmethod(detailed_samples.detailed_sample)
    parse_detailed_sample = staticmethod(detailed_samples.parse_detailed_sample)
    score = staticmethod(detailed_samples.score)
    parse_scores = staticmethod(detailed_samples.parse_scores)
    most_scored_ids = 1 << 13
    score_ids = staticmethod(detailed_samples.score_ids)
    parse_id_scores = staticmethod(detailed_samples.parse_id_scores)
    abort_request = staticmethod(requests.abort_request)
    tokenize = staticmethod(requests.tokenize)
    tokenized = staticmethod(servers.tokenized)
    has_tokenizer = staticmethod(servers.has_tokenizer)
    version_support = staticmethod(version_support)
    has_float32_head = staticmethod(servers.has_float32_head)
    drafts_itself = staticmethod(servers.drafts_itself)
    served_model = staticmethod(servers.served_model)
    list_endpoints = staticmethod(openai_models.list_endpoints)
    update_support = staticmethod(servers.update_support)
    list_models = staticmethod(openai_models.list_models)
    context_length = staticmethod(openai_models.context_length)
    sequence_limit = staticmethod(requests.server_info)
    longest_sequence = staticmethod(servers.longest_sequence)
    all_checksums = staticmethod(servers.all_checksums)
