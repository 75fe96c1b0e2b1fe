"""Megatron's flags that a corrected run can't honour, each with what to give instead."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.training import checkpointing

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.config.problems import Problems, Refusal, check_each
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.checks.batch_invariance import check_batch_invariance
from megatron_rl_corr.mcore.checks.packed_flags import check_packed
from megatron_rl_corr.mcore.checks.policy_check import check_policy
from megatron_rl_corr.mcore.colocation import check_colocation
from megatron_rl_corr.mcore.feature import feature_classes, number_of_steps
from megatron_rl_corr.models.architectures import BRIDGED, unusual_weights
from megatron_rl_corr.models.hf_checkpoint import read_config
from megatron_rl_corr.models.megatron_flags import DELTA_NETS, SPARSE
from megatron_rl_corr.moe.routers import check_router_replay


def checks_of_model() -> tuple[Callable[[argparse.Namespace], None], ...]:
    """Checks of what is trained and of where its weights come from, whatever it is trained by."""
    return (
        compat.check_expert_layout,
        check_latent_attention,
        check_fused_yarn,
        check_fused_clamp,
        check_delta_net_norms,
        check_sparse_attention,
        check_unusual_weights,
        check_settings_file,
        check_offload,
        check_finetune,
        check_begin,
        check_layers,
        check_policy,
    )


def check_megatron_arguments(args: argparse.Namespace) -> None:
    """ValueError, which lists everything, for Megatron flags that a corrected step can't honour.

    A flag is told once: what further checks have against its value is left out.
    """
    checks = (
        check_router_replay,
        check_context_parallel,
        check_batch_invariance,
        *checks_of_model(),
        _check_packed_if,
        check_per_token_loss,
        check_updates,
        check_batch_size,
        check_skipped,
        check_evaluation,
        *(one.check_arguments for one in feature_classes()),
        check_vocabulary,
        check_colocation,
    )
    found, told = [], set()
    for check in checks:
        problems = Problems()
        if check is check_layers and told & {"--load", "--override-ckpt-iteration"}:
            continue  # of a checkpoint that can't be begun with
        with problems.catch():
            check(args)
        new = [text for text in problems.found if not flags_told(text) <= told]
        told.update(*map(flags_told, new))
        found += new
    if found:
        raise Refusal(found)
    _warn_of_expert_biases(args)


def flags_told(problem: str) -> set[str]:
    """The flags that a problem is about: the first one of it, or of each of its lines where it is a list."""
    lines = [line for line in problem.split("\n") if line.startswith("  ")] or [problem]
    return {found[0] for line in lines if (found := re.search(r"--[\w-]+", line))}


def _check_packed_if(args: argparse.Namespace) -> None:
    if not args.rollout_pad_sequences:
        check_packed(args)


def check_context_parallel(args: argparse.Namespace) -> None:
    """ValueError for rows that can't be cut over context-parallel ranks."""
    chunks = 2 * args.context_parallel_size
    if args.context_parallel_size > 1 and args.seq_length % chunks:
        raise ValueError(
            f"--seq-length {args.seq_length} must be a multiple of 2 * --context-parallel-size, {chunks}: "
            "every row is cut into so many chunks"
        )


def check_settings_file(args: argparse.Namespace) -> None:
    """ValueError for a file that stands in for the flags."""
    if args.yaml_cfg is not None:
        raise ValueError(
            "--yaml-cfg replaces every flag, the rollout ones too; give Megatron's settings as flags"
        )


def check_batch_size(args: argparse.Namespace) -> None:
    """ValueError for a batch whose size changes."""

    def check(name: str) -> None:
        if vars(args).get(name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} is not supported with rollouts: every step takes "
                "--global-batch-size"
            )

    check_each(check, ("rampup_batch_size", "step_batch_size_schedule"))  # the second from 0.19 on


def check_offload(args: argparse.Namespace) -> None:
    """ValueError for an optimizer on the host that would not learn of the checkpoint's weights."""
    if vars(args).get("optimizer_cpu_offload") and not (args.bf16 or args.fp16):
        raise ValueError(
            "--optimizer-cpu-offload in float32: Megatron's offloaded copies stay those of the initial "
            "weights, and the first update would put them in place of the checkpoint's; use --bf16, or "
            "leave it out"
        )


