"""Kernels, host reads, time and memory of the correction and its loss, beside a plain implementation.

python benchmarks/correction.py [--sequences 64] [--length 2048] [--repeats 20]

Both make the same metrics of the same batch, and the run fails if they differ.
"""

import argparse
import datetime
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.operators import OperatorCount
from benchmarks.plain import plain_correction, plain_loss
from benchmarks.quiet import only_tables
from megatron_rl_corr import compute_correction
from megatron_rl_corr.config.correction import PRESETS, RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.reduce.collectives import all_reduce_metrics

CONFIGS = {
    "no weights, no rules": PRESETS["disabled"],
    "decoupled_token_is": PRESETS["decoupled_token_is"],
    "decoupled_token_icepop": PRESETS["decoupled_token_icepop"],
    "decoupled_seq_is_rs": PRESETS["decoupled_seq_is_rs"],
    "decoupled_k3_rs_token_tis": PRESETS["decoupled_k3_rs_token_tis"],
    "token weights, three rules": RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_upper=2.0,
        rollout_rs=(
            RejectionRule("token", "ratio", 0.5, 2.0),
            RejectionRule("seq_mean", "ratio", 0.9, 1.1),
            RejectionRule("seq_mean", "k3", upper=0.01),
        ),
    ),
}


@dataclass(frozen=True)
class Cost:
    """What one piece of work costs."""

    kernels: int
    host_reads: int
    times: list[float]
    """Milliseconds of each run."""
    megabytes: float
    """Peak beyond what was there."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    print(
        f"{datetime.date.today()}, torch {torch.__version__}, {options.sequences} x {options.length} tokens"
    )
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        print(f"\n{machine_name(device)}\n")
        print("| configuration | kernels | host reads | time (ms) | peak extra memory (MB) |")
        print("|---|---|---|---|---|")
        for name, config in CONFIGS.items():
            packed, plain = works(config, options.sequences, options.length, torch.device(device))
            check_equal(packed(), plain())
            print(row(name, *measure((packed, plain), options.repeats, device)))
    print(
        "\nEach cell: this package, the plain implementation (its multiple). Times are medians of runs in "
        "turns.\n"
        "Correction and PPO loss, forward, with all metrics; this package reads them once a step, outside "
        "of what is timed here."
    )


def works(
    config: RolloutCorrectionConfig, sequences: int, length: int, device: torch.device
) -> tuple[Callable[[], dict], Callable[[], dict]]:
    """The two things to measure, on one batch of rows of unlike lengths; each returns its metrics."""
    generator = torch.Generator().manual_seed(0)
    train = -torch.empty(sequences, length).exponential_(1.0, generator=generator)
    rollout = torch.minimum(train + 0.03 * torch.randn(train.shape, generator=generator), torch.tensor(-1e-6))
    lengths = torch.randint(length // 2, length + 1, (sequences, 1), generator=generator)
    mask = (torch.arange(length) < lengths).float()
    advantages = torch.randn(sequences, 1, generator=generator).expand(-1, length).contiguous()
    now = train + 0.05 * torch.randn(train.shape, generator=generator)
    train, rollout, mask, advantages, now = (x.to(device) for x in (train, rollout, mask, advantages, now))
    now.requires_grad_()
    flat = [x.reshape(-1) for x in (train, rollout, mask.bool())]
    seq_ids = torch.arange(sequences, device=device).repeat_interleave(length)

    def packed() -> dict:
        correction = compute_correction(*flat, seq_ids, num_sequences=sequences, config=config)
        metrics = {}
        policy_loss(
            "ppo_clip", now.view(-1), flat[0], advantages.view(-1), correction, config, metrics=metrics
        )
        return correction.metrics

    def plain() -> dict:
        weights, kept, metrics = plain_correction(train, rollout, mask, config)
        plain_loss(now, train, advantages, weights, kept)
        return metrics

    return packed, plain


def check_equal(packed: dict, plain: dict) -> None:
    """The plain metrics are float32's: three digits of what is not itself a rounding."""
    packed = all_reduce_metrics(packed, None)
    for name, value in plain.items():
        if name.startswith("chi2_seq"):
            continue  # a float32 product of a thousand ratios has no digits to compare
        if not math.isclose(packed[name], value, rel_tol=2e-3, abs_tol=1e-5):
            raise SystemExit(f"{name}: {packed[name]} here, {value} plainly")


def measure(works: Sequence[Callable[[], dict]], repeats: int, device: str) -> list[Cost]:
    """What each piece of work costs; timed in turns, so that other work on the machine slows
    all of them alike.
    """
    for work in works:
        for _ in range(2):
            work()
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for mine, work in zip(times, works, strict=True):
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            mine.append(1000 * (time.perf_counter() - start))
    costs = []
    for mine, work in zip(times, works, strict=True):
        with OperatorCount() as count:
            work()
        megabytes = peak_bytes(work, device) / 1e6
        costs.append(Cost(len(count.kernels), len(count.host_reads), mine, megabytes))
    return costs


def peak_bytes(work: Callable[[], dict], device: str) -> int:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def row(name: str, packed: Cost, plain: Cost) -> str:
    """A line of the table; the time's multiple is the median over the pairs of runs, not
    that of the medians.
    """
    pairs = statistics.median(theirs / ours for ours, theirs in zip(packed.times, plain.times, strict=True))
    ours, theirs = statistics.median(packed.times), statistics.median(plain.times)
    cells = [
        f"{packed.kernels}, {plain.kernels} ({plain.kernels / packed.kernels:.1f}x)",
        f"{packed.host_reads}, {plain.host_reads}",
        f"{ours:.2f}, {theirs:.2f} ({pairs:.1f}x)",
        f"{packed.megabytes:.1f}, {plain.megabytes:.1f} ({plain.megabytes / packed.megabytes:.1f}x)",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def machine_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return f"{model}, {torch.get_num_threads()} thread" + "s" * (torch.get_num_threads() > 1)


if __name__ == "__main__":
    with only_tables():
        main()
