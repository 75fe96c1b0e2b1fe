"""A sampled answer as it came from a rollout server, and the parameters it was sampled with.

P prompt tokens, R response tokens.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

FinishReason = Literal["stop", "length", "abort"]

MIN_TEMPERATURE = 1e-6  # below it SGLang samples greedily and returns the log-probs of temperature 1


@dataclass(frozen=True)
class SamplingParams:
    """How a response is drawn: from the whole softmax at a temperature.

    There is no top_p or top_k: SGLang's log-probs are of the full, temperature-scaled softmax whatever those
    say, so samples truncated by them would not be samples of the distribution the log-probs describe.
    """

    max_new_tokens: int
    """Upper bound on R, at least 1."""
    temperature: float = 1.0
    """Divides the logits before the softmax. 0 is greedy: its log-probs are those of temperature 1."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, beside the model's own end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on after end-of-sequence and stop ids until max_new_tokens."""

    def __post_init__(self):
        if not _is_int(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be an integer of at least 1, got {self.max_new_tokens!r}")
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, (int, float)):
            raise ValueError(f"temperature must be a number, got {self.temperature!r}")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE} and finite, "
                f"got {self.temperature}"
            )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            if not _is_int(token) or token < 0:
                raise ValueError(f"stop_token_ids must be integers of at least 0, got {token!r}")


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were sampled while the server's weights were called `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One response to one prompt. Tensors are on the CPU, not to be written to: samples share prompt_ids."""

    prompt_index: int
    """Position of the prompt in the list given to `generate`."""
    sample_index: int
    """Which of the prompt's samples this is, from 0."""
    prompt_ids: torch.Tensor
    """[P] int64."""
    output_ids: torch.Tensor
    """[R] int64, ending with the stop id where there was one. R may be 0 after an abort."""
    rollout_logprobs: torch.Tensor
    """[R] float32, natural log, of the temperature-scaled softmax. NaN is "no log-prob": the server gave
    none, or one that is not finite (a token it sampled cannot have probability 0)."""
    finish_reason: FinishReason
    """stop: a stop id; length: max_new_tokens; abort: cut short, the tokens so far are valid samples."""
    weight_versions: tuple[VersionSpan, ...]
    """In order of time; they partition [0, R)."""
    cached_tokens: int
    """Prompt tokens whose keys and values the server had already."""
    server: str
    """Base URL of the server that answered."""

    def __post_init__(self):
        dtypes = {"prompt_ids": torch.int64, "output_ids": torch.int64, "rollout_logprobs": torch.float32}
        for name, dtype in dtypes.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.dim() != 1:
                raise ValueError(f"{name} must be 1-d {dtype}, got {tensor.dim()}-d {tensor.dtype}")
        if self.output_ids.numel() != self.rollout_logprobs.numel():
            raise ValueError(
                f"{self.output_ids.numel()} output_ids have {self.rollout_logprobs.numel()} rollout_logprobs"
            )
        if not self.weight_versions:
            raise ValueError("weight_versions must hold at least one span")

    @property
    def oldest_version(self) -> str:
        """The weight version of the first token: what decides how stale the response is."""
        return self.weight_versions[0].version


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
