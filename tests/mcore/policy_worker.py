"""Flips Megatron's flags on tiny models, and runs the checks of flags and models against them; one process.

policy_worker.py FLIPS.json MODEL_DIR ...  prints a line of JSON for each flip of policy_cases.py (how far
log-probs moved, what is refused, what differs from config.json), and a last one of what the checks say.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from hf_models_worker import LOCAL, all_gather_logits, arguments, build
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args

from megatron_rl_corr.config.flags import add_flags
from megatron_rl_corr.mcore import compat, mtp, session
from megatron_rl_corr.mcore.checks import policy_check, policy_flags, run_flags
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.megatron_flags import model_flags
from megatron_rl_corr.models.names import NameTable
from megatron_rl_corr.models.shards import load_shards, local_parameters
from tools.local_server import free_port


class Flipper:
    """A model's log-probs with some words among its flags, under the checkpoint's weights."""

    def __init__(self, path):
        self.checkpoint, self.before = HFCheckpoint(path), {}
        self.tokens = torch.load(path / "reference.pt", weights_only=True)["tokens"]
        self.expected = parameters(build(arguments(self.checkpoint.config, spec=LOCAL)))

    def logprobs(self, args, training=False):
        """[ROWS, LENGTH, VOCAB] float32; None where the model has not the checkpoint's parameters."""
        model = build(args).train(training)
        if parameters(model) != self.expected:
            return None
        self.load(model, args)
        torch.manual_seed(7)
        return torch.log_softmax(all_gather_logits(model, self.tokens, compat.layout()).float(), -1)

    def load(self, model, args):
        table = NameTable(self.checkpoint.config, padded_vocab_size=args.padded_vocab_size)
        parameters = local_parameters([model], table, experts_per_rank=args.num_experts or 0)
        load_shards(parameters, self.checkpoint, compat.layout().shard)

    def moved(self, flip, kind):
        """The largest change of a log-prob; infinite where the model has other parameters."""
        config, both = self.checkpoint.config, flip["both"].split()
        if flip["both"] not in self.before:
            self.before[flip["both"]] = self.logprobs(arguments(config, (), both, spec=LOCAL))
        args = arguments(config, flip["without"].split(), [*both, *flip["words"].split()], spec=LOCAL)
        after = self.logprobs(args, training=kind != "compared")
        return args, math.inf if after is None else (after - self.before[flip["both"]]).abs().max().item()


