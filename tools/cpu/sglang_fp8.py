"""Replacements that let SGLang 0.5.23 load, update, hash and serve block-wise FP8 weights without a GPU.

A layer keeps what was loaded, as SGLang does on an H100, and multiplies by the weights that values and
scales stand for. Activations are not quantised, so log-probs are those of a model with these weights.
"""

import functools
from types import SimpleNamespace

import torch

from tools.cpu.replacement import Replacement

FP8 = "sglang.srt.layers.quantization.fp8"


def _dequantised(
    values: torch.Tensor, scales: torch.Tensor, block_size: list[int], dtype: torch.dtype
) -> torch.Tensor:
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    return block_quant_dequant(values, scales, block_size, dtype)


def _as_loaded(original):
    def process_weights_after_loading_block_quant(self, layer) -> None:
        pass

    return process_weights_after_loading_block_quant


def _linear(original):
    def apply(self, layer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = _dequantised(layer.weight, layer.weight_scale_inv, self.weight_block_size, x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    return apply


def _experts(original):
    def apply(self, layer, dispatch_output):
        from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        x, blocks = dispatch_output.hidden_states, self.quant_config.weight_block_size
        whole = SimpleNamespace(
            num_experts=layer.num_experts,
            w13_weight=_dequantised(layer.w13_weight, layer.w13_weight_scale_inv, blocks, x.dtype),
            w2_weight=_dequantised(layer.w2_weight, layer.w2_weight_scale_inv, blocks, x.dtype),
        )
        output = moe_forward_native(whole, x, dispatch_output.topk_output, self.moe_runner_config)
        return StandardCombineInput(hidden_states=output)

    return apply


def _float32_too(original):
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.half, torch.float32]

    return classmethod(get_supported_act_dtypes)


def _bytes(original):
    @functools.wraps(original)
    def broadcast(tensor: torch.Tensor, *args, **options):
        if tensor.dtype == torch.float8_e4m3fn and not tensor.is_cuda:
            tensor = tensor.view(torch.uint8)
        return original(tensor, *args, **options)

    return broadcast


EARLY = [
    Replacement("torch.distributed", "broadcast", _bytes, "gloo refuses tensors of float8, which NCCL takes"),
]
_KERNEL = "on a CPU SGLang multiplies FP8 weights in AMX kernels alone, of a package without a wheel for it"
LATE = [
    Replacement(FP8, "Fp8LinearMethod.process_weights_after_loading_block_quant", _as_loaded, _KERNEL),
    Replacement(FP8, "Fp8LinearMethod.apply", _linear, _KERNEL),
    Replacement(FP8, "Fp8MoEMethod.process_weights_after_loading_block_quant", _as_loaded, _KERNEL),
    Replacement(FP8, "Fp8MoEMethod.apply", _experts, _KERNEL),
    Replacement(
        FP8,
        "Fp8Config.get_supported_act_dtypes",
        _float32_too,
        "its GPU kernels take 16-bit activations alone; in float32 a server's log-probs are exact",
    ),
]
