"""vLLM's protocol: every word of it is in this folder, and the rest of the package uses `ENGINE`."""

from megatron_rl_corr.engines.vllm.engine import VLLM

ENGINE = VLLM()
