"""How a run samples what it trains on, by its settings."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.engines.trajectory import SamplingParams


def training_sampling(options: RunConfig) -> SamplingParams:
    """The parameters of the samples that are trained."""
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        stop=options.stop,
        stop_token_ids=tuple(map(int, options.stop_token_ids)),
        top_logprobs=options.score_centering or 0,
    )


def sampling_of_row(sampling: SamplingParams, prompt: Prompt) -> SamplingParams:
    """The run's parameters with those that the row has of its own; stop texts and ids are
    beside the run's.
    """
    own = prompt.sampling
    if not own:
        return sampling
    return replace(
        sampling,
        max_new_tokens=own.get("max_new_tokens", sampling.max_new_tokens),
        stop=(*sampling.stop, *own.get("stop", ())),
        stop_token_ids=(*sampling.stop_token_ids, *own.get("stop_token_ids", ())),
    )
