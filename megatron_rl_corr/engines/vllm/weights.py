"""vLLM's parameters: where a Hugging Face tensor ends up, and which checksum our worker extension gives it."""

from megatron_rl_corr.engines.checksums import checksum
from megatron_rl_corr.engines.stacked_parameters import held_in, possible_layouts, server_parameter

__all__ = ["checksum", "held_in", "possible_layouts", "server_parameter"]
