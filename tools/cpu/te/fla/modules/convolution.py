"""The causal convolution of each channel."""

import torch
from torch import Tensor

from tools.cpu.delta_rule import convolved, of_sequences


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """[b, t, d] -> the same; with boundaries each sequence of the one row by itself."""
    assert activation in ("silu", "swish") and initial_state is None and not output_final_state
    before = x.new_zeros(weight.shape[1] - 1, weight.shape[0])
    rows = [
        torch.cat([convolved(row[own], weight, bias, before) for own in of_sequences(cu_seqlens, len(row))])
        for row in x
    ]
    return torch.stack(rows), None
