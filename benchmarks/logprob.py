"""Time and memory of the labels' log-probs and their gradient, beside Megatron's cross entropy
and plain torch.

python benchmarks/logprob.py [--tokens 8192] [--vocab 151936] [--dtype bfloat16] [--device
cuda] [--repeats 20]

All paths take the same logits in the same run, which fails if a path's log-probs or gradient are not those
of float64. A second table takes only some of the tokens, as a loss mask does; a third takes log-probs from
hidden states; a fourth counts the kernels, exchanges and bytes of the Triton form, which needs no GPU.
With a GPU the defaults are the ones above; without, 4096 x 32000 float32.
"""

import argparse
import contextlib
import ctypes
import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import logprob_counts
from benchmarks.correction import machine_name, peak_bytes
from benchmarks.quiet import only_tables
from megatron_rl_corr.logprobs import torch_backend as label_stats
from megatron_rl_corr.logprobs import vocab
from megatron_rl_corr.logprobs.linear import linear_logprobs
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs

CHECKED = 64
"""Tokens that are compared with float64."""
SHARES = (1.0, 0.5, 0.25)
"""Of the tokens, those that were sampled."""
COMPILED = ("Megatron fused", "the same, torch.compile")
"""Paths that --no-compile leaves out."""


@dataclass
class Work:
    """Log-probs (and entropy) of inputs that are copied anew, untimed, for each run: some paths
    write over them.
    """

    forward: Callable[..., list[Tensor]]
    inputs: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    upstream: list[Tensor]
    torch_backend: bool = False
    """On a GPU, where Triton's is taken otherwise."""
    kept: Tensor | None = None
    """[T] bool: the tokens that have a log-prob; None: all."""

    def prepare(self) -> None:
        pairs = zip(self.buffers, self.inputs, strict=True)
        self.leaves = [buffer.copy_(x).detach().requires_grad_() for buffer, x in pairs]

    def forward_pass(self) -> None:
        with self.backend():
            self.outputs = self.forward(*self.leaves)

    def backward_pass(self) -> None:
        with self.backend():
            self.gradients = torch.autograd.grad(
                self.outputs, self.leaves, self.upstream[: len(self.outputs)]
            )
        self.results = [x.detach() for x in self.outputs]
        del self.outputs

    def backend(self) -> contextlib.AbstractContextManager:
        if not self.torch_backend:
            return contextlib.nullcontext()
        return mock.patch.object(vocab, "backend", lambda logits: label_stats)

    def both(self) -> None:
        self.forward_pass()
        self.backward_pass()

    def release(self) -> None:
        del self.leaves, self.results, self.gradients


def main() -> None:
    options = arguments()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    if device.type == "cpu":
        keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        clock = "processor time" if device.type == "cpu" else "time of CUDA events"
        print(
            f"{datetime.date.today()}, torch {torch.__version__}, {machine_name(device.type)}; medians of "
            f"{clock}"
        )
        generator = torch.Generator(device).manual_seed(0)
        labels = torch.randint(0, options.vocab, (options.tokens,), generator=generator, device=device)
        upstream = list(torch.randn(2, options.tokens, generator=generator, device=device))
        logits = (
            torch.randn(options.tokens, options.vocab, generator=generator, device=device).mul_(2).to(dtype)
        )
        seconds = table_of_logits(logits, labels, upstream, options)
        table_of_sampled(logits, labels, upstream, options, seconds)
        del logits
        table_of_hidden(labels, upstream, dtype, generator, options)
        table_of_counts()
        dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192 if gpu else 4096)
    parser.add_argument("--vocab", type=int, default=151936 if gpu else 32000)
    parser.add_argument("--hidden", type=int, default=4096 if gpu else 256, help="of the second table")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16" if gpu else "float32")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    parser.add_argument("--repeats", type=int, default=20 if gpu else 7)
    parser.add_argument("--no-compile", action="store_true", help="leave out what torch.compile makes")
    return parser.parse_args()