def parameters(model):
    """Names and shapes, but for the size of the padded vocabulary; buffers of the routers too."""
    shapes = {name: t.shape for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    return {name: shape[name.startswith(("embedding.", "output_layer.")) :] for name, shape in shapes.items()}


def flip_all(file, flippers, parser):
    for name, kind, flip in json.loads(Path(file).read_text()):
        flipper = flippers[flip["model"]]
        try:
            args, moved = flipper.moved(flip, kind)
        # Megatron's own
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as failure:
            yield {"flip": name, "kind": kind, "error": repr(failure)[:300]}
            continue
        yield {
            "flip": name,
            "kind": kind,
            "moved": moved,
            "error": None,
            "refused": policy_check.refused_flags(args, parser),
            "differences": policy_check.model_differences(
                args, model_flags(flipper.checkpoint.config), parser
            ),
        }


def inventory(parser):
    """What Megatron's parser and configuration have, and the name that each flag's value has
    in the arguments.
    """
    return {
        "destinations": {flag: action.dest for flag, action in parser.actions.items()},
        "fields": [field.name for field in dataclasses.fields(MLATransformerConfig)],
        "ours": [action.dest for action in add_flags(argparse.ArgumentParser())._actions],
        "unknown": policy_check.unknown_flags(parser),
    }


def local(checkpoint, args, chunks):
    return session.loaded_parameters(checkpoint, args, chunks, None, load=False)


def said(check, *arguments):
    """The error's message, and what was printed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            check(*arguments)
    except ValueError as error:
        return [str(error), printed.getvalue()]
    return ["", printed.getvalue()]


def run_arguments(path, words="", without="", **changed):
    """A run's: Megatron's, and ours."""
    args = arguments(HFCheckpoint(path).config, without.split(), words.split(), spec=LOCAL)
    ours = add_flags(argparse.ArgumentParser()).parse_args(["--rollout-hf-checkpoint", str(path)])
    vars(args).update(vars(ours) | {"eval_iters": 0} | changed)
    return args


def checks(dense, moe, latent):
    """What `check_policy` and `check_model` say."""
    check_policy, check_model = policy_check.check_policy, policy_check.check_model
    wrong = "--rotary-base 10000 --norm-epsilon 1e-2 --no-bias-gelu-fusion"
    yield "several", said(check_policy, run_arguments(dense, wrong, "--swiglu --disable-bias-linear"))
    yield "allowed", said(check_policy, run_arguments(dense, wrong, rollout_allow_model_differences=True))
    yield (
        "default dropout",
        said(
            check_policy,
            run_arguments(
                dense,
                "",
                "--attention-dropout --hidden-dropout",
                rollout_allow_model_differences=True,
            ),
        ),
    )
    args = run_arguments(dense)
    del args.rotary_percent
    yield "taken out", said(check_policy, args)
    for family in (dense, moe, latent):
        args = run_arguments(family)
        yield f"right {family.name}", said(check_policy, args)
        yield f"right model {family.name}", said(check_model, [build(args)], args)
    args = run_arguments(dense, "--rope-scaling-factor 32")
    yield "stock script", said(check_model, [build(args, rope_scaling_factor=8.0)], args)
    args = run_arguments(dense)
    yield "positions", said(check_model, [build(args, position_embedding_type="none")], args)
    config = core_transformer_config_from_args(args)
    config.hidden_dropout, config.layernorm_epsilon = 0.25, 1e-3
    yield "own config", said(check_model, [build(args, config)], args)
    args = run_arguments(dense, "--add-qkv-bias")
    yield "unknown parameter", said(Flipper(dense).load, build(args), args)
    # As a run calls them.
    args = run_arguments(dense, "--hidden-dropout 0.5", rollout_pad_sequences=True)
    yield "run's arguments", said(run_flags.check_megatron_arguments, args)
    args = run_arguments(dense, "--rope-scaling-factor 32")
    yield (
        "run's model",
        said(local, HFCheckpoint(dense), args, [build(args, rope_scaling_factor=8.0)]),
    )
    nowhere = {"rollout_hf_checkpoint": "nowhere"}
    yield "no folder", said(check_policy, run_arguments(dense, **nowhere))
    options, megatron = (
        argparse.Namespace(hf_checkpoint="nowhere", save_hf=None),
        argparse.Namespace(args=args),
    )
    yield "run's folder", said(session._prepare, options, megatron, *[None] * 8)
    args = run_arguments(dense)
    other = argparse.Namespace(config={"model_type": "gpt2"}, path=Path("there"))
    yield "run's table", said(local, other, args, [build(args)])
    with tempfile.TemporaryDirectory() as folder:
        config = HFCheckpoint(dense).config | {"sliding_window": 16}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for allowed in (False, True):
            changed = {"rollout_hf_checkpoint": folder, "rollout_allow_model_differences": allowed}
            yield (
                f"no flags, {allowed}",
                [text.replace(folder, "DIR") for text in said(check_policy, run_arguments(dense, **changed))],
            )
    with tempfile.TemporaryDirectory() as folder:
        config = HFCheckpoint(dense).config | {"hidden_act": "gelu", "logit_scale": 2.0, "mlp_bias": True}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for allowed in (False, True):
            changed = {"rollout_hf_checkpoint": folder, "rollout_allow_model_differences": allowed}
            yield (
                f"settings, {allowed}",
                [
                    text.replace(folder, "DIR")
                    for text in said(check_policy, run_arguments(dense, "--norm-epsilon 1e-2", **changed))
                ],
            )
    args = run_arguments(dense)
    config = core_transformer_config_from_args(args)
    config.activation_func = torch.nn.functional.gelu
    yield "own activation", said(check_model, [build(args, config)], args)
    args = run_arguments(dense)
    parser = policy_check.MegatronParser()
    yield "unknown word", said(policy_check.model_differences, args, ["--no-such-flag", "3"], parser)
    for row in policy_flags.REFUSED:
        if row.flag in parser and row.flag in GIVEN:
            yield row.flag, policy_check.refused_flags(given(args, parser, row.flag), parser)
    yield from further_tokens(latent)
    # A fork's flag, of a field of the model's configuration that no table has.
    compared, policy_check.COMPARED = policy_check.COMPARED, policy_flags.COMPARED[:3]
    yield "forks flag", said(check_policy, run_arguments(dense, wrong))
    policy_check.COMPARED = compared


def further_tokens(latent):
    """What is refused with layers that predict further tokens: each change of a run that is
    right, by its name.
    """
    config = HFCheckpoint(latent).config | {"num_nextn_predict_layers": 1}
    changes = {
        "right": {},
        "other number": {"mtp_num_layers": 2},
        "attached": {"mtp_detach_heads": False},
        "no loss": {"mtp_loss_scaling_factor": 0.0},
        "repeated": {"mtp_use_repeated_layer": True},
        "tied": {"untie_embeddings_and_output_weights": False},
        "context": {"context_parallel_size": 2},
        "packed": {"rollout_pad_sequences": False},
        "per token": {"calculate_per_token_loss": True},
        "hidden": {"rollout_linear_logprobs": True},
        "interleaved": {"virtual_pipeline_model_parallel_size": 2},
        "placed": {"pipeline_model_parallel_layout": "E|t|m"},
        "hybrid": {"hybrid_layer_pattern": "*E*E/*E"},
        "fp8": {"fp8": "hybrid"},
    }
    for name, changed in changes.items():
        args = run_arguments(latent, "--mtp-num-layers 1 --mtp-detach-heads", rollout_pad_sequences=True)
        vars(args).update(changed)
        yield f"mtp {name}", mtp.mtp_problems(args, config)
    args = run_arguments(latent, "--mtp-num-layers 1 --mtp-detach-heads", rollout_pad_sequences=True)
    yield "mtp of none", mtp.mtp_problems(args, config | {"num_nextn_predict_layers": 0})
    yield "mtp left out", mtp.mtp_problems(run_arguments(latent), config)
    args = run_arguments(latent, "--mtp-num-layers 1", rollout_pad_sequences=True)
    yield "mtp run's arguments", said(run_flags.check_megatron_arguments, args)
    for rate in (0.001, 0.0):
        args = run_arguments(latent, f"--moe-router-bias-update-rate {rate}", rollout_pad_sequences=True)
        yield f"expert biases {rate}", said(run_flags._warn_of_expert_biases, args)
    # As a script of the user's may build it.
    args = run_arguments(latent, "--mtp-num-layers 1 --mtp-detach-heads", rollout_pad_sequences=True)
    checkpoint = argparse.Namespace(config=config, path=latent)
    yield "mtp not built", said(local, checkpoint, args, [build(args)])


GIVEN = {
    "--fp8-param-gather": True,
    "--fp4-param-gather": True,
    "--use-megatron-fsdp": True,
    "--use-torch-fsdp2": True,
    "--tensor-parallel-num-weight-shards": 2,
    "--expert-tensor-parallel-num-weight-shards": 2,
    "--moe-mlp-glu-interleave-size": 32,
    "--moe-shared-expert-glu-interleave-size": 32,
    "--moe-single-grouped-weight": True,
    "--moe-single-grouped-bias": True,
    "--use-grouped-gemm-for-dense-mlp": True,
    "--use-grouped-gemm-for-shared-expert": True,
    "--mla-down-proj-fusion": True,
    "--transformer-impl": "inference_optimized",
    "--hybrid-context-parallel": True,
    "--overlap-moe-expert-parallel-comm": True,
    "--fp8-recipe": "delayed",
    "--te-precision-config-file": "recipes.yaml",
    "--use-kitchen-attention": True,
    "--moe-pad-expert-input-to-capacity": True,
    "--moe-expert-rank-capacity-factor": 1.5,
}
"""Refused flags that no model without a GPU can be built with."""


def given(args, parser, flag):
    changed = argparse.Namespace(**vars(args))
    setattr(changed, parser.actions[flag].dest, GIVEN[flag])
    if flag == "--fp8-recipe":
        assert not policy_check.refused_flags(changed, parser), "without --fp8-format it has no effect"
        changed.fp8 = "hybrid"
    return changed


def main(file, *paths):
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    ps.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    paths = {Path(path).name: Path(path) for path in paths}
    parser = policy_check.MegatronParser()
    for found in flip_all(file, {name: Flipper(path) for name, path in paths.items()}, parser):
        print("RESULT " + json.dumps(found), flush=True)
    found = dict(checks(paths["llama"], paths["qwen3_moe"], paths["deepseek_v3"]))
    print("RESULT " + json.dumps({"checks": found, "inventory": inventory(parser)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
