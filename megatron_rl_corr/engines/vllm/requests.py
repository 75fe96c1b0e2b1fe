"""Builds the requests that are sent to a vLLM server: data in, `Request` out, nothing is sent here."""

from collections.abc import Sequence

import numpy as np

from megatron_rl_corr.engines import answer_size
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.engines.vllm.seeds import server_seed

GENERATE = "/inference/v1/generate"

# Sent in full, so that nothing depends on what vLLM takes for a field that a request leaves out. A watermark
# would change the distribution, and vLLM applies a configured one unless a request refuses it.
NEUTRAL = {
    "n": 1,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "bad_words": [],
    "logit_bias": None,
    "allowed_token_ids": None,
    "prompt_logprobs": None,
    "watermarking": False,
}


def generate_request(
    prompt_ids: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    request_id: str | None = None,
    *,
    seed: int,
    routed_experts: bool = False,
    routes_from: int = 0,
    cache_key: str | None = None,
) -> Request:
    """One sample of one prompt (ids already checked), with a log-prob for every sampled token, no text.

    Args:
        prompt_ids: P ids.
        sampling: how to sample. A server with --return-sampling-mask tells for every token what it was drawn
            from; no field of a request turns that on or off.
        request_id: a name by which `abort_request` can end it.
        seed: in [-2**63, 2**63). Every vLLM server heeds it.
        routed_experts: no field either: a server with --enable-return-routed-experts always returns them.
        routes_from: leave out the routes of the first tokens.
        cache_key: keys and values are shared only with requests of the same one.
    """
    # 0: of the sampled id alone. Else one more than K: the list begins with the sampled id, and 0.32 cuts it
    # to this length.
    likeliest = sampling.top_logprobs + 1 if sampling.top_logprobs else 0
    fields = sampling_fields(sampling) | {"seed": server_seed(seed), "logprobs": likeliest}
    if routed_experts:
        fields["routed_experts_prompt_start"] = routes_from
    body = {"token_ids": prompt_ids, "sampling_params": fields, "output_mode": "tokens", "stream": False}
    if cache_key is not None:
        body["cache_salt"] = cache_key
    if request_id is not None:
        body["request_id"] = request_id
    return Request("POST", GENERATE, body, max_bytes=answer_size.of_sample(len(prompt_ids), sampling))


def sampling_fields(sampling: SamplingParams) -> dict[str, object]:
    """`sampling_params` of a request, without a seed and log-probs."""
    return {
        **NEUTRAL,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),  # 0 is off
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        # vLLM's ignore_eos goes on after the model's own end-of-sequence ids only.
        "stop_token_ids": [] if sampling.ignore_eos else list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "detokenize": bool(sampling.stop),  # stop texts are found in the text, which nothing else needs
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }


def health() -> Request:
    """200 once the server can generate, also while it is paused; 503 when its engine has died."""
    return Request("GET", "/health")


def server_info() -> Request:
    """Configuration, environment and version."""
    return Request("GET", "/server_info?config_format=json")


def weight_info() -> Request:
    """Current `weight_version`."""
    return Request("GET", "/weight_info")


def metrics() -> Request:
    """Counters in Prometheus' text format: the HTTP process answers, with what the engine's
    last batch told it.
    """
    return Request("GET", "/metrics")


def is_paused() -> Request:
    """Whether sampling is paused: the engine itself answers, paused or not, between two batches."""
    return Request("GET", "/is_paused")


def flush_cache() -> Request:
    """Forget cached prefixes; {"success": false} while a request holds some."""
    return Request("POST", "/reset_prefix_cache")
