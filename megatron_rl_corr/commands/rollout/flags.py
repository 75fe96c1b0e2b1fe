"""The flags of `megatron-rl-corr rollout`: those of a run's sampling, without the launcher's prefix."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_rl_corr.config import flags
from megatron_rl_corr.config.features import feature_options
from megatron_rl_corr.config.fields import docs_of, options_of
from megatron_rl_corr.config.policy import ModelConfig
from megatron_rl_corr.config.prompts import PromptsConfig
from megatron_rl_corr.config.rewards import RewardsConfig
from megatron_rl_corr.config.run import CHANGING, EnvironmentConfig, RunConfig, ServersConfig
from megatron_rl_corr.config.samples import SamplesConfig

TOPICS = (
    *(ServersConfig, PromptsConfig, SamplesConfig, RewardsConfig, EnvironmentConfig),
    *(topic for topic in feature_options() if topic.makes_samples is not None),
    ModelConfig,
)
OF_TRAINING = (
    "server_check",
    "update_timeout_s",
    "push_timeout_s",
    "prompts_weights",
    "max_lag",
    "stale_samples",
    "pause_mode",
    "save_waiting_gib",
    "truncated_samples",
    *CHANGING,
)
"""Options of these topics that only a trainer has a use for."""
OF_THE_MODEL = ("hf_checkpoint",)
"""The only option of ModelConfig that this command has."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, in groups like the launcher's."""
    for topic in TOPICS:
        group = parser.add_argument_group(*flags.title_of(topic))
        for name, one in options_of(topic).items():
            if _is_offered(topic, name):
                given = flags.arguments_of(one, docs_of(topic)[name], overrides=False)
                given |= {"dest": name, "default": argparse.SUPPRESS, "help": _short(given["help"])}
                group.add_argument(_short(one.flag), **given)


def config_of(arguments: argparse.Namespace) -> RunConfig:
    """The configuration that the command line gives. Raises ValueError, naming the flag and the remedy."""
    values: dict[str, Any] = {}
    for topic in TOPICS:
        for name, one in options_of(topic).items():
            if _is_offered(topic, name) and hasattr(arguments, name):
                value = vars(arguments)[name]
                values[name] = tuple(value) if one.kind is tuple else value
    if "hf_checkpoint" not in values:
        raise ValueError("--hf-checkpoint is required; see --help")
    try:
        return RunConfig(**values)
    except ValueError as error:
        raise ValueError(named(error)) from error


def named(text: object) -> str:
    """A message of the library with this command's flags in place of the fields."""
    return _short(flags.name_flags(text))


def _is_offered(topic: type, name: str) -> bool:
    if topic is ModelConfig:
        return name in OF_THE_MODEL
    return name not in OF_TRAINING and options_of(topic)[name].flag is not None


def _short(text: str) -> str:
    return text.replace(flags.PREFIX, "--")
