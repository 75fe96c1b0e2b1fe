"""Seconds of a step with and without replayed routes, and with and without a scoring pass, in one run.

python benchmarks/router_replay.py [--hidden 256] [--layers 4] [--experts 32] [--top-k 4] [--samples
8] [--length 256]

One process of real Megatron-core, without an optimizer; steps of the kinds take turns on the same weights
and tokens, and the medians of their processor time are compared, as the machine may have other work. With
a GPU the layers are Transformer Engine's, and times are those of the GPU. The routes of R3 come as a
server would send them, in base64 of int32; what decoding them takes is told by itself, as it happens while
other samples are awaited.
"""

import argparse
import base64
import datetime
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import megatron_process  # noqa: E402
from benchmarks.megatron_process import DEVICE  # noqa: E402
from benchmarks.quiet import only_tables  # noqa: E402
from tools.cpu import environment  # noqa: E402

VOCAB_SIZE, ROWS = 512, 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "hidden": 256,
        "layers": 4,
        "experts": 32,
        "top-k": 4,
        "samples": 8,
        "length": 256,
        "repeats": 9,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(options)
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--worker"]
    sys.exit(subprocess.run(command, env=environment("megatron"), stdout=sys.stdout, check=False).returncode)


def measure(options: argparse.Namespace) -> None:
    import torch.distributed as dist

    from benchmarks.correction import machine_name
    from megatron_rl_corr.engines.routes import no_routes, write_routes
    from megatron_rl_corr.engines.sglang.routed_experts import decode
    from megatron_rl_corr.mcore import compat
    from megatron_rl_corr.moe.replay import ReplayedRouters
    from megatron_rl_corr.moe.routers import moe_routers
    from megatron_rl_corr.moe.routes import ReplayedRoutes, Routes

    megatron_process.start()
    model, config = build(options)
    layout = compat.layout()
    routers = [router for chunk in model for router in moe_routers(chunk)]
    replayed = ReplayedRouters("R3", model, layout, num_layers=options.layers)
    routed, off = ReplayedRoutes(replayed, layout, min_agreement=-1.0), Routes()
    kinds = {"off": off, "off, scored": off, "R3": routed, "R3, scored": routed}
    steps = {
        kind: corrected_step(routes, layout, options, "scored" in kind) for kind, routes in kinds.items()
    }
    own = {router: router.router_replay for router in routers}
    shape = replayed.shape
    batch = some_batch(options)
    sent = [encoded_choice(options) for _ in range(options.samples)]
    started = time.process_time()
    decoded = [decode(one, tokens=options.length + 1, shape=shape) for one in sent]
    decoding = time.process_time() - started
    boundaries = [sample * options.length for sample in range(options.samples + 1)]
    given = no_routes(shape, boundaries[-1] + 1)
    write_routes(decoded, boundaries, list(pairwise(boundaries)), range(options.layers), given[:-1])
    routed.given = given.to(DEVICE)
    times = {kind: [] for kind in steps}
    for _ in range(options.repeats):
        for kind, step in steps.items():
            for router, stand_in in own.items():
                router.router_replay = stand_in if kinds[kind] is routed else None
            times[kind].append(one_step(step, model, batch, options))
    tokens = options.samples * options.length
    print(
        f"{datetime.date.today()}, {machine_name(DEVICE)}, torch {torch.__version__}, {tokens} tokens, "
        f"{options.layers} layers of {options.top_k} of {options.experts} experts, hidden {options.hidden}\n"
    )
    print("| --router-replay | step (s) | to off |\n|---|---|---|")
    base = statistics.median(times["off"][1:])
    for kind, seconds in times.items():
        median = statistics.median(seconds[1:])
        print(f"| {kind} | {median:.3f} | {median / base:.3f} |")
    print(
        f"\nRoutes: {shape.bytes_per_token} bytes a token over all layers "
        f"({len(sent[0]) / options.length:.0f} in the server's answer); decoding takes "
        f"{decoding / tokens * 1e6:.2f} us a token."
    )
    dist.destroy_process_group()


def build(options: argparse.Namespace):
    """A mixture of experts of random weights on this process alone."""
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=8,
        num_query_groups=4,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        num_moe_experts=options.experts,
        moe_router_topk=options.top_k,
        moe_ffn_hidden_size=options.hidden,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_grouped_gemm=DEVICE == "cuda",
        **megatron_process.precision(),
    )
    spec = megatron_process.layer_spec(options.experts)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=options.length,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    config.finalize_model_grads_func = finalize_model_grads
    chunk = chunk.to(DEVICE, config.params_dtype)
    return [
        DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk)
    ], config


def some_batch(options: argparse.Namespace):
    """Random samples of full length, a sixteenth of it prompt."""
    from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
    from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch

    prompt = options.length // 16
    output, samples = options.length + 1 - prompt, []
    for index in range(options.samples):
        samples.append(
            Trajectory(
                prompt_index=index // 4,
                sample_index=index % 4,
                prompt_ids=torch.randint(0, VOCAB_SIZE, (prompt,)),
                output_ids=torch.randint(0, VOCAB_SIZE, (output,)),
                rollout_logprobs=torch.full((output,), -6.2),
                finish_reason="length",
                weight_versions=(VersionSpan("0", 0, output),),
                cached_tokens=0,
                server="none",
            )
        )
    return RolloutBatch.from_trajectories(
        samples,
        torch.rand(options.samples),
        length=options.length,
        version=0,
        multiple=options.length,
    ).to(DEVICE)


def encoded_choice(options: argparse.Namespace) -> str:
    """Experts of a sample as a server sends them; any will do, as the time does not depend on them."""
    scores = torch.rand(options.length, options.layers, options.experts)
    return base64.b64encode(scores.topk(options.top_k).indices.int().numpy().tobytes()).decode()


def corrected_step(routes, layout, options: argparse.Namespace, scored: bool):
    """scored: with a rule that keeps every sample, and needs the scoring pass."""
    from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
    from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
    from megatron_rl_corr.mcore.forward import LogprobSettings
    from megatron_rl_corr.mcore.step import CorrectedStep

    rules = (RejectionRule("token", "ratio", 1e-6, 1e6),) if scored else ()
    return CorrectedStep(
        config=RolloutCorrectionConfig(rollout_rs=rules),
        layout=layout,
        logprob_settings=LogprobSettings(layout.tp_group, 1.0, VOCAB_SIZE),
        collector=SimpleNamespace(device=DEVICE, metrics={}, trajectories=[]),
        push=lambda version: {},
        report=lambda metrics: None,
        shape=BatchShape(
            global_batch_size=options.samples, group_size=4, micro_batch_size=ROWS, seq_length=options.length
        ),
        routes=routes,
    )


def one_step(step, model: list, batch, options: argparse.Namespace) -> float:
    """Seconds of a corrected step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def train_step(forward_step, iterator, microbatches):
        for chunk in model:
            chunk.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterator,
            model=model,
            num_microbatches=microbatches,
            seq_length=options.length,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        assert optimizer.step()[0], "the step was skipped"
        return {}, 0, False, False, 0, 1.0, None, 0

    optimizer = SimpleNamespace(step=lambda: (True, 1.0, 0))
    step.collector.collect = lambda iteration: batch
    return megatron_process.seconds(lambda: step.run(train_step, 0, model, optimizer, per_token=False))


if __name__ == "__main__":
    with only_tables():
        main()
