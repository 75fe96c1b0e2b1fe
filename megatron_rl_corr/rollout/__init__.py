"""Asks SGLang servers for samples and steers them, over HTTP: no torch.distributed, no Megatron."""

# Resolved on first use: a process that only scores samples imports its user's file, and never pays for torch.
_EXPORTS = {
    "DONE": "environment",
    "Environment": "environment",
    "LoopThread": "blocking",
    "Prompt": "prompts",
    "PromptDataset": "prompts",
    "Rewards": "rewards",
    "RolloutClient": "client",
    "RolloutError": "errors",
    "RolloutOutage": "errors",
    "RolloutProtocolError": "errors",
    "RolloutServerError": "errors",
    "SampleFailure": "errors",
    "SamplingParams": "trajectory",
    "StaleWeightsError": "errors",
    "Support": "trajectory",
    "Trajectory": "trajectory",
    "VersionSpan": "trajectory",
    "generate_episodes": "episodes",
    "join": "trajectory",
    "load_environment": "environment",
    "load_function": "rewards",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
