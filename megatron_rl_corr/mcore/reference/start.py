"""Makes a run's reference policy at its start: from the start's weights, another checkpoint,
or a saved reset.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Sequence
from itertools import batched
from pathlib import Path

import torch.distributed as dist

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.mcore.checks.early_checks import naming_checkpoint
from megatron_rl_corr.mcore.checks.source_check import TEXT, encoded
from megatron_rl_corr.mcore.reference.checkpoint import broadcast_saved
from megatron_rl_corr.mcore.reference.policy import LocalReference, Reference, ReferenceWeights
from megatron_rl_corr.mcore.reference.served_scores import ServedScores
from megatron_rl_corr.mcore.reference.server import ServedReference
from megatron_rl_corr.mcore.reference.teacher import FLAG, Teacher, check_teacher
from megatron_rl_corr.models.architectures import has_table
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint, read_config, read_model
from megatron_rl_corr.models.megatron_flags import model_flags
from megatron_rl_corr.models.settings import computed
from megatron_rl_corr.models.shards import LocalParameter, ShardRanks
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import StartupError, all_reduce_failure, all_reduce_startup
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.scorer import Scorer
from megatron_rl_corr.weight_sync.export import StageExporter

HEALTHY_WITHIN_S = 60.0
SHOWN = 8
"""Added tokens of one text, which an error shows."""
PLAIN = 29
"""Characters of TEXT that any tokenizer has ids for."""


@collective
def make_reference(
    config: RolloutCorrectionConfig,
    options: RunConfig,
    args: argparse.Namespace,
    parameters: Sequence[LocalParameter],
    layout: Layout,
    *,
    loop: LoopThread,
    vocab_size: int,
) -> Reference:
    """The reference policy that the KL penalties ask for; every rank calls it. Rank 0 looks
    for a saved reset.

    Args:
        config: the correction.
        options: of the run.
        args: Megatron's.
        parameters: of this rank; at iteration 0 they hold the start's weights.
        layout: this rank's process groups.
        loop: the event loop of servers.
        vocab_size: of the model.

    Raises:
        StartupError: on one rank: a checkpoint is of another model or can't be read, or a flag of Megatron's
            does not go with a reference.
        RolloutError: on a data leader: a server of the reference does not answer.
        PeerFailure: then, on the others.
    """
    resets = options.reference_reset is not None
    if not config.needs_reference:
        return Reference()
    all_reduce_startup(lambda: check_start_known(options, args))
    if options.reference_urls:
        return _make_served_reference(options, args, parameters, layout, loop, vocab_size)
    saved, reset_after = broadcast_saved(args, resets=resets)
    weights = all_reduce_startup(lambda: _weights(options, args, parameters, layout.shard, saved))
    exporter = StageExporter.of(weights.on_device(), layout) if resets else None
    if dist.get_rank() == 0:
        taken_from = saved or options.reference_checkpoint or options.hf_checkpoint
        print(
            f"[rollout] reference policy: {taken_from}, {weights.nbytes / 2**20:.0f} MiB of the host's "
            "memory on each rank",
            flush=True,
        )
    return LocalReference(
        weights, reset_every=options.reference_reset, reset_after=reset_after, exporter=exporter
    )


@collective
def _make_served_reference(
    options: RunConfig,
    args: argparse.Namespace,
    parameters: Sequence[LocalParameter],
    layout: Layout,
    loop: LoopThread,
    vocab_size: int,
) -> ServedReference:
    """A reference that servers score; where the run goes on, the start's weights are loaded to
    measure its floor.
    """

    def made() -> tuple[Scorer, ReferenceWeights | None]:
        scorer = _scorer(options.reference_urls, options, layout, vocab_size)
        return scorer, _weights(options, args, parameters, layout.shard, None) if args.iteration > 0 else None

    scorer, start = all_reduce_startup(made)
    left_out = (
        "reference log-probs, and so no part in the loss (rollout_corr/nonfinite_tokens): start it with "
        "more, or train with a shorter --seq-length"
    )

    async def check() -> None:
        await _warn_of_short(scorer, "--rollout-reference-url", args.seq_length, left_out)

    _reach(scorer, loop, layout, "--rollout-reference-url", check)
    served = ServedScores(scorer, loop, layout, "--rollout-reference-url", "reference")
    return ServedReference(served, start=start)


@collective
def make_teacher(
    config: RolloutCorrectionConfig,
    options: RunConfig,
    args: argparse.Namespace,
    layout: Layout,
    *,
    loop: LoopThread,
    vocab_size: int,
) -> Teacher:
    """The teacher that distillation asks for; every rank calls it, and rank 0 asks for its vocabulary.

    Args:
        config: the correction.
        options: of the run.
        args: Megatron's.
        layout: this rank's process groups.
        loop: the event loop of servers.
        vocab_size: of the model.

    Raises:
        RolloutError: on a data leader: a server does not answer.
        StartupError: on rank 0: one has another vocabulary, or lists fewer ids than are asked for.
        PeerFailure: then, on the others.
    """
    if not config.distill_coef:
        return Teacher()
    if not options.rewards and options.maker is None and dist.get_rank() == 0:
        warn(f"no reward is given: all rewards are 0, and {FLAG} alone trains")
    likeliest = config.distill_top_k or 0
    scorer = all_reduce_startup(lambda: _scorer(options.teacher_urls, options, layout, vocab_size))
    left_out = (
        "teacher's log-probs, and nothing to learn from it (loss/distill_missing): start it with more, or "
        "train with a shorter --seq-length"
    )

    async def check() -> None:
        tokenizer = Tokenizer.from_folder(options.hf_checkpoint)
        texts = {}
        if tokenizer is not None:
            # one vocabulary with other tokens added makes the same of plain text
            added = ("".join(some) for some in batched(tokenizer.added_tokens, SHOWN))
            texts = encoded(tokenizer, (TEXT, TEXT[:PLAIN], *added))
        await check_teacher(scorer, vocab_size, texts, likeliest)
        await _warn_of_short(scorer, FLAG, args.seq_length, left_out)

    _reach(scorer, loop, layout, FLAG, check)
    return Teacher(ServedScores(scorer, loop, layout, FLAG, "teacher", likeliest))


def _scorer(urls: Sequence[str], options: RunConfig, layout: Layout, vocab_size: int) -> Scorer:
    known = ("engine", "max_concurrency", "timeout_s", "max_retries", "api_key", "ca_file")
    given = {name: value for name, value in options.client_arguments().items() if name in known}
    return Scorer(urls, vocab_size=vocab_size, replica=layout.dp_rank, replicas=layout.dp_size, **given)


@collective
def _reach(
    scorer: Scorer, loop: LoopThread, layout: Layout, flag: str, check: Callable[[], Awaitable[None]]
) -> None:
    """Each data leader waits for its servers; rank 0 then runs `check`."""
    error: Exception | None = None
    if layout.is_data_leader:
        try:
            loop.call(scorer.wait_healthy(HEALTHY_WITHIN_S))
            if dist.get_rank() == 0:
                loop.call(check())
        except RolloutError as failure:
            failure.add_note(f"it is a server of {flag}; start it, or name another")
            error = failure
        except StartupError as failure:
            error = failure
    all_reduce_failure(error)


async def _warn_of_short(scorer: Scorer, flag: str, seq_length: int, left_out: str) -> None:
    """A sample that a server has no room for is not scored: its tokens would leave the
    loss without a word.
    """
    short = await scorer.too_short(seq_length)
    if short is not None:
        url, context = short
        warn(
            f"{flag} {url}: its context length {context} has no room to score {seq_length} tokens; longer "
            f"samples than it has room for have no {left_out}"
        )


def _weights(
    options: RunConfig,
    args: argparse.Namespace,
    parameters: Sequence[LocalParameter],
    ranks: ShardRanks,
    saved: Path | None,
) -> ReferenceWeights:
    """The weights of the saved reset, else those of the checkpoint that a flag names, else
    those of the start.
    """
    check_arguments(args, resets=options.reference_reset is not None)
    weights, source = ReferenceWeights(parameters), options.reference_checkpoint
    if source is not None:
        _check_same_model(source, options.hf_checkpoint)
    if saved is not None:
        weights.load(HFCheckpoint(saved), ranks)
    elif source is not None or args.iteration > 0:
        with naming_checkpoint(
            source or options.hf_checkpoint, "--rollout-reference-checkpoint" if source else None
        ):
            weights.load(HFCheckpoint(source or options.hf_checkpoint), ranks)
    return weights


def check_start_known(options: RunConfig, args: argparse.Namespace) -> None:
    """ValueError where the weights that the run began with could not be found again after a restart."""
    if args.pretrained_checkpoint is not None and options.reference_checkpoint is None:
        raise ValueError(
            f"--pretrained-checkpoint {args.pretrained_checkpoint} with a KL penalty against a reference "
            "policy: the start's weights are read in Hugging Face format when the run goes on; write them "
            "with `megatron-rl-corr export`, and name that folder by --rollout-reference-checkpoint, or by "
            "--rollout-hf-checkpoint and leave --pretrained-checkpoint out"
        )


def check_arguments(args: argparse.Namespace, *, resets: bool = False) -> None:
    """ValueError for flags of Megatron's that a reference policy does not go with; resets: nor
    one that is reset.
    """
    if resets and vars(args).get("non_persistent_ckpt_type") == "local":
        raise ValueError(
            "--non-persistent-ckpt-type local with --rollout-reference-reset: such a checkpoint has no "
            "folder that a reference policy could be saved in; use global, or leave one of them out"
        )
    for name in ("fp8", "fp4"):
        if vars(args).get(name):
            raise ValueError(
                f"--{name}-format {vars(args)[name]} with a KL penalty against a reference policy: scales "
                "and quantised weights are kept between passes, and would be the other policy's; train in "
                "16 bits, or leave --rollout-kl-loss-coef and --rollout-kl-reward-coef out"
            )


def _check_same_model(path: str, start: str) -> None:
    """ValueError unless both config.json describe one model: its weights alone take the
    place of the others.
    """
    with naming_checkpoint(path, "--rollout-reference-checkpoint"):
        theirs = _described(path)
    ours = _described(start)
    if theirs != ours:
        other = sorted(set(theirs) ^ set(ours))
        raise ValueError(
            f"--rollout-reference-checkpoint {path} is another model than --rollout-hf-checkpoint {start}: "
            f"their config.json differ in {', '.join(other)}; use one of the same architecture"
        )


def _described(path: str) -> list[str]:
    """Words that two folders of one model have both: Megatron's flags, or settings where no table has it."""
    if has_table(read_config(path)):
        return model_flags(read_config(path))
    return [f"{key} {value}" for key, value in computed(read_model(path)).items()]
