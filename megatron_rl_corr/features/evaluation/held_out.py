"""The prompts of an evaluation, and how it samples them."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.prompt_files import open_prompts
from megatron_rl_corr.data.prompt_format import PromptFormat, PromptLimits
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.mcore.checks.prompt_checks import check_rows, naming_flag, prompt_limits
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout.sampling import training_sampling


def held_out_prompts(
    path: str,
    options: RunConfig,
    args: argparse.Namespace,
    layout: Layout,
    tokenizer: Tokenizer | None,
    vocab_size: int,
) -> PromptDataset | None:
    """The data of one of --rollout-eval-prompts, all of whose rows can be used; as
    `prompt_checks.training_prompts`.

    Args:
        path: of the data.

    Raises:
        ValueError: it can't be read, or a row is bad or too long.
    """
    # With a length of its own only the servers' context bounds it.
    limits = PromptLimits(vocab_size, max_new_tokens=options.eval_max_new_tokens)
    if options.eval_max_new_tokens is None:
        limits = prompt_limits(options, vocab_size=vocab_size, seq_length=args.seq_length, drop=False)
    form = PromptFormat.of(options, tokenizer, limits)
    if not layout.is_data_leader:
        return None
    with naming_flag("--rollout-eval-prompts"):
        prompts = open_prompts([path], form, warn=warn)
    check_rows(prompts, "--rollout-eval-prompts", all_rows=True)
    return prompts


def evaluation_sampling(options: RunConfig) -> SamplingParams:
    """The parameters of evaluation: those of the training where the settings give no other.

    Nothing of it is trained, so no server has to tell the ids that its tokens were drawn from.
    """
    given = {
        "temperature": options.eval_temperature,
        "top_p": options.eval_top_p,
        "top_k": options.eval_top_k,
        "max_new_tokens": options.eval_max_new_tokens,
    }
    if options.eval_temperature == 0:
        given |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    changed = {name: value for name, value in given.items() if value is not None}
    return replace(training_sampling(options), with_support=False, top_logprobs=0, **changed)
