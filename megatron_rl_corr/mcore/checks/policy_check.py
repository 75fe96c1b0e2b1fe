"""Refuses a run whose Megatron flags make a policy other than the one that servers sample from.

The servers run the checkpoint's model. `model_flags` of its config.json, parsed by Megatron's own parser,
gives the arguments that the run's are compared with.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import nn

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.mcore import bridge_model
from megatron_rl_corr.mcore.checks.early_checks import naming_checkpoint
from megatron_rl_corr.mcore.checks.policy_flags import ALLOW, COMPARED, EFFECTIVE, IGNORED, REFUSED
from megatron_rl_corr.mcore.mtp import mtp_problems
from megatron_rl_corr.models.bridge_settings import not_proven
from megatron_rl_corr.models.hf_checkpoint import read_config, read_model
from megatron_rl_corr.models.megatron_flags import add_missing_flags, flags_despite_settings
from megatron_rl_corr.models.providers import takes_bridge
from megatron_rl_corr.models.settings import not_trained

MADE_BY_FLAGS = {
    "activation_func": "--swiglu or --quick-geglu",
    "gated_linear_unit": "--swiglu or --quick-geglu",
}
"""Fields of Megatron's configuration that no flag has the name of -> the flag that makes them
for these models.
"""


class MegatronParser:
    """The flags of this process's Megatron, which parsed the run's command line."""

    def __init__(self) -> None:
        # wheels have it from 0.17 on; a run with the launcher has it always
        from megatron.training import arguments

        parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
        self._parser = add_missing_flags(arguments.add_megatron_arguments(parser))
        self.actions = {flag: action for action in self._parser._actions for flag in action.option_strings}

    def __contains__(self, flag: str) -> bool:
        return flag in self.actions

    def parse(self, words: list[str]) -> argparse.Namespace:
        """Raises ValueError for a flag, or a value, that this release does not have."""
        try:
            args, unknown = self._parser.parse_known_args(words)
        except argparse.ArgumentError as error:
            raise ValueError(
                f"megatron-core {megatron_version} can't make the model of config.json: {error}"
            ) from None
        if unknown:
            raise ValueError(
                f"megatron-core {megatron_version} can't make the model of config.json: it has no "
                f"{' '.join(unknown)}; install a newer one"
            )
        return args

    def value(self, flag: str, args: argparse.Namespace) -> Any:
        """The arguments' value of a flag. Raises ValueError if a script removed it from them."""
        name = self.actions[flag].dest
        if name not in vars(args):
            raise ValueError(
                f"{flag}: the script's arguments have no {name} any more, so what it is set to can't be "
                f"checked; keep args.{name}"
            )
        return vars(args)[name]


def check_policy(args: argparse.Namespace) -> None:
    """Check a run's arguments, before a model is made.

    With --rollout-allow-model-differences, differences from config.json are warnings on the last rank; flags
    of REFUSED are refused even then, and what MTP layers can't be trained with.

    Raises:
        ValueError: lists every flag by which the trained policy would not be the sampled one, each
            with the remedy.
    """
    parser, path, provider = MegatronParser(), args.rollout_hf_checkpoint, None
    with naming_checkpoint(path):
        config = read_config(path)
        bridged = takes_bridge(config, args.rollout_model_provider)
        lines = not_proven(config) if bridged else not_trained(config)
        differences = [f"--rollout-hf-checkpoint {path}: {line}" for line in lines]
    try:
        with naming_checkpoint(path):
            if bridged:
                provider = bridge_model.provider_of(read_model(path))
                words = bridge_model.provider_flags(provider)
            else:
                words = flags_despite_settings(config)
            parser.parse(words)
    except ValueError as error:  # Megatron, or this release of it, computes something else than that model
        differences.append(str(error))
    else:
        differences += model_differences(args, words, parser)
    refused = refused_flags(args, parser) + mtp_problems(args, config)
    if provider is not None:
        refused += bridge_model.run_problems(args, provider)
    _refuse(refused, differences, args.rollout_allow_model_differences)


