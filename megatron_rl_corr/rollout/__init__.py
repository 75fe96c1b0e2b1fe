"""Samples from rollout servers of any engine, and queues of scored groups: no
torch.distributed, no Megatron.
"""

# Resolved on first use: a process that only scores samples imports its user's file, and never pays for torch.
_EXPORTS = {
    "DONE": "rollout.environment",
    "Environment": "rollout.environment",
    "LoopThread": "rollout.blocking",
    "Prompt": "data.prompts",
    "PromptDataset": "data.prompts",
    "RewardInput": "data.reward_input",
    "Rewards": "data.rewards",
    "RolloutClient": "rollout.client",
    "RolloutError": "engines.errors",
    "RolloutOutage": "engines.errors",
    "RolloutProtocolError": "engines.errors",
    "RolloutServerError": "engines.errors",
    "SampleFailure": "engines.errors",
    "SamplingParams": "engines.trajectory",
    "StaleWeightsError": "engines.errors",
    "Support": "engines.trajectory",
    "Trajectory": "engines.trajectory",
    "VersionSpan": "engines.trajectory",
    "generate_episodes": "rollout.episodes",
    "join": "engines.trajectory",
    "load_environment": "rollout.environment",
    "load_function": "data.rewards",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(f"megatron_rl_corr.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
