"""Replacements for a process that runs SGLang 0.5.23 without a GPU."""

import functools
import multiprocessing
import sys

import torch
from torch import Tensor

from tools.cpu import batch_invariant, sglang_delta_nets, sglang_fp8, sglang_memory, sglang_sinks
from tools.cpu.replacement import MissingName, Replacement
from tools.cpu.torch_gloo import ONE_DEVICE

WORD = 0xFFFFFFFF
HANDLER = "sglang.srt.models.deepseek_common.attention_backend_handler"

# Imported all over SGLang, called only on a GPU; there is no wheel of it without CUDA.
STUB = "sgl_kernel"
STUB_WHY = "SGLang imports its GPU kernels by name; without them a stand-in can be imported but not called"

EARLY: list[Replacement | MissingName] = [
    ONE_DEVICE,
    *sglang_delta_nets.EARLY,
    *sglang_fp8.EARLY,
    *sglang_memory.EARLY,
]


def _skip_registration(original):
    def _cuda_host_register(*args, **kwargs) -> None:
        pass

    return _cuda_host_register


def _same_hash_in_torch(original):
    def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
        """[n] seeds of 64 bits, [n] positions, [m] columns -> [n, m] of 32 bits each, in
        int64: MurmurHash3.
        """

        def mix(state: Tensor | int, key: Tensor) -> Tensor:
            key = _rotated((key & WORD) * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
            return _rotated(state ^ key, 13) * 5 + 0xE6546B64 & WORD

        seed = seed.view(torch.int64)
        rows = mix(mix(mix(0, seed), seed >> 32), positions.long())
        state = mix(rows[:, None], col_indices.long()) ^ 16
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            state = (state ^ state >> shift) * factor & WORD
        return state ^ state >> 16

    return murmur_hash32


def _rotated(words: Tensor, bits: int) -> Tensor:
    return (words << bits | words >> 32 - bits) & WORD


def _every_backend(original):
    def _deterministic_attention_backend(view) -> dict:
        return {}

    return _deterministic_attention_backend


def _gated_in_torch(original):
    def fused_gate_sigmoid_mul_add(hidden_states, gate_weight, shared_output, final_hidden_states) -> None:
        """[T, H] += sigmoid([T, H] [H]) [T, H], in float32 as the kernel does it."""
        gate = (hidden_states.float() @ gate_weight.float().view(-1, 1)).sigmoid()
        added = gate * shared_output.float()
        final_hidden_states.copy_(final_hidden_states.float() + added)

    return fused_gate_sigmoid_mul_add


def _latent_by_torch(original):
    def get_handler(backend_name):
        """The way of each latent attention to its scores: with torch always by the keys of its cache."""
        if backend_name != "torch_native":
            return original(backend_name)
        return sys.modules[HANDLER]._dispatch_mla_subtype

    return get_handler


def _invariant_in_torch(original):
    def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:
        batch_invariant.enable()

    return enable_batch_invariant_mode


def _each_query_by_itself(original):
    @functools.wraps(original)
    def scaled_dot_product_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if not batch_invariant.is_on():
            return original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        queries, keys = query.shape[2], key.shape[2]
        visible = torch.ones(queries, keys, dtype=torch.bool) if attn_mask is None else attn_mask
        if is_causal:
            visible = visible.tril()
        visible = visible.expand(len(query), 1, queries, keys)
        return batch_invariant.attend_rows(query, key, value, visible, scale or query.shape[-1] ** -0.5)

    return scaled_dot_product_attention


def _then_fork(original):
    @functools.wraps(original)
    def _set_envs_and_config(server_args) -> None:
        original(server_args)
        multiprocessing.set_start_method("fork", force=True)

    return _set_envs_and_config


LATE = [
    Replacement(
        "sglang.srt.entrypoints.engine",
        "_set_envs_and_config",
        _then_fork,
        "without CUDA, which forbids it, the server's processes can be forked: each would import SGLang "
        "again",
    ),
    Replacement(
        "sglang.srt.mem_cache.pool_host.common",
        "_cuda_host_register",
        _skip_registration,
        "pins host memory for copies from a GPU; --enable-return-routed-experts keeps its buffer on the host",
    ),
    Replacement(
        "sglang.kernels.ops.sampling.murmur_hash",
        "murmur_hash32",
        _same_hash_in_torch,
        "the noise of --enable-deterministic-inference is a hash that is a GPU kernel; this is the same "
        "function",
    ),
    Replacement(
        "sglang.srt.arg_groups.overrides",
        "_deterministic_attention_backend",
        _every_backend,
        "--enable-deterministic-inference is refused with torch_native, the one attention backend without a "
        "GPU",
    ),
    Replacement(
        "sglang.srt.batch_invariant_ops",
        "enable_batch_invariant_mode",
        _invariant_in_torch,
        "--enable-deterministic-inference puts GPU kernels in the place of torch's matrix products; these do "
        "the same on a CPU",
    ),
    Replacement(
        "sglang.srt.layers.attention.torch_native_backend",
        "scaled_dot_product_attention",
        _each_query_by_itself,
        "with --enable-deterministic-inference a query's attention must not depend on the others, as in the "
        "GPU kernels that SGLang asks for then",
    ),
    Replacement(
        "sglang.kernels.ops.elementwise.elementwise",
        "fused_gate_sigmoid_mul_add",
        _gated_in_torch,
        "the gate of a shared expert is a Triton kernel; this is the same function",
    ),
    Replacement(
        HANDLER,
        "AttentionBackendRegistry.get_handler",
        _latent_by_torch,
        "a prefill of latent attention would hand torch_native whole keys, and it reads those of the cache",
    ),
    *sglang_delta_nets.LATE,
    *sglang_fp8.LATE,
    *sglang_memory.LATE,
    *sglang_sinks.LATE,
]
