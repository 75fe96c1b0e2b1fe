"""Whether a vLLM server, as it was started, can sample as a run wants it, and tells log-probs of
what it samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.engines.errors import shown
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.engines.vllm.requests import generate_request
from megatron_rl_corr.engines.vllm.routed_experts import omission_problem
from megatron_rl_corr.engines.vllm.servers import config_of

_ROUNDING = 1e-3
"""A log-prob that is 0 but for rounding."""


def sampling_problem(server_info: Mapping[str, Any], sampling: SamplingParams) -> str | None:
    """Why the server can't sample so, with the remedy; None: it can.

    Args:
        server_info: its answer to /server_info.
        sampling: the run's.
    """
    model = config_of(server_info, "model_config")
    mode, longest = model.get("logprobs_mode"), model.get("max_model_len")
    if (problem := omission_problem(server_info)) is not None:
        return problem
    if sampling.keys is not None:
        return "`indexer_replay`: vLLM returns no keys of its sparse attention; drop it"
    if config_of(server_info, "speculative_config"):
        return (
            "speculative decoding (--speculative-config) is not proven: whether log-probs and what an "
            "update leaves in the draft model are right was not tried; start it without"
        )
    if mode in ("raw_logits", "processed_logits"):
        return (
            f"its --logprobs-mode {mode} returns no log-probs; start it with --logprobs-mode "
            "processed_logprobs"
        )
    if mode == "raw_logprobs" and needs_processed(sampling):
        return raw_problem(sampling)
    if model.get("logits_processors"):
        return (
            f"its --logits-processors {model['logits_processors']} change what it samples from in a way that "
            "the trainer can't compute; start it without"
        )
    if sampling.stop and model.get("skip_tokenizer_init"):
        return (
            f"`stop` {list(sampling.stop)}: a server with --skip-tokenizer-init has no texts to compare; "
            "start it without, or use `stop_token_ids`"
        )
    if isinstance(longest, int) and sampling.max_new_tokens >= longest:
        return (
            f"`max_new_tokens` {sampling.max_new_tokens} leaves no room for a prompt in its --max-model-len "
            f"{longest}, where it cuts responses; use fewer tokens, or start it with more"
        )
    most = model.get("max_logprobs")
    if isinstance(most, int) and 0 <= most < sampling.top_logprobs + (sampling.top_logprobs > 0):
        return (
            f"`score_centering` {sampling.top_logprobs} needs the log-probs of {sampling.top_logprobs + 1} "
            f"ids a token, the sampled one and the likeliest, and its --max-logprobs is {most}; start it "
            "with more, or use fewer"
        )
    return _mask_problem(bool(model.get("return_sampling_mask")), sampling)


def batch_invariance_problem(server_info: Mapping[str, Any]) -> str | None:
    """Why a token's log-prob may depend on what else the server computes, with the remedy; None: it does
    not.

    Args:
        server_info: its answer to /server_info.
    """
    if (server_info.get("vllm_env") or {}).get("VLLM_BATCH_INVARIANT"):
        return None
    if config_of(server_info, "device_config").get("device_type") == "cpu":
        return (
            "`batch_invariant`: vLLM has batch-invariant kernels on GPUs alone, and this server runs on a "
            "CPU; serve from a GPU with VLLM_BATCH_INVARIANT=1 in its environment"
        )
    return "`batch_invariant`: start the server with VLLM_BATCH_INVARIANT=1 in its environment"


def needs_processed(sampling: SamplingParams) -> bool:
    """True if raw log-probs are of another distribution than the one sampled from, and are used."""
    return sampling.with_support and (sampling.temperature not in (0, 1) or sampling.truncated)


def raw_problem(sampling: SamplingParams) -> str:
    """What is wrong with raw log-probs, for messages."""
    return (
        "its log-probs are those of the softmax at temperature 1 over the whole vocabulary, and it samples "
        f"at `temperature` {sampling.temperature:g}, `top_p` {sampling.top_p:g}, `top_k` {sampling.top_k} "
        f"and `min_p` {sampling.min_p:g}; start it with --logprobs-mode processed_logprobs"
    )


def sampling_test(sampling: SamplingParams) -> Request | None:
    """A sample of one token at the run's temperature from one id, by `top_k` 1, whose log-prob must be 0.

    /server_info tells how a server was started; this tells what it does. Every prompt is good for it.
    """
    if not needs_processed(sampling):
        return None
    sampled = SamplingParams(1, temperature=sampling.temperature or 1.0, ignore_eos=True)
    request = generate_request([0], sampled, seed=0)
    request.json["sampling_params"]["top_k"] = 1
    return request


def sampling_test_problem(answer: Mapping[str, Any], sampling: SamplingParams) -> str | None:
    """Why log-probs are not of the distribution sampled from, with the remedy; None: they are.

    Args:
        answer: to `sampling_test`.
        sampling: the run's.
    """
    try:
        logprob = answer["choices"][0]["logprobs"]["content"][0]["logprob"]
    except (KeyError, IndexError, TypeError) as error:
        return f"its answer to a sample of one token has no log-prob ({error!r})"
    if type(logprob) not in (int, float):
        return f"its answer to a sample of one token has {shown(logprob)} in the place of a log-prob"
    if abs(logprob) <= _ROUNDING:
        return None
    return f"a sample from one id alone had log-prob {logprob:g}, not 0: {raw_problem(sampling)}"


def _mask_problem(returns_mask: bool, sampling: SamplingParams) -> str | None:
    if sampling.needs_mask and not returns_mask:
        return (
            f"`top_p` {sampling.top_p:g}, `top_k` {sampling.top_k} and `min_p` {sampling.min_p:g} need the "
            "sampling mask, without which truncated samples cannot be corrected; start it with "
            "--return-sampling-mask (and VLLM_USE_V2_MODEL_RUNNER=1 where that runner is not the default), "
            "or leave them out"
        )
    if returns_mask and (sampling.temperature == 0 or sampling.top_k == -1):
        return (
            "a server with --return-sampling-mask answers HTTP 500 to `temperature` "
            f"{sampling.temperature:g} with `top_k` {sampling.top_k}: give a `top_k` and a `temperature` "
            "above 0, or start it without"
        )
    return None
