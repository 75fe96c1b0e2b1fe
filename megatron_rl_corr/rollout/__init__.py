"""Asks SGLang servers for samples and steers them, over HTTP: no torch.distributed, no Megatron."""

from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.errors import RolloutError, RolloutProtocolError, RolloutServerError
from megatron_rl_corr.rollout.prompts import Prompt, PromptDataset
from megatron_rl_corr.rollout.rewards import load_function, score
from megatron_rl_corr.rollout.trajectory import SamplingParams, Support, Trajectory, VersionSpan

__all__ = [
    "LoopThread",
    "Prompt",
    "PromptDataset",
    "RolloutClient",
    "RolloutError",
    "RolloutProtocolError",
    "RolloutServerError",
    "SamplingParams",
    "Support",
    "Trajectory",
    "VersionSpan",
    "load_function",
    "score",
]
