"""megatron-rl-corr plan: reads config.json and options, prints what fits as tables or as JSON."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict, dataclass
from typing import TextIO

from megatron_rl_corr.commands.planner.arguments import SERVER_RESERVE_GIB
from megatron_rl_corr.commands.planner.parameters import ModelParameters, model_parameters
from megatron_rl_corr.commands.planner.planned_flags import server_flags, training_flags
from megatron_rl_corr.commands.planner.search import Candidate, Fixed, candidates
from megatron_rl_corr.commands.planner.serving import (
    GIB,
    ServingMemory,
    server_problems,
    serving_candidates,
    serving_memory,
)
from megatron_rl_corr.commands.planner.train_layout import Workload
from megatron_rl_corr.models.architectures import Config, linear_layers
from megatron_rl_corr.models.hf_checkpoint import read_model
from megatron_rl_corr.tables import text_table

POSITIVE = {
    "gpus": "--gpus",
    "gpus_per_node": "--gpus-per-node",
    "gpu_memory_gib": "--gpu-memory-gib",
    "tensor": "--tensor-model-parallel-size",
    "pipeline": "--pipeline-model-parallel-size",
    "context": "--context-parallel-size",
    "expert": "--expert-model-parallel-size",
    "expert_tensor": "--expert-tensor-parallel-size",
    "serve_tensor_parallel_size": "--serve-tensor-parallel-size",
}
SHOWN = 5
"""Other layouts that are printed."""


@dataclass(frozen=True)
class Plan:
    """What `megatron-rl-corr plan` has found."""

    parameters: ModelParameters
    found: list[Candidate]
    """The best first."""
    serving: list[ServingMemory]
    """The best first; none where no GPU serves."""
    most_static: float = 1.0
    """--mem-fraction-static at most: colocated servers leave the trainer its weights."""

    @property
    def fits(self) -> bool:
        return self.found[0].fits and all(one.fits for one in self.serving[:1])


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print the plan; 1 where nothing fits. Raises ValueError for options that make no layout."""
    config = read_model(arguments.hf_checkpoint)
    if linear_layers(config):
        raise ValueError(
            f"{arguments.hf_checkpoint}: layers of {config['model_type']} are gated delta nets, whose states "
            "at servers and activations in training are not counted here; plan for another model"
        )
    if "index_topk" in config:
        raise ValueError(
            f"{arguments.hf_checkpoint}: attention of {config['model_type']} takes the keys that an indexer "
            "chooses, whose scores in training and keys at servers are not counted here; plan for another "
            "model"
        )
    plan = make_plan(config, arguments)
    print(as_json(config, plan, arguments) if arguments.json else as_text(config, plan, arguments), file=out)
    return 0 if plan.fits else 1


def make_plan(config: Config, arguments: argparse.Namespace) -> Plan:
    """Search layouts for the options. Raises ValueError for what can't be, naming the option."""
    workload = workload_of(arguments)
    serve = arguments.gpus // 2 if arguments.serve_gpus is None else arguments.serve_gpus
    problems = workload.problems()
    if arguments.colocate:
        serve = arguments.gpus
        if arguments.serve_gpus is not None:
            problems.append(
                f"--serve-gpus {arguments.serve_gpus} with --colocate: all GPUs serve; leave it out"
            )
        if arguments.gpus > arguments.gpus_per_node:
            problems.append(
                f"--gpus {arguments.gpus} with --colocate must be at most --gpus-per-node "
                f"{arguments.gpus_per_node}: weights are handed over on one host; plan for one node, or "
                "leave --colocate out"
            )
    elif not 0 <= serve < arguments.gpus:
        problems.append(f"--serve-gpus {serve} must leave at least one of --gpus {arguments.gpus} to train")
    if arguments.server_reserve_gib is not None and not arguments.colocate:
        problems.append(
            f"--server-reserve-gib {arguments.server_reserve_gib:g} has no effect without --colocate"
        )
    if (arguments.server_reserve_gib or 0) < 0:
        problems.append(f"--server-reserve-gib {arguments.server_reserve_gib:g} must be at least 0")
    if not 0 < arguments.mem_fraction_static < 1:
        problems.append(f"--mem-fraction-static {arguments.mem_fraction_static} must be between 0 and 1")
    if arguments.expert_imbalance < 1:
        problems.append(f"--expert-imbalance {arguments.expert_imbalance} must be at least 1, the mean")
    for name, flag in POSITIVE.items():
        if vars(arguments)[name] is not None and vars(arguments)[name] <= 0:
            problems.append(f"{flag} {vars(arguments)[name]} must be positive")
    if problems:
        raise ValueError("; ".join(problems))
    gpu = arguments.gpu_memory_gib * GIB
    fixed = Fixed(
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        context=arguments.context,
        expert=arguments.expert,
        expert_tensor=arguments.expert_tensor,
        recompute=arguments.recompute,
        offload_optimizer=arguments.optimizer_cpu_offload,
        linear_logprobs=arguments.linear_logprobs,
        distributed_optimizer=not arguments.no_distributed_optimizer,
        expert_imbalance=arguments.expert_imbalance,
    )
    parameters, usable = model_parameters(config), gpu - _reserve_gib(arguments) * GIB
    found = candidates(
        config,
        workload,
        fixed,
        gpus=arguments.gpus - (0 if arguments.colocate else serve),
        gpus_per_node=arguments.gpus_per_node,
        usable=usable,
        colocated=arguments.colocate,
    )
    most_static = 1.0
    # while servers sample the trainer keeps its weights, and both what CUDA and NCCL take
    if arguments.colocate:
        most_static = (usable - max(s.weights for s in found[0].memory.stages)) / gpu
        if found[0].fits and arguments.mem_fraction_static > most_static:
            raise ValueError(
                f"--mem-fraction-static {arguments.mem_fraction_static:g} with --colocate: the trainer's "
                f"weights ({_name(found[0])}), --reserve-gib and --server-reserve-gib leave "
                f"{max(most_static, 0):.2f} of a GPU; give at most that"
            )
    return Plan(parameters, found, _serving(config, workload, arguments, serve, gpu), most_static)


