"""Asks SGLang servers for samples and steers them, over HTTP: no torch.distributed, no Megatron."""

from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.environment import DONE, Environment, load_environment
from megatron_rl_corr.rollout.episodes import generate_episodes
from megatron_rl_corr.rollout.errors import (
    RolloutError,
    RolloutOutage,
    RolloutProtocolError,
    RolloutServerError,
    StaleWeightsError,
)
from megatron_rl_corr.rollout.prompts import Prompt, PromptDataset
from megatron_rl_corr.rollout.rewards import load_function, score
from megatron_rl_corr.rollout.trajectory import SamplingParams, Support, Trajectory, VersionSpan, join

__all__ = [
    "DONE",
    "Environment",
    "LoopThread",
    "Prompt",
    "PromptDataset",
    "RolloutClient",
    "RolloutError",
    "RolloutOutage",
    "RolloutProtocolError",
    "RolloutServerError",
    "SamplingParams",
    "StaleWeightsError",
    "Support",
    "Trajectory",
    "VersionSpan",
    "generate_episodes",
    "join",
    "load_environment",
    "load_function",
    "score",
]
