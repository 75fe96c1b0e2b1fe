"""Log-probs from hidden states against float64: of an output layer in 16 bits, and of one
with float32 logits.

T tokens, H hidden size, V vocabulary columns. A GPU multiplies 16-bit numbers into float32 there,
which no CPU does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_corr.logprobs.linear import linear_logprobs
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from tools.gpu_check.outcome import Finding, Outcome, at_most

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
FLOAT32 = 1e-5
"""Of a log-prob around 10, and relative to the size of a gradient that is summed in float32."""


@dataclass(frozen=True)
class Case:
    """Example: Case(torch.bfloat16, fp32_head=True)."""

    dtype: torch.dtype
    fp32_head: bool = False
    main_grad: torch.dtype | None = None
    """Where the weight's gradient is added, as Megatron does; None: it is a new tensor of
    the weight's type.
    """
    every: int = 1
    """Of so many tokens one is sampled."""

    def __str__(self) -> str:
        parts = {
            str(self.dtype): True,
            "fp32 head": self.fp32_head,
            f"main_grad {self.main_grad}": self.main_grad,
            f"1 of {self.every}": self.every > 1,
        }
        return ", ".join(part for part, named in parts.items() if named).replace("torch.", "")


CASES = (
    Case(torch.bfloat16),
    Case(torch.bfloat16, main_grad=torch.float32),
    Case(torch.bfloat16, fp32_head=True),
    Case(torch.bfloat16, True, main_grad=torch.float32),
    Case(torch.bfloat16, True, main_grad=torch.bfloat16),
    Case(torch.bfloat16, True, torch.float32, every=3),
    Case(torch.float16, True),
    Case(torch.float32),
)


def check(device: str) -> Outcome:
    size = (300, 512, 10_000) if device == "cuda" else (30, 32, 300)
    return Outcome([one for case in CASES for one in compare(case, device, *size)])


def compare(case: Case, device: str, tokens: int, hidden_size: int, columns: int) -> list[Finding]:
    """Largest error of a log-prob, and relative errors of both gradients.

    Raises:
        DoesNotHold: one is beyond its bound.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(device, case.dtype).requires_grad_()
    weight = torch.randn(columns, hidden_size, generator=generator).mul(2 / hidden_size**0.5)
    weight = weight.to(device, case.dtype).requires_grad_()
    labels = torch.randint(0, columns, (tokens,), generator=generator).to(device)
    upstream = torch.randn(tokens, generator=generator).to(device)
    kept = torch.arange(tokens) % case.every == 0
    if case.main_grad:
        weight.main_grad = torch.zeros_like(weight, dtype=case.main_grad)
    found, _ = linear_logprobs(
        hidden,
        weight,
        labels,
        fp32_lm_head=case.fp32_head,
        into_main_grad=case.main_grad is not None,
        chunk_tokens=tokens // 3,
        sampled=SampledRows.of(kept.numpy(), hidden.device),
    )
    gradients = torch.autograd.grad(found, [hidden, weight], upstream)
    of_weight = gradients[1] if case.main_grad is None else weight.main_grad
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = (
        (exact[0] @ exact[1].t()).log_softmax(1).gather(1, labels[:, None])[:, 0].where(kept.to(device), 0.0)
    )
    expected_gradients = torch.autograd.grad(expected, exact, upstream.double())
    rounding, wide = ROUNDING.get(case.dtype, 0.0), case.fp32_head or case.dtype == torch.float32
    # The label's logit, below 16, is rounded to the type of the layer; so is each logit's gradient.
    of_gradients = FLOAT32 if wide else 2 * rounding
    of_rows = of_gradients + ROUNDING.get(of_weight.dtype, 0.0)
    return [
        at_most(
            f"{case}: largest error of a log-prob",
            (found - expected).abs().max().item(),
            FLOAT32 + _lost_in_sums(case, device, hidden_size) if wide else 16 * rounding,
        ),
        at_most(
            f"{case}: relative error of hidden's gradient",
            _error(gradients[0], expected_gradients[0]),
            of_gradients + rounding,
        ),
        at_most(
            f"{case}: relative error of the weight's gradient",
            _error(of_weight, expected_gradients[1]),
            of_rows,
        ),
    ]


def _lost_in_sums(case: Case, device: str, hidden_size: int) -> float:
    """A GPU adds 16 products of 16-bit numbers at a time, and cuts off what float32 cannot hold of
    a logit below 16.
    """
    return hidden_size / 16 * 16 * 2.0**-23 if device == "cuda" and case.dtype != torch.float32 else 0.0


def _error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()