def check_finetune(args: argparse.Namespace) -> None:
    """ValueError for a run that would begin anew each time."""
    if args.finetune:
        raise ValueError(
            "--finetune begins at iteration 0 each time that the run is started; name the checkpoint that "
            "training begins with by --pretrained-checkpoint instead, and the run's own, to go on from, by "
            "--load"
        )


def check_skipped(args: argparse.Namespace) -> None:
    """ValueError for iterations that are left out."""
    if args.iterations_to_skip:
        raise ValueError(
            f"--iterations-to-skip {args.iterations_to_skip}: samples of a step that is skipped would train "
            "a later one; leave it out"
        )


def check_evaluation(args: argparse.Namespace) -> None:
    """ValueError for an evaluation of the script's data."""
    if args.eval_iters:
        raise ValueError(
            f"--eval-iters {args.eval_iters}: evaluation would score the script's data set, not rollouts; "
            "use --eval-iters 0, and --rollout-eval-prompts for rollouts on held-out prompts"
        )


def _warn_of_expert_biases(args: argparse.Namespace) -> None:
    if not (args.num_experts and args.moe_router_enable_expert_bias):
        return
    rate = args.moe_router_bias_update_rate
    if rate and args.rank == 0:
        warn(
            f"--moe-router-bias-update-rate {rate:g} moves the bias of every expert after each step, and so "
            "the policy, whatever the loss and --lr are; give 0 unless that is wanted"
        )


def check_vocabulary(args: argparse.Namespace) -> None:
    """ValueError for an embedding smaller than the model's, which Megatron makes for a
    tokenizer of fewer ids.
    """
    # before 0.18 a command line that is only checked has none yet
    padded = vars(args).get("padded_vocab_size")
    if padded is not None and args.vocab_size is not None and padded < args.vocab_size:
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type}: its tokenizer makes an embedding of {padded} rows, and "
            f"the model has {args.vocab_size}; give --tokenizer-type NullTokenizer: prompts are made with "
            "that of --rollout-hf-checkpoint"
        )


def check_latent_attention(args: argparse.Namespace) -> None:
    """ValueError for latent attention whose gradients Megatron's local spec gets wrong."""
    ranks = args.tensor_model_parallel_size
    if ranks > 1 and args.multi_latent_attention and args.transformer_impl == "local":
        # multi_latent_attention.py gathers the positional key with a backward that cuts and does not sum:
        # each rank keeps what its own heads give.
        raise ValueError(
            "--transformer-impl local with --multi-latent-attention and --tensor-model-parallel-size "
            f"{ranks}: Megatron does not sum the positional key's gradient over the ranks; use "
            "--transformer-impl transformer_engine, or --tensor-model-parallel-size 1"
        )


def check_fused_yarn(args: argparse.Namespace) -> None:
    """ValueError for YaRN in Megatron's fused rotary embedding of packed sequences, which leaves out the
    factor of cosines and sines.
    """
    is_yarn = args.position_embedding_type == "yarn" and not args.multi_latent_attention
    if is_yarn and args.apply_rope_fusion and not args.rollout_pad_sequences:
        raise ValueError(
            "--position-embedding-type yarn: Megatron's fused rotary embedding leaves YaRN's factor of "
            "cosines and sines out of packed sequences, and says nothing; give --no-rope-fusion"
        )


def check_fused_clamp(args: argparse.Namespace) -> None:
    """ValueError for a clamped activation in Megatron's fused kernel, which clamps before it adds the bias.

    Grouped experts come with their biases added.
    """
    # of releases that have both
    clamp, quick = vars(args).get("activation_func_clamp_value"), vars(args).get("quick_geglu")
    is_clamped = quick and clamp is not None and args.add_bias_linear
    if is_clamped and args.bias_gelu_fusion and not args.moe_grouped_gemm:
        raise ValueError(
            f"--activation-func-clamp-value {clamp}: where experts are not "
            "grouped, Megatron's fused activation clamps before it adds the bias, and the model after it; "
            "give --no-bias-gelu-fusion or --moe-grouped-gemm"
        )


