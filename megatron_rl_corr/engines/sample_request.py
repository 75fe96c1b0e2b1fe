"""What a sample is asked for with."""

from dataclasses import dataclass

from torch import Tensor

from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.trajectory import SamplingParams


@dataclass(frozen=True)
class SampleRequest:
    """What a sample is asked for with, and what its answer must be one to."""

    prompt_ids: Tensor
    """[P] int64, each in the vocabulary."""
    sampling: SamplingParams
    request_id: str
    seed: int
    prompt_index: int
    sample_index: int
    vocab_size: int | None
    """Every id must be below it."""
    cache_key: str | None = None
    experts: ExpertShape | None = None
    """The model's, if routes are wanted."""
    routes_from: int = 0
    """The token from which on they are."""
    pushes_retract: bool = False
    """Weights change in a pause of mode retract, for an engine that tells how often a response was computed
    anew, but not where.
    """
    timed: bool = False
    """The server's times of it are wanted."""
