"""Gated delta nets (Qwen3-Next, Qwen3.5) in SGLang 0.5.23 without a GPU: its CPU kernels, for which there is
no wheel, by torch.

Tokens T of all sequences of a batch, heads h, key size K, value size V. A slot of the pool of states holds
[h, V, K], as on a GPU.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from tools.cpu.delta_rule import convolved, decay_and_step, delta_rule, normalised, of_sequences
from tools.cpu.replacement import MissingName, Replacement

BACKEND = "sglang.srt.layers.attention.linear.gdn_backend"
KERNEL = "sglang.srt.layers.attention.linear.kernels.gdn_triton"
KERNELS = "sglang.kernels.ops.attention.fla"


def _of_one_more(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm by 1 + weight, in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 + weight.float())).to(x.dtype)


def norm_queries_and_keys(query, key, query_weight, key_weight, eps, head_dim):
    return (
        _of_one_more(query.reshape(-1, head_dim), query_weight, eps),
        _of_one_more(key.reshape(-1, head_dim), key_weight, eps),
    )


def norm_and_part_gate(query_gate, key, query_weight, key_weight, eps, head_dim, num_heads):
    query, gate = query_gate.unflatten(-1, (num_heads, 2, head_dim)).unbind(-2)
    normed = norm_queries_and_keys(query, key, query_weight, key_weight, eps, head_dim)
    return *normed, gate.contiguous()


def times_sigmoid(x: Tensor, gate: Tensor) -> None:
    x.mul_(gate.reshape(x.shape).float().sigmoid().to(x.dtype))


def part_projections(qkvz, ba, key_heads, value_heads, key_dim, value_dim):
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed, z = qkvz.split([2 * keys + values, values], dim=-1)
    b, a = ba.split([value_heads, value_heads], dim=-1)
    return mixed.contiguous(), z.unflatten(-1, (value_heads, value_dim)), b.contiguous(), a.contiguous()


def gates(A_log, a, b, dt_bias):
    return decay_and_step(A_log, a, b, dt_bias)


def _over_sequences(query, key, value, g, beta, pool, slots, boundaries):
    """[1, T, h, K] ... -> [1, T, h, V]; a sequence begins with the state of its slot, and leaves its own."""
    repeats = value.shape[2] // query.shape[2]
    query, key = (normalised(x[0].float()).repeat_interleave(repeats, dim=1) for x in (query, key))
    parts = [part.transpose(0, 1) for part in (query, key, value[0].float(), g.float(), beta.float())]
    out = torch.zeros(value.shape[1:], dtype=value.dtype)
    for slot, own in zip(slots.tolist(), of_sequences(boundaries, value.shape[1]), strict=False):
        made, state = delta_rule(*(part[:, own] for part in parts), pool[slot].float().mT)
        out[own], pool[slot] = made.transpose(0, 1).to(out.dtype), state.mT.to(pool.dtype)
    return out[None]


def next_tokens(
    *, A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, **settings
):
    g, beta = decay_and_step(A_log, a, b, dt_bias)
    return _over_sequences(q, k, v, g, beta, initial_state_source, initial_state_indices, cu_seqlens)


def _prompts(original):
    def chunk_gated_delta_rule(
        *, q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, **settings
    ):
        out = _over_sequences(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens)
        return out, None, None

    return chunk_gated_delta_rule


def _convolve(x, weight, bias, pool, slot, begins):
    """One sequence: [t, d] -> [t, d]; its slot, [d, w - 1], gets the last inputs."""
    before = torch.zeros_like(pool[slot]) if begins else pool[slot].clone()
    pool[slot] = torch.cat([before.to(x.dtype), x.t()], dim=1)[:, -before.shape[1] :]
    return convolved(x, weight, bias, before.t())


def _convolve_prompts(original):
    def causal_conv1d_fn(
        x,
        weight,
        bias,
        *,
        activation,
        conv_states,
        has_initial_state,
        cache_indices,
        query_start_loc,
        **settings,
    ):
        assert activation == "silu"
        rows, out = x.t(), torch.zeros_like(x.t())
        sequences = of_sequences(query_start_loc, len(rows))
        known = zip(cache_indices.tolist(), has_initial_state.tolist(), sequences, strict=False)
        for slot, goes_on, own in known:
            out[own] = _convolve(rows[own], weight, bias, conv_states, slot, not goes_on)
        return out.t()

    return causal_conv1d_fn


def _convolve_next(original):
    def causal_conv1d_update(x, conv_states, weight, bias, activation, *, conv_state_indices):
        assert activation == "silu"
        slots = enumerate(conv_state_indices.tolist())
        return torch.cat(
            [_convolve(x[i : i + 1], weight, bias, conv_states, slot, False) for i, slot in slots]
        )

    return causal_conv1d_update


def _norm_times_gate(original):
    def forward(self, x, gate=None, z=None):
        assert self.activation in ("silu", "swish")
        gate, wide = z if gate is None else gate, x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return (wide if gate is None else wide * silu(gate.float())).to(x.dtype)

    return forward


def _of_the_cpu(original):
    def get_device_module(device=None):
        return original("cpu" if device is None else device)

    return get_device_module


_WHY = "of gated delta nets on a CPU, of a package without a wheel for it"
_OPS = {
    "fused_qk_gemma_rmsnorm_cpu": norm_queries_and_keys,
    "fused_qk_gemma_rmsnorm_with_gate_cpu": norm_and_part_gate,
    "fused_sigmoid_mul_cpu": times_sigmoid,
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": part_projections,
    "fused_gdn_gating_cpu": gates,
    "fused_sigmoid_gating_delta_rule_update_cpu": next_tokens,
}
EARLY = [
    *(MissingName("torch", f"ops.sgl_kernel.{name}", made, _WHY) for name, made in _OPS.items()),
    Replacement(
        "torch", "get_device_module", _of_the_cpu, "Qwen3-Next makes a norm on the device of torch's build"
    ),
]
_NORM = "its norm times a gate is a kernel for GPUs"
LATE = [
    Replacement(BACKEND, "causal_conv1d_fn", _convolve_prompts, _WHY),
    Replacement(BACKEND, "causal_conv1d_update", _convolve_next, _WHY),
    Replacement(KERNEL, "chunk_gated_delta_rule", _prompts, _WHY),
    Replacement(f"{KERNELS}.layernorm_gated", "RMSNorm.forward", _norm_times_gate, _NORM),
    Replacement(f"{KERNELS}.fused_norm_gate", "FusedRMSNormGated.forward", _norm_times_gate, _NORM),
]