def check_model(chunks: Sequence[nn.Module], args: argparse.Namespace) -> None:
    """Raises ValueError if the script built this rank's unwrapped model chunks differently from what
    its arguments say.

    Megatron's own pretrain_gpt.py hands on neither --rope-scaling-factor nor
    --rotary-seq-len-interpolation-factor.
    """
    from megatron.training import arguments

    bridged = takes_bridge(read_config(args.rollout_hf_checkpoint), args.rollout_model_provider)
    if bridged:
        expected = bridge_model.configured_provider(args)
    else:
        expected = arguments.core_transformer_config_from_args(args)
    parser = MegatronParser()
    refused, differences = [], []
    fields = {field.name for field in dataclasses.fields(expected)}
    names = {flag: action.dest for flag, action in parser.actions.items() if action.dest in fields}
    for chunk in chunks:
        config = chunk.config
        refused += [
            f"{row.flag}: the script's model has {names[row.flag]} {getattr(config, names[row.flag])}: "
            f"{row.why}"
            for row in REFUSED
            if row.flag in names and row.where(getattr(config, names[row.flag]), args)
        ]
        if bridged:
            differences += bridge_model.model_problems(chunk, expected)
            continue
        differences += [
            f"{flag}: the script's model has {names[flag]} {getattr(config, names[flag])}, and its arguments "
            f"say {getattr(expected, names[flag])}; make its configuration by Megatron's "
            "core_transformer_config_from_args"
            for flag in COMPARED
            if flag in names and getattr(config, names[flag]) != getattr(expected, names[flag])
        ]
        differences += [
            f"{flag}: the script's model has {name} {getattr(config, name)}, and its arguments make it "
            f"{getattr(expected, name)}; make its configuration by Megatron's "
            "core_transformer_config_from_args"
            for name, flag in MADE_BY_FLAGS.items()
            if getattr(config, name) != getattr(expected, name)
        ]
        differences += _other_positions(chunk, args, expected)
    _refuse(
        list(dict.fromkeys(refused)), list(dict.fromkeys(differences)), args.rollout_allow_model_differences
    )


def _refuse(refused: list[str], differences: list[str], allowed: bool) -> None:
    """Raises ValueError with all lines; allowed differences are printed instead, on the last rank."""
    if differences and allowed:
        # Without processes that have met, as in a check of the command line, this is the only one.
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            lines = "\n  ".join(differences)
            warn(f"{ALLOW}: the model is not the one of config.json:\n  {lines}")
        differences = []
    if refused or differences:
        hint = f"\n{ALLOW} makes a warning of what differs from config.json" if differences else ""
        lines = "\n  ".join(refused + differences)
        raise ValueError(
            f"Megatron would train another policy than the servers sample from:\n  {lines}{hint}"
        )


def refused_flags(args: argparse.Namespace, parser: MegatronParser) -> list[str]:
    """A line for each flag of REFUSED that is given: flag, value, reason, remedy."""
    return [
        f"{_given(row.flag, value, parser)}: {row.why}; {row.instead}"
        for row in REFUSED
        if row.flag in parser and row.where(value := parser.value(row.flag, args), args)
    ]


def model_differences(args: argparse.Namespace, words: list[str], parser: MegatronParser) -> list[str]:
    """A line for each compared flag whose value differs from that of `words`, config.json's flags."""
    expected, stated, lines = parser.parse(words), _by_flag(words), []
    for flag in [flag for flag in COMPARED if flag in parser] + unknown_flags(parser):
        run, model = parser.value(flag, args), parser.value(flag, expected)
        if flag in EFFECTIVE:
            run, model = EFFECTIVE[flag](args), EFFECTIVE[flag](expected)
        if run != model:
            remedy = f"give {stated[flag]}" if flag in stated else f"leave {flag} out"
            lines.append(
                f"{_given(flag, run, parser)}: config.json says {_short(flag, model, parser)}; {remedy}"
            )
    return lines