def keep_freed_memory() -> None:
    """As a GPU's allocator does: else every gradient is made of new pages, and mapping them
    is what is timed.
    """
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in ((-4, 0), (-1, -1)):  # glibc's M_MMAP_MAX, M_TRIM_THRESHOLD: no maps, never trim
        if not mallopt(parameter, value):
            raise SystemExit(f"mallopt({parameter}, {value}) failed")


def paths(labels: Tensor, options: argparse.Namespace) -> dict[str, Callable[[Tensor], list[Tensor]]]:
    """What is compared: logits -> log-probs (and entropy); each may keep or overwrite them."""

    def ours(**settings) -> Callable[[Tensor], list[Tensor]]:
        return lambda logits: [
            x for x in vocab_parallel_logprobs(logits, labels, **settings) if x is not None
        ]

    def plain(logits: Tensor) -> list[Tensor]:
        return [torch.log_softmax(logits.float(), dim=1).gather(1, labels[:, None])[:, 0]]

    found = {
        "ours": ours(),
        "ours, in place": ours(inplace_gradient=True),
        "ours with entropy": ours(with_entropy=True),
        **megatron_paths(labels),
        "log_softmax and gather": plain,
        "the same, torch.compile": torch.compile(plain),
    }
    if options.no_compile:
        found = {name: path for name, path in found.items() if name not in COMPILED}
    return found


def megatron_paths(labels: Tensor) -> dict[str, Callable[[Tensor], list[Tensor]]]:
    """Megatron's, where it is installed."""
    if find_spec("megatron") is None:
        return {}
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    group = dist.group.WORLD
    # A view, as Megatron's writes over its logits in forward, and these are a leaf.
    return {
        "Megatron": lambda logits: [
            -vocab_parallel_cross_entropy(logits.view_as(logits), labels, 0.0, group)
        ],
        "Megatron fused": lambda logits: [
            -fused_vocab_parallel_cross_entropy(logits.view_as(logits), labels, group)
        ],
    }


def table_of_logits(
    logits: Tensor, labels: Tensor, upstream: list[Tensor], options: argparse.Namespace
) -> float:
    """Returns the seconds of a copy of the logits."""
    device = options.device
    given = (logits,), (torch.empty_like(logits),), upstream
    works = {name: Work(path, *given) for name, path in paths(labels, options).items()}
    if device == "cuda":
        works["ours, torch instead of Triton"] = Work(works["ours"].forward, *given, torch_backend=True)
    seconds = copy_seconds(logits, options.repeats)
    print(
        f"\n{options.tokens} tokens x {options.vocab} columns of {options.dtype}, {logits.nbytes / 1e6:.0f} "
        f"MB; a copy moves {2 * logits.nbytes / seconds / 1e9:.1f} GB/s.\nAt that rate, reading them twice "
        f"and writing the gradient once takes {1500 * seconds:.2f} ms: the floor\n"
    )
    print("| path | forward (ms) | backward (ms) | both / ours | both / floor | peak extra memory (MB) |")
    print("|---|---|---|---|---|---|")
    times = measure(works, options.repeats, device)
    for name, work in works.items():
        work.prepare()
        peak = peak_bytes(work.both, device) / 1e6
        check(name, work, logits, labels, upstream)
        work.release()
        forward, backward = times[name]
        total, first = forward + backward, sum(times["ours"])
        print(
            f"| {name} | {forward:.2f} | {backward:.2f} | {total / first:.2f} | "
            f"{total / 1500 / seconds:.1f} | {peak:.1f} |"
        )
    return seconds