def _reserve_gib(arguments: argparse.Namespace) -> float:
    """GiB of a training GPU that its own process takes beside tensors, and a server's process on it."""
    if not arguments.colocate:
        return arguments.reserve_gib
    given = arguments.server_reserve_gib
    return arguments.reserve_gib + (SERVER_RESERVE_GIB if given is None else given)


def _nodes(arguments: argparse.Namespace, candidate: Candidate) -> int:
    """That train."""
    return -(-candidate.layout.gpus // arguments.gpus_per_node)


def _serving(
    config: Config, workload: Workload, arguments: argparse.Namespace, gpus: int, gpu: float
) -> list[ServingMemory]:
    size, fraction = arguments.serve_tensor_parallel_size, arguments.mem_fraction_static
    if gpus == 0:
        return []
    if size is None:
        return serving_candidates(
            config,
            workload,
            gpus=gpus,
            gpus_per_node=arguments.gpus_per_node,
            gpu_bytes=gpu,
            fraction=fraction,
        )
    problems = server_problems(config, gpus=gpus, tensor=size, gpus_per_node=arguments.gpus_per_node)
    if problems:
        raise ValueError(f"--serve-tensor-parallel-size {size} {', '.join(problems)}")
    return [serving_memory(config, workload, gpus=gpus, tensor=size, gpu_bytes=gpu, fraction=fraction)]


def workload_of(arguments: argparse.Namespace) -> Workload:
    """The options' lengths and batch sizes."""
    return Workload(
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_new_tokens=arguments.max_new_tokens,
        max_tokens_per_microbatch=arguments.max_tokens_per_microbatch,
        global_batch_size=arguments.global_batch_size,
        group_size=arguments.group_size,
    )


def as_json(config: Config, plan: Plan, arguments: argparse.Namespace) -> str:
    """The whole plan, bytes as whole numbers."""
    best, workload, counted = plan.found[0], workload_of(arguments), plan.parameters
    others = [
        {
            "layout": asdict(one.layout),
            "fits": one.fits,
            "spare": round(one.spare),
            "host": round(one.memory.host),
        }
        for one in plan.found[1 : SHOWN + 1]
    ]
    serving, colocated = plan.serving[0] if plan.serving else None, arguments.colocate
    return json.dumps(
        {
            "parameters": {
                "total": counted.total,
                "active": counted.active,
                "routed": counted.routed,
                "embedding": counted.ends,
                "layers": [asdict(layer) for layer in counted.layers],
            },
            "fits": plan.fits,
            "training": {
                "layout": asdict(best.layout),
                "fits": best.fits,
                "spare": round(best.spare),
                "flags": training_flags(config, best.layout, workload, colocated=colocated),
            }
            | best.memory.as_dict()
            | {"host_per_node": round(best.memory.host / _nodes(arguments, best))},
            "others": others,
            "serving": serving
            and serving.as_dict()
            | {"flags": server_flags(config, serving, arguments.mem_fraction_static, colocated=colocated)},
        }
    )


def as_text(config: Config, plan: Plan, arguments: argparse.Namespace) -> str:
    """Tables for a terminal."""
    best, workload, counted = plan.found[0], workload_of(arguments), plan.parameters
    reserve = _reserve_gib(arguments)
    usable = arguments.gpu_memory_gib - reserve
    lines = [
        f"{config['model_type']}: {counted.total / 1e9:.2f} billion parameters, {counted.active / 1e9:.2f} "
        f"of them for a token; {counted.routed / 1e9:.2f} of routed experts, {counted.ends / 1e9:.2f} of "
        "embedding and output",
        "",
        f"Training on {best.layout.gpus} GPUs of {arguments.gpu_memory_gib:g} GiB, {reserve:g} of them "
        f"reserved; microbatches of {workload.microbatch_tokens} tokens. GiB a GPU:",
        "",
        *text_table(_stage_rows(best, usable), align="l" + "r" * 8),
        "",
        f"{'The best layout that fits' if best.fits else 'NOTHING FITS; the nearest layout'}: {_name(best)}",
    ]
    if best.memory.host:
        what = "Adam's state" if best.layout.offload_optimizer else "While servers sample Adam's state"
        gradients = (
            "with a copy of the gradients" if best.layout.offload_optimizer else "and gradients are freed"
        )
        lines.append(
            f"{what} takes {best.memory.host / GIB:.0f} GiB of the hosts' memory, of all ranks together, "
            f"{gradients}: {best.memory.host / _nodes(arguments, best) / GIB:.0f} GiB a node"
        )
    if not best.fits:
        lines.append(
            f"It lacks {-best.spare / GIB:.1f} GiB a GPU: more GPUs (--gpus, fewer --serve-gpus), "
            "--max-tokens-per-microbatch or --max-new-tokens smaller, --linear-logprobs"
        )
    flags = training_flags(config, best.layout, workload, colocated=arguments.colocate)
    lines += ["", "Flags beside `megatron-rl-corr model-flags DIR`:", "", "  " + shlex.join(flags), ""]
    others = plan.found[1 : SHOWN + 1]
    if others:
        rows = [("other layouts", "GiB a GPU", "spare")]
        rows += [(_name(one), _gib(one.memory.fullest.total), _gib(one.spare)) for one in others]
        lines += [*text_table(rows, align="lrr"), ""]
    return "\n".join([*lines, *_serving_lines(config, plan, arguments, workload)])


def _stage_rows(candidate: Candidate, usable: float) -> list[tuple[str, ...]]:
    rows = [
        ("stage", "parameters", "weights", "gradients", "optimizer", "activations", "logits", "all", "of")
    ]
    for stage in candidate.memory.stages:
        bytes_of = (
            stage.weights,
            stage.gradients,
            stage.optimizer,
            stage.activations,
            stage.logits,
            stage.total,
        )
        rows.append(
            (str(stage.stage), f"{stage.parameters / 1e9:.2f} B", *map(_gib, bytes_of), f"{usable:.1f}")
        )
    return rows


def _serving_lines(
    config: Config, plan: Plan, arguments: argparse.Namespace, workload: Workload
) -> list[str]:
    if not plan.serving:
        return []
    rows = [
        ("servers", "GPUs each", "weights", "cache", "KiB a token", "tokens a server", "requests at a time")
    ]
    rows += [
        (
            str(one.servers),
            str(one.tensor),
            _gib(one.weights),
            _gib(one.cache),
            f"{one.bytes_per_token / 1024:.0f}",
            str(one.tokens),
            str(one.requests) if one.fits else "does not fit",
        )
        for one in plan.serving
    ]
    best = plan.serving[0]
    flags = server_flags(config, best, arguments.mem_fraction_static, colocated=arguments.colocate)
    most = max(plan.most_static, 0)
    turns = (
        [
            f"In turn with the trainer, whose weights stay: --mem-fraction-static at most {most:.2f}",
            "",
        ]
        if arguments.colocate
        else []
    )
    return [
        *turns,
        f"Serving on {best.servers * best.tensor} GPUs, requests of {workload.seq_length} tokens, GiB a GPU:",
        "",
        *text_table(rows, align="r" * 7),
        "",
        *([] if best.fits else [_lacking(best, workload), ""]),
        f"Flags of {best.servers} server{'s' * (best.servers > 1)} of SGLang:",
        "",
        "  " + shlex.join(flags),
    ]


def _lacking(nearest: ServingMemory, workload: Workload) -> str:
    gpus = f"{nearest.tensor} GPU{'s' * (nearest.tensor > 1)}"
    return (
        f"NO SERVER FITS; the nearest has {gpus} and lacks {nearest.lacks(workload) / GIB:.1f} GiB a GPU for "
        "one request: more GPUs a server (--serve-gpus, --serve-tensor-parallel-size), a larger "
        "--mem-fraction-static, a smaller --max-new-tokens"
    )


def _name(candidate: Candidate) -> str:
    layout, parts = candidate.layout, []
    for name, size in (
        ("TP", layout.tensor),
        ("PP", layout.pipeline),
        ("CP", layout.context),
        ("EP", layout.expert),
        ("ETP", layout.expert_tensor),
        ("DP", layout.replicas),
    ):
        parts += [f"{name} {size}"] if size > 1 else []
    parts.append(f"{layout.recompute} recompute" if layout.recompute != "none" else "nothing recomputed")
    parts += ["Adam on the host"] if layout.offload_optimizer else []
    return ", ".join(parts)


def _gib(value: float) -> str:
    return f"{value / GIB:.1f}"
