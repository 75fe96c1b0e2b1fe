"""Megatron's own supervised fine-tuning (--sft), from a Hugging Face folder to another.

Data, loss and batches stay Megatron's. Weights are loaded before its first step, and written as a folder
after its last one, which a run with rollouts begins with.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl_corr.config.fields import make
from megatron_rl_corr.config.flags import PREFIX, add_group, given_flags
from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.config.run import RunConfig

ASKS = "--sft"
READ = ("hf_checkpoint", "model_provider", "allow_model_differences", "save_hf", "save_hf_interval")
"""Options that have an effect here."""
OWN_TEMPLATE = "default"
"""The value of --sft-tokenizer-prompt-format with which the tokenizer's own template is taken."""
SHOWN = [{"role": "user", "content": "How much is 7+5?"}, {"role": "assistant", "content": "It is 12."}]
"""A conversation as those of the data are."""


def read(arguments: Sequence[str], problems: Problems) -> RunConfig:
    """The options of READ that a command line gives; problems gets what is refused."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_group(parser, (RunConfig,), only=READ)
    given = given_flags(parser, arguments, problems)
    for other in given.others:
        if other.startswith((PREFIX, "--router-replay", "--expert-statistics")):
            problems.add(
                f"{other.split('=')[0]} has no effect with {ASKS}, where Megatron trains on data of its own "
                "by its own loss; drop it"
            )
    unknown = set(given.unknown)
    if "hf_checkpoint" not in given.values and "hf_checkpoint" not in unknown:
        problems.add("--rollout-hf-checkpoint is required: the folder that the weights are loaded from")
        unknown.add("hf_checkpoint")
    # as those of a replay, which needs neither servers nor prompts nor a reward
    return make(RunConfig, given.values | {"replay": ASKS}, problems, unknown)


def install(options: RunConfig) -> Callable[[], None]:
    """Replace what sets up Megatron's model, and its step. Returns what is to be done after the last one."""
    from megatron_rl_corr.mcore import hooks

    run = _FineTuning(options)
    for hook, wrap in (
        (hooks.ARGUMENTS, hooks.with_our_flags),
        (hooks.SET_UP, run.wrap_set_up),
        (hooks.TRAIN_STEP, run.wrap_train_step),
    ):
        hooks.replace(hook.module, hook.name, hook.parameters, wrap)
    return lambda: None


