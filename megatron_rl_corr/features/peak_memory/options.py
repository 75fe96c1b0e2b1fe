"""The flag of the ranks' memory."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl_corr.config.fields import Options


@dataclass(frozen=True, kw_only=True)
class PeakMemoryConfig(Options):
    """Memory: the most that each rank of the trainer has held."""

    acts_in_replay = False

    peak_memory: bool = False
    """Log with each step the most memory that each rank has held so far, of its process on the host and, with
    a GPU, of PyTorch's tensors on the device: two numbers a rank. `megatron-rl-corr accept` shows them.
    """


OPTIONS = PeakMemoryConfig
