"""vLLM behind the seam: every request, answer, limit and remedy of its servers (0.32 and 0.33)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_rl_corr.config.urls import checked_urls
from megatron_rl_corr.engines import openai_models, stacked_parameters
from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.checksums import checksum
from megatron_rl_corr.engines.http import open_http
from megatron_rl_corr.engines.types import EngineLimits
from megatron_rl_corr.engines.vllm import (
    detailed_samples,
    requests,
    responses,
    routed_experts,
    sampling_checks,
    server_version,
    servers,
    tensors,
    updates,
)
from megatron_rl_corr.engines.vllm.progress import MetricsProgress
from megatron_rl_corr.engines.vllm.remedies import REMEDIES


class VLLM(Engine):
    """vLLM servers over HTTP."""

    name = "vLLM"
    generate_endpoint = requests.GENERATE
    limits = EngineLimits(
        min_temperature=0.01,  # a smaller one, 0 excepted, vLLM takes for this one
        max_temperature=2.0,
        # a server that returns the sampling mask answers HTTP 500 to requests without one
        top_p_needs_top_k=True,
        pause_modes=tuple(updates.PAUSE_MODES),
        weight_transports=updates.WEIGHT_TRANSPORTS,
    )

    checked_urls = staticmethod(checked_urls)
    progress = staticmethod(MetricsProgress)

    open_transport = staticmethod(partial(open_http, remedy=servers.remedy))

    generate = staticmethod(requests.generate_request)
    parse = staticmethod(responses.parse_generate)
    sampling_problem = staticmethod(sampling_checks.sampling_problem)
    batch_invariance_problem = staticmethod(sampling_checks.batch_invariance_problem)
    sampling_test = staticmethod(sampling_checks.sampling_test)
    sampling_test_problem = staticmethod(sampling_checks.sampling_test_problem)

    parse_control = staticmethod(responses.parse_control)
    health = staticmethod(requests.health)
    alive = staticmethod(requests.health)  # its weights' name waits for the process that loads them
    holder_alive = staticmethod(requests.weight_info)
    server_info = staticmethod(requests.server_info)
    model_info = staticmethod(requests.weight_info)
    is_quantized = staticmethod(servers.is_quantized)
    quantization = staticmethod(servers.quantization)
    dtype = staticmethod(servers.dtype)
    flush_cache = staticmethod(requests.flush_cache)
    ranks = staticmethod(servers.ranks)

    def weight_version(self, model_info: Mapping[str, Any]) -> str:
        return str(model_info.get("weight_version"))

    recognizes = staticmethod(server_version.recognizes)
    remedies = REMEDIES
    renormalises = True
    detailed_sample = staticmethod(detailed_samples.detailed_sample)
    parse_detailed_sample = staticmethod(detailed_samples.parse_detailed_sample)
    score = staticmethod(detailed_samples.score)
    parse_scores = staticmethod(detailed_samples.parse_scores)
    # No chosen ids: with `logprob_token_ids` in a batch, 0.32 gives its other requests no likeliest ids.
    most_likeliest = staticmethod(servers.most_likeliest)
    abort_request = staticmethod(servers.abort_request)
    tokenize = staticmethod(servers.tokenize)
    tokenized = staticmethod(servers.tokenized)
    has_tokenizer = staticmethod(servers.has_tokenizer)
    version_support = staticmethod(server_version.version_support)
    has_float32_head = staticmethod(servers.has_float32_head)
    routes_problem = staticmethod(routed_experts.omission_problem)
    cache_block = staticmethod(servers.cache_block)
    served_model = staticmethod(servers.served_model)
    list_endpoints = staticmethod(openai_models.list_endpoints)
    update_support = staticmethod(servers.update_support)
    list_models = staticmethod(openai_models.list_models)
    context_length = staticmethod(openai_models.context_length)

    pause_generation = staticmethod(updates.pause_generation)
    refuses_while_paused = staticmethod(updates.refuses_while_paused)
    continue_generation = staticmethod(updates.continue_generation)
    pause_problem = staticmethod(updates.pause_problem)
    begin_weight_update = staticmethod(updates.begin_weight_update)
    changes_problem = staticmethod(servers.changes_problem)
    begin_changes = staticmethod(updates.begin_changes)
    end_weight_update = staticmethod(updates.end_weight_update)
    update_is_open = staticmethod(updates.update_is_open)
    init_weights_update_group = staticmethod(updates.init_weights_update_group)
    destroy_weights_update_group = staticmethod(updates.destroy_weights_update_group)
    update_weights_from_distributed = staticmethod(updates.update_weights_from_distributed)
    serialized = staticmethod(tensors.serialized)
    update_weights_from_tensor = staticmethod(updates.update_weights_from_tensor)
    update_weights_from_disk = staticmethod(updates.update_weights_from_disk)
    update_weight_version = staticmethod(updates.update_weight_version)

    weights_checker = staticmethod(updates.weights_checker)
    checksums = staticmethod(updates.checksums)
    all_checksums = staticmethod(updates.all_checksums)
    checksum = staticmethod(checksum)
    server_parameter = staticmethod(stacked_parameters.server_parameter)
    held_in = staticmethod(stacked_parameters.held_in)
    held_as = staticmethod(stacked_parameters.held_as)
    possible_layouts = staticmethod(stacked_parameters.possible_layouts)
