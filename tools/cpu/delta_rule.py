"""The gated delta rule and the convolution before it, by torch: what both engines compute with on a CPU.

Heads h, key size K, value size V, tokens t of one sequence.
"""

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

CHUNK = 64


def normalised(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x over the length of its last dimension's vectors: x / sqrt(sum x^2 + eps)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def decay_and_step(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """ln of the factor by which a token lets the state decay, and its step size; [..., h], float32."""
    return -A_log.float().exp() * softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    r"""S_t = e^{g_t} S_{t-1} + k_t beta_t (v_t - (e^{g_t} S_{t-1})^T k_t)^T, o_t = S_t^T q_t / sqrt(K).

    In chunks of 64 tokens: within one, what each token writes is the solution of a triangular system.
    Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv 2412.06464.

    Args:
        query, key: [h, t, K]; value: [h, t, V]; g, beta: [h, t].
        state: [h, K, V], before the first token.

    Returns:
        [h, t, V], and the state behind the last token.
    """
    tokens, out = query.shape[1], []
    for begin in range(0, tokens, CHUNK):
        q, k, v, decay, step = (part[:, begin : begin + CHUNK] for part in (query, key, value, g, beta))
        total, size = decay.cumsum(-1), q.shape[1]
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        between = (total[:, :, None] - total[:, None, :]).masked_fill(later, -torch.inf).exp()
        own = step[..., None] * k @ k.mT * between
        found = v - total.exp()[..., None] * (k @ state)
        written = torch.linalg.solve_triangular(
            own.tril(-1), step[..., None] * found, upper=False, unitriangular=True
        )
        q = q * query.shape[-1] ** -0.5
        out.append(total.exp()[..., None] * (q @ state) + q @ k.mT * between @ written)
        left = (total[:, -1:] - total).exp()
        state = total[:, -1].exp()[:, None, None] * state + (left[..., None] * k).mT @ written
    return torch.cat(out, dim=1), state


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> Tensor:
    """[t, d] -> [t, d]: SiLU of each channel's causal convolution.

    Args:
        weight: [d, w]; bias: [d], or None.
        before: [w - 1, d], the inputs before the first token, zeros at a text's beginning.
    """
    whole = torch.cat([before.to(x.dtype), x]).t()[None]
    return silu(conv1d(whole, weight[:, None], bias, groups=weight.shape[0]))[0].t()


def of_sequences(boundaries: Tensor | None, tokens: int) -> list[slice]:
    """The tokens of each sequence of a pack; of one sequence where there are no boundaries."""
    ends = [0, tokens] if boundaries is None else boundaries.tolist()
    return [slice(begin, end) for begin, end in zip(ends, ends[1:], strict=False) if end > begin]