def table_of_sampled(
    logits: Tensor, labels: Tensor, upstream: list[Tensor], options: argparse.Namespace, seconds: float
) -> None:
    """Log-probs of some of the tokens; the floor is to read their logits twice and to write
    everybody's gradient.
    """
    works = {}
    for share in SHARES:
        kept = sampled_tokens(labels, share)
        rows = SampledRows.of(kept.cpu().numpy(), labels.device)
        works[share] = Work(
            lambda logits, rows=rows: [vocab_parallel_logprobs(logits, labels, sampled=rows)[0]],
            (logits,),
            (torch.empty_like(logits),),
            upstream,
            kept=kept,
        )
    times = measure(works, options.repeats, options.device)
    print("\nOf the tokens that were sampled alone, without entropy\n")
    print("| sampled | forward (ms) | backward (ms) | floor (ms) | both / floor |\n|---|---|---|---|---|")
    for share, work in works.items():
        work.prepare()
        work.both()
        check(f"{share} sampled", work, logits, labels, upstream)
        work.release()
        floor, (forward, backward) = 500 * seconds * (1 + 2 * share), times[share]
        print(
            f"| {share:.0%} | {forward:.2f} | {backward:.2f} | {floor:.2f} | "
            f"{(forward + backward) / floor:.1f} |"
        )


def sampled_tokens(labels: Tensor, share: float) -> Tensor:
    """A mask of that share of the tokens, at random."""
    kept = torch.rand(len(labels), generator=torch.Generator().manual_seed(1)) < share
    return kept.to(labels.device)


def table_of_counts() -> None:
    """Launches of the Triton form at 8192 tokens, bfloat16: what is read and written against the floor."""
    print("\nKernels of the Triton form, 8192 tokens of bfloat16, counted and not run\n")
    print("| columns | tp | sampled | forward | backward | exchanged a rank (KB) | bytes / floor |")
    print("|---|---|---|---|---|---|---|")
    for columns, tp in ((151936, 1), (18992, 8)):
        for share in SHARES:
            found = logprob_counts.count(8192, columns, sampled=int(8192 * share), tp=tp)
            forward, backward = (
                ", ".join(one.kernel.removesuffix("_kernel") for one in launches)
                for launches in (found.forward, found.backward)
            )
            print(
                f"| {columns} | {tp} | {share:.0%} | {forward} | {backward} | "
                f"{sum(found.exchanged) / 1000:.0f} | {found.moved / found.floor:.4f} |"
            )


