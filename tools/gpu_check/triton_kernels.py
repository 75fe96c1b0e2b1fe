"""Triton's log-probs against float64 and against torch: values, entropies, sums of p^2, gradients.

T tokens, V vocabulary columns, padding included. Tensor-parallel ranks are the shards of one
process, whose statistics are stacked as the collective stacks them. Without a GPU Triton's
interpreter runs the kernels.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from megatron_rl_corr.logprobs import torch_backend, vocab
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.torch_backend import LogitColumns
from tools.gpu_check.outcome import Finding, Outcome, at_most, require

LOGPROB_ERROR = 1e-5
"""Of a log-prob or entropy around 10, computed in float32."""
GRADIENT_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative to the largest; the gradient has the logits' type, of which bfloat16 keeps 8
bits and float16 11.
"""


@dataclass(frozen=True)
class Case:
    """One set of inputs. Example: Case("8 shards", 256, 151936, torch.bfloat16, shards=8)."""

    name: str
    tokens: int
    columns: int
    dtype: torch.dtype = torch.float32
    shards: int = 1
    padding: int = 0
    """Columns at the end that do not belong to the vocabulary."""
    temperature: float = 1.0
    entropy: bool = True
    every: int = 1
    """Of so many tokens one is sampled; the others' logits are not numbers."""
    in_place: bool = False


SMALL = (
    Case("float32", 5, 4096 + 7),
    Case("float32, no entropy, temperature 0.7", 4, 3 * 4096, entropy=False, temperature=0.7),
    Case("float16", 4, 4097, torch.float16),
    Case("bfloat16, in place", 4, 2 * 4096, torch.bfloat16, in_place=True),
    Case("float32, sampled rows", 7, 5000, every=3),
    Case("bfloat16, sampled rows in place", 8, 5000, torch.bfloat16, every=2, in_place=True),
    Case("float32, 4 shards, padding", 5, 4 * 300, shards=4, padding=350),
    Case("bfloat16, 2 shards, sampled rows", 6, 2 * 5000, torch.bfloat16, shards=2, every=2),
)
LARGE = (
    Case("float32, Qwen's vocabulary", 256, 151936),
    Case("bfloat16, Qwen's vocabulary", 256, 151936, torch.bfloat16),
    Case(
        "bfloat16, Qwen's vocabulary, 8 shards, sampled rows", 256, 151936, torch.bfloat16, shards=8, every=4
    ),
)
"""On a GPU only, whose many programs a small case does not fill."""


@dataclass(frozen=True)
class Values:
    """What is compared: [T], [T] and [T, V]."""

    logprobs: Tensor
    entropy: Tensor
    gradient: Tensor
    collision: Tensor
    """[T], sum of p^2."""


def check(device: str) -> Outcome:
    from megatron_rl_corr.logprobs import triton_backend

    if device == "cuda":
        chosen = vocab.backend(torch.zeros(1, 2, device=device))
        require(chosen is triton_backend, f"on this GPU log-probs are computed by {chosen.__name__}")
    cases = SMALL + (LARGE if device == "cuda" else ())
    return Outcome([one for case in cases for one in compare(triton_backend, case, device)])


def compare(kernels: ModuleType, case: Case, device: str) -> list[Finding]:
    """The largest errors of the kernels' values against float64 and torch_backend's.

    Raises:
        DoesNotHold: an error is beyond its bound.
    """
    found, other = values(kernels, case, device), values(torch_backend, case, device)
    exact, bound, findings = reference(case, device), GRADIENT_ERROR[case.dtype], []
    for name, against, gradient_bound in (("float64", exact, bound), ("torch", other, 2 * bound)):
        errors = {
            "log-prob": (found.logprobs - against.logprobs, LOGPROB_ERROR),
            "collision": (found.collision - against.collision, LOGPROB_ERROR),
        }
        if case.entropy:
            errors["entropy"] = (found.entropy - against.entropy, LOGPROB_ERROR)
        errors["gradient"] = (
            (found.gradient - against.gradient) / exact.gradient.abs().max(),
            gradient_bound,
        )
        rows = [
            at_most(f"{case.name}: {what} against {name}", _largest(error), most)
            for what, (error, most) in errors.items()
        ]
        findings.append(
            Finding(
                f"{case.name}: largest errors of {', '.join(errors)} against {name}",
                ", ".join(row.found for row in rows),
                ", ".join(row.bound for row in rows),
            )
        )
    return findings


def _largest(error: Tensor) -> float:
    return error.abs().max().item()  # NaN stays NaN


def inputs(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits [T, V], labels [T], upstream gradients [2, T], sampled [T] bool), the same on every device."""
    generator = torch.Generator().manual_seed(case.tokens * case.columns)
    vocab_size = case.columns - case.padding
    logits = torch.randn(case.tokens, case.columns, generator=generator).mul_(3).to(case.dtype)
    logits[:, vocab_size:] = 1e4  # padding holds anything
    labels = torch.randint(vocab_size, (case.tokens,), generator=generator)
    upstream = torch.randn(2, case.tokens, generator=generator)
    sampled = torch.arange(case.tokens) % case.every == 0
    return tuple(x.to(device) for x in (logits, labels, upstream, sampled))


def values(kernels: ModuleType, case: Case, device: str) -> Values:
    """As vocab.py calls the kernels, on each shard in turn."""
    logits, labels, upstream, sampled = inputs(case, device)
    logits[~sampled] = torch.nan
    rows = SampledRows.of(sampled.cpu().numpy(), device) if case.every > 1 else None
    width, vocab_size = case.columns // case.shards, case.columns - case.padding
    columns = [
        LogitColumns(
            first,
            min(max(vocab_size - first, 0), width),
            case.temperature,
            case.entropy,
            1024,
            with_collision=True,
        )
        for first in range(0, case.columns, width)
    ]
    shards = logits.chunk(case.shards, dim=1)
    stats = torch.stack(
        [kernels.label_stats(shard, labels, own, rows) for shard, own in zip(shards, columns, strict=True)]
    )
    combined = kernels.combine_stats(stats, case.entropy, rows)
    gradients = []
    for shard, own in zip(shards, columns, strict=True):
        out = shard if case.in_place else torch.full_like(shard, torch.nan)
        kernels.logits_gradient(
            shard,
            labels,
            combined,
            upstream[0],
            upstream[1] if case.entropy else None,
            own,
            out=out,
            sampled=rows,
        )
        gradients.append(out)
    return Values(
        combined[0].double(), combined[1].double(), torch.cat(gradients, dim=1).double(), combined[4].double()
    )


def reference(case: Case, device: str) -> Values:
    """In float64, by torch's log_softmax and autograd; 0 for tokens that are not sampled."""
    logits, labels, upstream, sampled = inputs(case, device)
    exact = logits.double().requires_grad_()
    log_p = (exact[:, : case.columns - case.padding] / case.temperature).log_softmax(dim=1)
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(dim=1)
    outputs = [logprobs.where(sampled, 0.0), entropy.where(sampled, 0.0)]
    used = outputs if case.entropy else outputs[:1]
    torch.autograd.backward(used, [x.double() for x in upstream[: len(used)]])
    collision = log_p.detach().exp().square().sum(dim=1).where(sampled, 0.0)
    return Values(outputs[0].detach(), outputs[1].detach(), exact.grad, collision)
