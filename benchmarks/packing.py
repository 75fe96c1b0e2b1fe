"""Seconds and FLOPs of a step on packed sequences and on padded rows, in one run; and how even the
work is over ranks.

python benchmarks/packing.py [--samples 64] [--length 512] [--hidden 128] [--layers 4]
[--repeats 3] [--ranks 8]

Responses have log-normal lengths whose mean is a fifth of the longest. One process of real Megatron-core,
without an optimizer, in the attention of tools/cpu, which computes a packed sequence by itself as kernels
for packed sequences do; FLOPs are those of matrix products and attention, forward and backward, as PyTorch
counts them. Steps of both kinds take turns on the same weights and samples, and the medians of their
processor time are compared. With a GPU the layers are Transformer Engine's, whose FLOPs PyTorch does not
count, and times are those of the GPU. The work of ranks is worked out for so many data-parallel ranks: as
prompts are collected, and as samples are dealt out.
"""

import argparse
import datetime
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import megatron_process  # noqa: E402
from benchmarks.megatron_process import DEVICE  # noqa: E402
from benchmarks.quiet import only_tables  # noqa: E402
from tools.cpu import environment  # noqa: E402

VOCAB_SIZE, ROWS, GROUP_SIZE, PROMPT = 512, 2, 8, 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "samples": 64,
        "length": 512,
        "hidden": 128,
        "layers": 4,
        "repeats": 3,
        "ranks": 8,
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
    from torch.utils.flop_counter import FlopCounterMode

    from benchmarks.correction import machine_name
    from megatron_rl_corr.mcore import compat
    from megatron_rl_corr.mcore.batch.packing import PackLimits

    megatron_process.start()
    model, config = build(options)
    layer = 12 * options.hidden**2  # weights of attention and of a gated MLP of 8 / 3 hidden
    share = 2 * options.hidden / (layer + options.hidden * VOCAB_SIZE / options.layers)
    limits = PackLimits(ROWS * options.length, share)
    lengths, kinds, layout = some_lengths(options), {"padded": None, "packed": limits}, compat.layout()
    batches = {kind: some_batch(lengths, options, kind) for kind in kinds}
    seconds, flops = {kind: [] for kind in kinds}, {}
    for kind in kinds:
        with FlopCounterMode(display=False) as counter:
            one_step(model, batches[kind], kinds[kind], layout, options)
        flops[kind] = counter.get_total_flops()
    for _ in range(options.repeats):
        for kind in kinds:
            seconds[kind].append(one_step(model, batches[kind], kinds[kind], layout, options))
    longest = max(lengths)
    print(
        f"{datetime.date.today()}, {machine_name(DEVICE)}, torch {torch.__version__}, {options.samples} "
        f"samples of {sum(lengths) / len(lengths):.0f} tokens in the mean and {longest} at most, "
        f"{options.layers} layers, hidden {options.hidden}\n"
    )
    if DEVICE == "cuda":
        print("GFLOP leave out Transformer Engine's kernels, which PyTorch does not count.\n")
    print("| | step (s) | GFLOP | times fewer |\n|---|---|---|---|")
    for kind in kinds:
        print(
            f"| {kind} | {statistics.median(seconds[kind]):.3f} | {flops[kind] / 1e9:.2f} | "
            f"{flops['padded'] / flops[kind]:.2f} |"
        )
    print(f"\n| most work of {options.ranks} ranks, over the mean | |\n|---|---|")
    for name, value in imbalance(lengths, limits, options.ranks).items():
        print(f"| {name} | {value:.4f} |")
    dist.destroy_process_group()


def imbalance(lengths: list[int], limits, ranks: int) -> dict[str, float]:
    """Cost of the busiest rank over the mean, less 1."""
    from megatron_rl_corr.mcore.batch.deal import destinations

    share = len(lengths) // ranks
    rows = [lengths[rank * share : (rank + 1) * share] for rank in range(ranks)]
    dealt = [0.0] * ranks
    for row, goes in zip(rows, destinations(rows, limits), strict=True):
        for length, rank in zip(row, goes, strict=True):
            dealt[rank] += limits.cost(length)
    collected = [sum(map(limits.cost, row)) for row in rows]
    return {
        name: max(costs) * ranks / sum(costs) - 1
        for name, costs in (("as collected", collected), ("as dealt out", dealt))
    }


def some_lengths(options: argparse.Namespace) -> list[int]:
    """Log-normal, cut at the length; scaled until their mean is a fifth of it."""
    normal = torch.randn(options.samples, generator=torch.Generator().manual_seed(0)).double()
    low, high = 0.0, float(options.length)
    for _ in range(60):
        scale = (low + high) / 2
        lengths = (scale * normal.exp()).clamp(PROMPT + 1, options.length)
        low, high = (scale, high) if lengths.mean() < options.length / 5 else (low, scale)
    lengths[lengths.argmax()] = options.length
    return lengths.round().long().tolist()


def build(options: argparse.Namespace):
    """A dense model of random weights on this process alone."""
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

    from tools.cpu.cp_attention import ContextParallelAttention

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=8,
        ffn_hidden_size=8 * options.hidden // 3,
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
        **megatron_process.precision(),
    )
    spec = megatron_process.layer_spec()
    if DEVICE == "cpu":
        spec.submodules.self_attention.submodules.core_attention = ContextParallelAttention
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


def some_batch(lengths: list[int], options: argparse.Namespace, kind: str):
    """Random samples of these lengths."""
    from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
    from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch

    generator, samples = torch.Generator().manual_seed(1), []
    for index, length in enumerate(lengths):
        output = length + 1 - PROMPT
        ids = torch.randint(0, VOCAB_SIZE, (length + 1,), generator=generator)
        samples.append(
            Trajectory(
                prompt_index=index // GROUP_SIZE,
                sample_index=index % GROUP_SIZE,
                prompt_ids=ids[:PROMPT],
                output_ids=ids[PROMPT:],
                rollout_logprobs=torch.full((output,), -6.2),
                finish_reason="stop",
                weight_versions=(VersionSpan("0", 0, output),),
                cached_tokens=0,
                server="none",
            )
        )
    rewards = torch.rand(len(lengths), generator=generator)
    multiple = 1 if kind == "packed" else options.length
    return RolloutBatch.from_trajectories(
        samples, rewards, length=options.length, version=0, multiple=multiple
    ).to(DEVICE)


def one_step(model: list, batch, limits, layout, options: argparse.Namespace) -> float:
    """Seconds of a corrected step; limits: of packs, None for rows."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_rl_corr.config.correction import RolloutCorrectionConfig
    from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
    from megatron_rl_corr.mcore.forward import LogprobSettings
    from megatron_rl_corr.mcore.step import CorrectedStep

    shape = BatchShape(
        global_batch_size=options.samples,
        group_size=GROUP_SIZE,
        micro_batch_size=ROWS,
        seq_length=options.length,
        packing=limits,
    )

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
    collector = SimpleNamespace(device=DEVICE, metrics={}, trajectories=[], collect=lambda iteration: batch)
    step = CorrectedStep(
        config=RolloutCorrectionConfig(),
        layout=layout,
        logprob_settings=LogprobSettings(layout.tp_group, 1.0, VOCAB_SIZE),
        collector=collector,
        push=lambda version: {},
        report=lambda metrics: None,
        shape=shape,
    )
    return megatron_process.seconds(lambda: step.run(train_step, 0, model, optimizer, per_token=False))


if __name__ == "__main__":
    with only_tables():
        main()