def table_of_hidden(
    labels: Tensor,
    upstream: list[Tensor],
    dtype: torch.dtype,
    generator: torch.Generator,
    options: argparse.Namespace,
) -> None:
    """Hidden states -> log-probs and entropy, with both precisions' errors on a few tokens."""
    device, narrow = options.device, dtype if options.device == "cuda" else torch.bfloat16
    hidden = torch.randn(options.tokens, options.hidden, generator=generator, device=device).to(narrow)
    weight = torch.randn(options.vocab, options.hidden, generator=generator, device=device)
    weight = weight.mul_(2 / options.hidden**0.5).to(narrow)

    def through_logits(labels: Tensor) -> Callable[..., list[Tensor]]:
        return lambda hidden, weight: list(
            vocab_parallel_logprobs(hidden @ weight.t(), labels, with_entropy=True, inplace_gradient=True)
        )

    def directly(labels: Tensor, **settings) -> Callable[..., list[Tensor]]:
        return lambda hidden, weight: list(
            linear_logprobs(hidden, weight, labels, with_entropy=True, **settings)
        )

    def of_half(labels: Tensor) -> Callable[..., list[Tensor]]:
        return directly(
            labels, sampled=SampledRows.of(sampled_tokens(labels, 0.5).cpu().numpy(), labels.device)
        )

    made = {
        "logits, then log-probs in place": through_logits,
        "linear_logprobs": directly,
        "linear_logprobs, fp32 head": lambda labels: directly(labels, fp32_lm_head=True),
        "linear_logprobs, half of the tokens sampled": of_half,
    }
    given = (hidden, weight), (torch.empty_like(hidden), torch.empty_like(weight)), upstream
    works = {name: Work(make(labels), *given) for name, make in made.items()}
    times = measure(works, max(options.repeats // 3, 1), device)
    print(
        f"\nFrom hidden states [{options.tokens}, {options.hidden}] of {narrow}, entropy too; largest error "
        "of a\n"
        f"log-prob and relative error of the gradients against float64, {CHECKED} tokens\n"
    )
    print("| path | forward (ms) | backward (ms) | peak extra memory (MB) | log-prob | hidden's | weight's |")
    print("|---|---|---|---|---|---|---|")
    for name, work in works.items():
        work.prepare()
        peak = peak_bytes(work.both, device) / 1e6
        work.release()
        few = Work(
            made[name](labels[:CHECKED]),
            (hidden[:CHECKED], weight),
            (given[1][0][:CHECKED], given[1][1]),
            [x[:CHECKED] for x in upstream],
            kept=sampled_tokens(labels[:CHECKED], 0.5) if made[name] is of_half else None,
        )
        errors = errors_from_hidden(few, labels[:CHECKED])
        print(f"| {name} | {times[name][0]:.1f} | {times[name][1]:.1f} | {peak:.1f} | {' | '.join(errors)} |")


def errors_from_hidden(work: Work, labels: Tensor) -> list[str]:
    work.prepare()
    work.both()
    exact = [x.double().requires_grad_() for x in work.inputs]
    log_p = (exact[0] @ exact[1].t()).log_softmax(dim=1)
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    outputs = [logprobs, -(log_p.exp() * log_p).sum(dim=1)]
    if work.kept is not None:
        outputs = [x.where(work.kept, 0.0) for x in outputs]
        logprobs = outputs[0]
    expected = torch.autograd.grad(outputs, exact, [x.double() for x in work.upstream])
    errors = [(work.results[0] - logprobs).abs().max()]
    errors += [(a - b).norm() / b.norm() for a, b in zip(work.gradients, expected, strict=True)]
    return [f"{error.item():.1e}" for error in errors]


def check(name: str, work: Work, logits: Tensor, labels: Tensor, upstream: list[Tensor]) -> None:
    """The last run's log-probs and gradient of a few tokens, or the benchmark ends."""
    exact = logits[:CHECKED].double().requires_grad_()
    log_p = exact.log_softmax(dim=1)
    expected = [log_p.gather(1, labels[:CHECKED, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)][
        : len(work.results)
    ]
    if work.kept is not None:
        expected = [x.where(work.kept[:CHECKED], 0.0) for x in expected]
    [gradient] = torch.autograd.grad(
        expected, exact, [x[:CHECKED].double() for x in upstream[: len(expected)]]
    )
    for found, value in zip(work.results, expected, strict=True):
        if not torch.allclose(found[:CHECKED].double(), value, rtol=1e-5, atol=1e-5):
            raise SystemExit(f"{name}: log-probs or entropies are not those of float64")
    # Megatron's fused gradient is always bfloat16.
    if not torch.allclose(work.gradients[0][:CHECKED].double(), gradient, rtol=1e-2, atol=1e-5):
        raise SystemExit(f"{name}: the gradient is not that of float64")


def measure(works: dict[str, Work], repeats: int, device: str) -> dict[str, tuple[float, float]]:
    """Median milliseconds forward and backward; the paths take turns, so that a busy machine
    is busy for all.
    """
    times: dict[str, list] = {name: [] for name in works}
    for repeat in range(repeats + 2):
        for name, work in works.items():
            work.prepare()
            pair = timed(work.forward_pass, device), timed(work.backward_pass, device)
            work.release()
            if repeat >= 2:
                times[name].append(pair)
    return {name: tuple(map(statistics.median, zip(*pairs, strict=True))) for name, pairs in times.items()}


def timed(work: Callable[[], None], device: str) -> float:
    """Milliseconds; on a CPU of this process alone, summed over threads: a busy machine
    changes that little.
    """
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)
    start = time.process_time()
    work()
    return 1000 * (time.process_time() - start)


def copy_seconds(logits: Tensor, repeats: int) -> float:
    target = torch.zeros_like(logits)  # whose pages are then there
    return (
        statistics.median(timed(lambda: target.copy_(logits), logits.device.type) for _ in range(repeats))
        / 1000
    )


if __name__ == "__main__":
    with only_tables():
        main()
