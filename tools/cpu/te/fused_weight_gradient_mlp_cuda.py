"""Apex's extension, which Megatron's own output layer needs for gradient accumulation fusion: the
product in torch.
"""

from torch import Tensor


def wgrad_gemm_accum_fp32(inputs: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
    """main_grad [out, in] += gradient [n, out]^T @ inputs [n, in]."""
    main_grad.add_((gradient.t() @ inputs).to(main_grad.dtype))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
