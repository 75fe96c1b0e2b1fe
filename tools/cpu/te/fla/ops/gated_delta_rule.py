"""The gated delta rule."""

import torch
from torch import Tensor

from tools.cpu.delta_rule import delta_rule, of_sequences


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """q, k: [b, t, h, K]; v: [b, t, h, V]; g, beta: [b, t, h] -> [b, t, h, V], in v's type."""
    assert initial_state is None and not output_final_state and not use_qk_l2norm_in_kernel
    rows = []
    for row in zip(q, k, v, g, beta, strict=True):
        wide = [part.float().transpose(0, 1) for part in row]
        state = wide[0].new_zeros(q.shape[2], q.shape[3], v.shape[3])
        outs = [
            delta_rule(*(part[:, own] for part in wide), state)[0]
            for own in of_sequences(cu_seqlens, q.shape[1])
        ]
        rows.append(torch.cat(outs, dim=1).transpose(0, 1))
    return torch.stack(rows).to(v.dtype), None