def check_delta_net_norms(args: argparse.Namespace) -> None:
    """ValueError for gated delta nets on tensor-parallel ranks whose gradients of a norm would differ.

    Each rank has the norm behind its own heads, and Megatron adds up over those ranks the gradients of norms
    that it marks as sequence-parallel.
    """
    variant = vars(args).get("experimental_attention_variant")
    if variant == DELTA_NETS and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise ValueError(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} without --sequence-parallel: "
            "Megatron would not add up the gradients of the norm behind a gated delta net, and ranks would "
            "train different ones; give --sequence-parallel"
        )


def check_sparse_attention(args: argparse.Namespace) -> None:
    """ValueError for what a model whose attention takes the keys of an indexer is not trained with."""
    if vars(args).get("experimental_attention_variant") != SPARSE:
        return
    problems, which = Problems(), f"--experimental-attention-variant {SPARSE}"
    if loss := args.dsa_indexer_loss_coeff:
        problems.add(
            f"--dsa-indexer-loss-coeff {loss}: the indexer would learn from a loss of its own, and the "
            "policy change by the keys that it chooses, beside the corrected gradient, whose norm would "
            "count both; leave it out"
        )
    if args.context_parallel_size > 1:
        problems.add(
            f"--context-parallel-size {args.context_parallel_size}: with {which} keys are gathered over "
            "context-parallel ranks, which is not proven; use 1"
        )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        problems.add(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} without --sequence-parallel: "
            f"Megatron's latent attention with {which} is made for both; give --sequence-parallel"
        )
    if args.mtp_num_layers:
        problems.add(
            f"--mtp-num-layers {args.mtp_num_layers}: with {which} layers that predict further tokens are "
            "not proven; leave it out"
        )
    problems.raise_all()


def check_unusual_weights(args: argparse.Namespace) -> None:
    """ValueError for pushes that are not proven of all weights of the checkpoint."""
    path = Path(args.rollout_hf_checkpoint)
    which = unusual_weights(read_config(path)) if (path / "config.json").is_file() else None
    if args.rollout_model_provider == "bridge":
        which = which or BRIDGED
    if which is None:
        return
    problems, why = Problems(), f"in {path} {which}"
    if args.rollout_push_rounding != "none":
        problems.add(
            f"--rollout-push-rounding {args.rollout_push_rounding}: {why}, and rounding of those as a server "
            "would is not proven; leave it out"
        )
    if args.rollout_push == "delta":
        problems.add(
            f"--rollout-push delta: {why}, and pushes of what changed there are not proven; use full"
        )
    if args.rollout_weight_transport == "tensor":
        problems.add(
            f"--rollout-weight-transport tensor: {why}, and a server's ranks that read one tensor of those "
            "are not proven; use distributed or disk"
        )
    problems.raise_all()


def _updates_of_batch(args: argparse.Namespace) -> tuple[int, str]:
    """(the updates that a batch makes, the words for them in an error)."""
    parts, epochs = args.rollout_updates_per_batch, args.rollout_epochs_per_batch
    product = f"--rollout-updates-per-batch {parts} x --rollout-epochs-per-batch {epochs}"
    return parts * epochs, f"{parts * epochs}, the updates that a batch makes ({product})"


def check_updates(args: argparse.Namespace) -> None:
    """ValueError for a run that would end, save or evaluate within a batch: a checkpoint does
    not hold the batch.
    """
    updates, words = _updates_of_batch(args)
    values = vars(args)
    steps = "--train-iters" if args.train_samples is None else "--train-samples / --global-batch-size"
    counted = [(steps, number_of_steps(args)), ("--exit-interval", args.exit_interval)]
    if args.save:
        names = ("save_interval", "non_persistent_save_interval")
        counted += [(f"--{name.replace('_', '-')}", values[name]) for name in names]
    counted += [pair for one in feature_classes() for pair in one.intervals(args).items()]
    if args.adlr_autoresume:
        counted.append(("--adlr-autoresume-interval", args.adlr_autoresume_interval))
    # From 0.16 on.
    counted += [
        ("--phase-transition-iterations", at) for at in values.get("phase_transition_iterations") or ()
    ]
    wrong = [(name, value) for name, value in counted if value and value % updates]
    if wrong:
        raise Refusal(
            f"{name} {value} must be a multiple of {words}: a run saves, evaluates and ends between two "
            "batches"
            for name, value in wrong
        )


