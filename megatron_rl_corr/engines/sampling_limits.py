"""Refuses sampling parameters that an engine takes for others, or that it returns too little for."""

from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import EngineLimits


def check_limits(engine: str, limits: EngineLimits, sampling: SamplingParams) -> None:
    """Raise ValueError, naming the field, the value and the remedy, where the limits forbid these parameters.

    Args:
        engine: its name, for instance "SGLang".
        limits: the engine's.
        sampling: how a response is to be sampled.
    """
    if 0 < sampling.temperature < limits.min_temperature:
        raise ValueError(
            f"`temperature` must be 0 (greedy) or at least {limits.min_temperature:g} with {engine}, got "
            f"{sampling.temperature}"
        )
    if sampling.temperature > limits.max_temperature:
        raise ValueError(
            f"`temperature` must be at most {limits.max_temperature:g} with {engine}, got "
            f"{sampling.temperature}"
        )
    if limits.max_top_k is not None and sampling.with_support and sampling.top_k > limits.max_top_k:
        raise ValueError(
            f"`top_k` must be -1 (off) or in [2, {limits.max_top_k}], for which {engine} returns the "
            f"sampling mask, got {sampling.top_k}; use {limits.max_top_k} or less, or -1"
        )
    if limits.top_p_needs_top_k and sampling.needs_mask and sampling.top_k == -1:
        name, what, value = ("`top_p`", "`top_p` below 1", sampling.top_p)
        if sampling.top_p == 1:
            name, what, value = ("`min_p`", "`min_p` above 0", sampling.min_p)
        bound, most = "of at least 2", "the vocabulary size"
        if limits.max_top_k is not None:
            bound, most = f"in [2, {limits.max_top_k}]", f"{limits.max_top_k}"
            most += " beside it, or the vocabulary size where that is smaller"
        raise ValueError(
            f"{what} needs a `top_k` {bound} with {engine}: only then it returns the sampling mask, without "
            f"which truncated samples cannot be corrected; got {name} {value} with `top_k` -1; give `top_k` "
            f"{most}"
        )
    if limits.max_stop_texts is not None and len(sampling.stop) > limits.max_stop_texts:
        raise ValueError(
            f"`stop` has {len(sampling.stop)} texts, and {engine} takes at most {limits.max_stop_texts}; "
            "leave some out"
        )