def _other_positions(chunk: nn.Module, args: argparse.Namespace, config: Any) -> list[str]:
    """Lines for what GPTModel takes beside its configuration: the kind of positions, and the
    rotary frequencies.
    """
    if chunk.position_embedding_type != args.position_embedding_type:
        return [
            f"--position-embedding-type {args.position_embedding_type}: the script's model has "
            f"{chunk.position_embedding_type}; hand the flag on to its GPTModel"
        ]
    # latent attention has it from config
    if args.position_embedding_type == "yarn" and not args.multi_latent_attention:
        return _other_yarn(chunk, args, config)
    if args.position_embedding_type != "rope" or args.multi_latent_attention:
        return []
    expected = RotaryEmbedding(
        kv_channels=config.kv_channels,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        use_cpu_initialization=True,
    )
    found = chunk.rotary_pos_emb
    same = found.inv_freq.shape == expected.inv_freq.shape and torch.allclose(
        found.inv_freq.cpu().float(), expected.inv_freq, rtol=1e-5, atol=0
    )
    if same and found.seq_len_interpolation_factor == expected.seq_len_interpolation_factor:
        return []
    return [
        "the script's model has other rotary frequencies than its flags say: hand rotary_base, "
        "rotary_percent, rope_scaling (--use-rope-scaling), rope_scaling_factor and "
        "seq_len_interpolation_factor (--rotary-seq-len-interpolation-factor) on to its GPTModel; "
        "Megatron's pretrain_gpt.py leaves out the last two"
    ]


def _other_yarn(chunk: nn.Module, args: argparse.Namespace, config: Any) -> list[str]:
    """Lines for YaRN's numbers where GPTModel has others than the arguments make."""
    expected = {
        "rotary_base": args.rotary_base,
        "scaling_factor": config.yarn_rotary_scaling_factor,
        "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
        "beta_fast": config.yarn_beta_fast,
        "beta_slow": config.yarn_beta_slow,
        "mscale": config.yarn_mscale,
        "mscale_all_dim": config.yarn_mscale_all_dim,
        "correction_range_round_to_int": config.yarn_correction_range_round_to_int,
    }
    return [
        f"the script's model has YaRN's {name} {found}, and its flags say {value}; hand rotary_base on to "
        "its GPTModel, and make its configuration by Megatron's core_transformer_config_from_args"
        for name, value in expected.items()
        if (found := getattr(chunk.rotary_pos_emb, name)) != value
    ]


def unknown_flags(parser: MegatronParser) -> list[str]:
    """Flags of Megatron's model configuration in no table, as of a fork or a newer release: they
    are compared too.
    """
    known = {
        *COMPARED,
        *(row.flag for row in REFUSED),
        *(flag for flags in IGNORED.values() for flag in flags),
    }
    known = {parser.actions[flag].dest for flag in known if flag in parser}
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)} - known
    first = {action.dest: flag for flag, action in reversed(parser.actions.items())}
    return [first[name] for name in sorted(fields & first.keys())]


def _by_flag(words: list[str]) -> dict[str, str]:
    """Each flag of a command line -> the words that give it."""
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            flag = word
            found[flag] = word
        else:
            found[flag] += f" {word}"
    if "--num-query-groups" in found:
        found["--num-query-groups"] = f"--group-query-attention {found['--num-query-groups']}"
    return found


def _given(flag: str, value: Any, parser: MegatronParser) -> str:
    """The flag with the run's value."""
    action = parser.actions[flag]
    if action.nargs == 0:
        return flag if value == action.const else f"no {flag}"
    return f"{flag} {value}"


def _short(flag: str, value: Any, parser: MegatronParser) -> str:
    """The flag's value by config.json, for a message."""
    action = parser.actions[flag]
    if action.nargs == 0:
        return "it is given" if value == action.const else "it is not given"
    return str(value)