class _FineTuning:
    """A fine-tuning from the first weights to the last."""

    def __init__(self, options: RunConfig):
        from megatron_rl_corr.mcore.hf_folders import HFFolders

        self._options, self._exporter, self._folders = options, None, None
        if options.save_hf is not None:
            self._folders = HFFolders(Path(options.save_hf), options.hf_checkpoint, options.save_hf_interval)

    def wrap_set_up(self, original: Callable) -> Callable:
        """Wraps `setup_model_and_optimizer`: weights are loaded after it, unless --load had some."""

        @functools.wraps(original)
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> tuple:
            from megatron.training import get_args

            from megatron_rl_corr.mcore import compat
            from megatron_rl_corr.mcore.session import loaded_parameters
            from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
            from megatron_rl_corr.reduce.failure import all_reduce_startup
            from megatron_rl_corr.weight_sync.export import StageExporter

            settings = get_args()
            all_reduce_startup(lambda: self._check(settings))
            model, optimizer, scheduler = original(*args, **kwargs)
            layout = compat.layout(sequence_parallel=settings.sequence_parallel)
            checkpoint = HFCheckpoint(self._options.hf_checkpoint)
            parameters = all_reduce_startup(lambda: loaded_parameters(checkpoint, settings, model, layout))
            if settings.iteration == 0:
                optimizer.reload_model_params()
            all_reduce_startup(lambda: self._check_left(settings))
            self._exporter = StageExporter.of(parameters, layout)
            return model, optimizer, scheduler

        return setup_model_and_optimizer

    def wrap_train_step(self, original: Callable) -> Callable:
        """Wraps `train_step`: after the original the weights are written, if it is time."""

        @functools.wraps(original)
        def train_step(
            forward_step_func: Callable,
            data_iterator: Any,
            model: list,
            optimizer: Any,
            *args: Any,
            **kwargs: Any,
        ) -> tuple:
            from megatron.training import get_args

            from megatron_rl_corr.mcore import compat

            settings = get_args()
            ended = settings.curr_iteration + 1
            result = original(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
            folders = self._folders
            if (
                folders is not None
                and not compat.is_leaving(result)
                and folders.is_due(ended, settings.train_iters)
            ):
                folders.write(ended, model, optimizer, self._exporter)
            return result

        return train_step

    def _check_left(self, settings: argparse.Namespace) -> None:
        """ValueError for a folder that no step would write, as all have been made; --load has been read."""
        if self._folders is None:
            return
        if settings.train_iters in settings.iterations_to_skip:
            raise ValueError(
                f"--iterations-to-skip {settings.train_iters}: --rollout-save-hf writes weights behind the "
                "last step, and not behind one that is skipped; leave it out, or give one --train-iters less"
            )
        if settings.iteration < settings.train_iters:
            return
        place = self._folders.folder / f"iter_{settings.iteration:07d}"
        if not place.exists():
            raise ValueError(
                f"--rollout-save-hf {self._folders.folder}: the checkpoint of --load has made all "
                f"{settings.train_iters} steps, so none would write {place.name}; make it of the checkpoint "
                "by `megatron-rl-corr export`, or give more --train-iters"
            )

    def _check(self, settings: argparse.Namespace) -> None:
        """ValueError, which lists everything that is wrong with Megatron's arguments, or with our folders."""
        from megatron_rl_corr.mcore.checks import run_flags
        from megatron_rl_corr.mcore.checks.file_checks import check_files

        problems = Problems()
        for check in (*run_flags.checks_of_model(), check_tokenizer, check_vocabulary):
            with problems.catch():
                check(settings)
        problems.check("files", lambda: check_files(self._options, settings))
        problems.raise_all()


def check_tokenizer(args: argparse.Namespace) -> None:
    """ValueError where Megatron's SFTTokenizer would render, or mask, what the policy must learn.

    Its formats but the default one are templates of Nemotron, whose marks any other tokenizer cuts into
    pieces. Labels of the padding token are masked: where that is the end token, no end is ever learnt.
    """
    if args.tokenizer_type != "SFTTokenizer":
        return
    from megatron.training import get_tokenizer

    form, tokenizer = args.sft_tokenizer_prompt_format, get_tokenizer()
    if form != OWN_TEMPLATE:
        raise ValueError(
            f"--sft-tokenizer-prompt-format {form}: rollouts are prompted by the chat template of "
            f"--rollout-hf-checkpoint, and this is another; give {OWN_TEMPLATE}"
        )
    if tokenizer.pad == tokenizer.eod:
        raise ValueError(
            f"--tokenizer-model {args.tokenizer_model}: its padding token is its end token, "
            "and Megatron masks the labels of padding, so no response would learn to end; save a copy of the "
            "tokenizer with a pad_token of its own, and name that"
        )
    check_rendering(args, tokenizer)


def check_rendering(args: argparse.Namespace, tokenizer: Any) -> None:
    """ValueError where a conversation has the padding token in it, or is another one to the model's own
    tokenizer, as with that of a model whose vocabulary has as many rows.

    Args:
        args: Megatron's.
        tokenizer: of --tokenizer-model.
    """
    from megatron_rl_corr.data.tokenizer import Tokenizer

    rendered = tokenizer.tokenize_conversation(SHOWN, return_target=False, add_generation_prompt=False)
    if tokenizer.pad in rendered:
        raise ValueError(
            f"--tokenizer-model {args.tokenizer_model}: its chat template writes its padding token, and "
            "Megatron masks the labels of padding, so that part would not be learnt; save a copy of the "
            "tokenizer with a pad_token of its own, and name that"
        )
    own = Tokenizer.from_folder(args.rollout_hf_checkpoint)
    if own is None or not own.has_template:  # the copy has what the folder lacks
        return
    text = own.render(SHOWN, add_generation_prompt=False)
    if rendered.tolist() != own.encode(text, special_tokens=False):
        raise ValueError(
            f"--tokenizer-model {args.tokenizer_model}: it makes other ids of a conversation than that of "
            f"--rollout-hf-checkpoint {args.rollout_hf_checkpoint}, by which rollouts are prompted; name "
            "that, or a copy that differs by its pad_token alone"
        )


def check_vocabulary(args: argparse.Namespace) -> None:
    """ValueError for an embedding of another size than the model's, which Megatron makes for the tokenizer.

    Its own loss is over all rows: those that only pad would take a part of each probability.
    """
    if args.vocab_size is None:  # `check_policy` tells of it
        return
    share = math.ceil(args.vocab_size / args.tensor_model_parallel_size)
    if args.padded_vocab_size != share * args.tensor_model_parallel_size:
        raise ValueError(
            f"--make-vocab-size-divisible-by {args.make_vocab_size_divisible_by}: it makes an embedding of "
            f"{args.padded_vocab_size} rows, and the model has {args.vocab_size}; Megatron's loss is over "
            f"all of them; give {share}"
        )
