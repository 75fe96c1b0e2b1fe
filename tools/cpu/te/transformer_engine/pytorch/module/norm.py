"""RMSNorm and LayerNorm, computed in float32."""

import torch
from torch import Tensor

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


def normalised(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str, zero_centered: bool
) -> Tensor:
    """[..., H] -> the same, in x's type; kind is "RMSNorm" or "LayerNorm"."""
    scale = weight.float() + 1 if zero_centered else weight.float()
    wide = x.float()
    if kind == "LayerNorm":
        wide = torch.nn.functional.layer_norm(
            wide, wide.shape[-1:], scale, None if bias is None else bias.float(), eps
        )
    else:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale
    return wide.to(x.dtype)


class _Norm(TransformerEngineBaseModule):
    kind: str

    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        *,
        device="cuda",
        dtype=None,
        **kwargs,
    ):
        super().__init__()
        shape = hidden_size if normalized_shape is None else normalized_shape
        self.eps, self.zero_centered_gamma, self.sequence_parallel = (
            eps,
            zero_centered_gamma,
            sequence_parallel,
        )
        begin = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        self._add_parameter("weight", shape, begin, device=device, dtype=params_dtype or dtype)
        self.bias = None
        if self.kind == "LayerNorm":
            del self.bias
            self._add_parameter(
                "bias", shape, torch.nn.init.zeros_, device=device, dtype=params_dtype or dtype
            )
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return normalised(x, self.weight, self.bias, self.eps, self.kind, self.zero_centered_gamma)


class RMSNorm(_Norm):
    kind = "RMSNorm"


class LayerNorm(_Norm):
    kind = "LayerNorm"
