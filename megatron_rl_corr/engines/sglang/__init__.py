"""SGLang's protocol: every word of it is in this folder, and the rest of the package uses `ENGINE`."""

from megatron_rl_corr.engines.sglang.engine import SGLang

ENGINE = SGLang()
