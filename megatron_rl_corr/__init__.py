"""Measure, explain and correct the train-rollout mismatch of RL on Megatron-LM with SGLang servers."""

__version__ = "0.1.0"

# Resolved on first use, so that `python -m megatron_rl_corr.launch --help` never pays for importing torch.
_EXPORTS = {
    "RejectionRule": "megatron_rl_corr.config.correction",
    "RolloutCorrectionConfig": "megatron_rl_corr.config.correction",
    "PRESETS": "megatron_rl_corr.config.correction",
    "Correction": "megatron_rl_corr.core.correction",
    "compute_correction": "megatron_rl_corr.core.correction",
    "flatten_padded": "megatron_rl_corr.core.segments",
    "policy_loss": "megatron_rl_corr.core.losses",
    "ParallelGroups": "megatron_rl_corr.reduce.collectives",
    "vocab_parallel_logprobs": "megatron_rl_corr.logprobs.vocab",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
