"""What a run is started with, beside its correction."""

ENGINES = {"sglang": "megatron_rl_corr.engines.sglang"}
"""The programs that servers may run, and the module that speaks to each."""