def check_loaded_iteration(args: argparse.Namespace) -> None:
    """ValueError for a checkpoint whose steps can't be counted in batches of this run: it was
    made with others.
    """
    updates, words = _updates_of_batch(args)
    if args.iteration % updates:
        raise ValueError(
            f"--load {args.load}: iteration {args.iteration} of the checkpoint is not a multiple of {words}, "
            "which Megatron's intervals are counted in; give what it was trained with, or another --ckpt-step"
        )


def check_begin(args: argparse.Namespace) -> None:
    """ValueError for a checkpoint of --load that Megatron would go on from at iteration 0, as if
    there were none.

    Converters make such: a "release", or one of iteration 0.
    """
    if not args.load:
        return
    named = _named_checkpoint(args.load)
    over = "the weights of --rollout-hf-checkpoint would be loaded over its own"
    if named == "release" or (named == "0" and not args.ckpt_step):
        raise ValueError(
            f"--load {args.load}: its checkpoint ({named}) begins at iteration 0, where {over}; name it by "
            "--pretrained-checkpoint, and by --load the run's own folder"
        )
    if named is not None and vars(args).get("override_ckpt_iteration") == 0:
        raise ValueError(f"--override-ckpt-iteration 0 begins at iteration 0, where {over}; give 1 or more")


def _named_checkpoint(folder: str) -> str | None:
    """What the folder's newest checkpoint is called: an iteration or "release"; None: it has none."""
    tracker = Path(checkpointing.get_checkpoint_tracker_filename(folder))
    return tracker.read_text().strip() if tracker.is_file() else None


def check_layers(args: argparse.Namespace) -> None:
    """ValueError for a checkpoint whose layers have other numbers than the run's, or other names
    for their norms.

    Megatron maps the names of one implementation to those of the other for dense layers with plain
    attention alone.
    """
    flag, source = "--load", args.load
    if args.pretrained_checkpoint is not None and not (source and _named_checkpoint(source)):
        flag, source = "--pretrained-checkpoint", args.pretrained_checkpoint
    if not source:
        return
    named = args.ckpt_step or _named_checkpoint(source)
    if not named:
        return
    release = named == "release"
    number = 0 if release else int(named)
    folder = Path(checkpointing.get_checkpoint_name(source, number, release, return_base_dir=True))
    # Another format than Megatron's sharded one is loaded by torch, which names what is missing.
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        return
    arguments = vars(dist_checkpointing.load_common_state_dict(str(folder))["args"])
    saved = arguments["transformer_impl"]
    remedy = f"or convert it to Hugging Face format for --rollout-hf-checkpoint and leave {flag} out"
    patterns = [
        (found.get("hybrid_layer_pattern") or "").replace("|", "") for found in (vars(args), arguments)
    ]
    if patterns[0] != patterns[1]:
        raise ValueError(
            f"--hybrid-layer-pattern: the checkpoint {folder} was saved with {patterns[1] or 'none'}, and "
            f"this run has {patterns[0] or 'none'}, whose layers have other numbers; give that of the "
            f"checkpoint, {remedy}"
        )
    if saved != args.transformer_impl and (args.num_experts or args.multi_latent_attention):
        raise ValueError(
            f"--transformer-impl {args.transformer_impl}: the checkpoint {folder} was saved with {saved}, "
            "whose layers have other names, and Megatron does not load one into the other with experts or "
            f"latent attention; give --transformer-impl {saved}, {remedy}"
        )


def check_per_token_loss(args: argparse.Namespace) -> None:
    """ValueError where --calculate-per-token-loss would overflow: there all positions are
    counted, and divided by.
    """
    if not args.calculate_per_token_loss:
        return
    positions = args.global_batch_size * args.seq_length
    if args.fp16:
        raise ValueError(
            "--fp16 with --calculate-per-token-loss: until all gradients are added up they are those of a "
            f"loss times the {positions} positions of the global batch, which float16 can't hold, and each "
            "overflow costs the samples of a step; leave --calculate-per-token-loss out (the gradient is "
            "the same), or use --bf16"
        )
    if positions >= 2**31:
        raise ValueError(
            f"--calculate-per-token-loss with --global-batch-size {args.global_batch_size} x --seq-length "
            f"{args.seq_length} = {positions} positions: Megatron counts them in 32 bits, at most "
            f"{2**31 - 1}; leave --calculate-per-token-loss out (the gradient is the same), or use a smaller "
            "batch"
        )
