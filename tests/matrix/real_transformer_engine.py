"""Imports the Python of a transformer-engine wheel over a fake of its C++ extension, in torch, without a GPU.

Only products, RMSNorm, LayerNorm and what unfused attention needs are computed; every other name of
the extension can
be imported, and raises when it is called. All that Transformer Engine's own Python does is as it is in the
wheel: parameters and their attributes, exchanges between ranks, autograd.
"""

import enum
import importlib
import importlib.util
import itertools
import os
import re
import sys
import types
from pathlib import Path

import torch
from torch import Tensor


def load(folder) -> types.ModuleType:
    """The package of `folder`, in which the wheel is unpacked; it stays this process's transformer_engine."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # leaves CUDA's libraries alone
    # Tensors are on the CPU, and where they are is all that keeps unfused attention from running.
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.cuda.is_current_stream_capturing = lambda: False
    sys.path.insert(0, str(folder))
    extension = sys.modules["transformer_engine_torch"] = _Extension("transformer_engine_torch")
    text = "".join(path.read_text() for path in Path(folder).glob("transformer_engine/pytorch/**/*.py"))
    for name in COMPUTED.keys() | set(re.findall(r"\b(?:tex|ext)\.(\w+)", text)):
        getattr(extension, name)  # so that `import *` finds it
    for name in ("onnx", "onnxscript", "onnx_ir", "ml_dtypes", "nvdlfw_inspect"):
        if importlib.util.find_spec(name) is None:
            sys.meta_path.append(_Absent(name))
    spec = importlib.machinery.PathFinder.find_spec("transformer_engine", [str(folder)])
    package = sys.modules["transformer_engine"] = importlib.util.module_from_spec(spec)
    importlib.import_module("transformer_engine.common").load_framework_extension = lambda framework: None
    spec.loader.exec_module(package)
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    # each layer asks for it as it is made
    base.torch = _Same(torch, cuda=_Same(torch.cuda, is_available=lambda: True))
    assert package.__file__.startswith(str(folder)) and hasattr(package, "pytorch")
    return package


class DType(enum.IntEnum):
    """Numbers of transformer_engine.h."""

    kByte, kInt32, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kFloat4E2M1 = (
        0,
        2,
        4,
        5,
        6,
        7,
        8,
        10,
    )


TYPES = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}


def generic_gemm(
    a,
    transposed_a,
    b,
    transposed_b,
    out,
    quantizer,
    out_type,
    bias,
    bias_type,
    gelu,
    gelu_in,
    grad,
    workspace,
    workspace_size,
    accumulate,
    split,
    *others,
    alpha=1.0,
    beta=None,
    **more,
):
    """op(b) @ op(a), as cuBLAS counts columns; with grad the bias's gradient is b's sum."""
    assert not gelu and alpha == 1.0 and quantizer is None
    rows = b.reshape(-1, b.shape[-1])
    wide = a.reshape(-1, a.shape[-1])
    product = (rows.t() if transposed_b else rows) @ (wide.t() if transposed_a else wide)
    of_bias = None
    if bias is not None and grad:
        of_bias = rows.sum(0)
    elif bias is not None:
        product = product + bias
    if not transposed_b:
        product = product.view(*b.shape[:-1], -1)
    return _written(out, product, accumulate), of_bias, None, None


def te_general_grouped_gemm(
    a, transposed_a, b, transposed_b, out, out_type, splits, bias, bias_type, single, gelu, grad, *others
):
    """generic_gemm for each expert; `single`: out[0] holds all results, one behind the other."""
    *_, accumulate, _, _ = others
    places = out[0].split([int(size) for size in splits]) if single else out
    for number, (left, right) in enumerate(zip(a, b, strict=True)):
        added = bias[number] if bias and bias[number].numel() else None
        made, of_bias, *_ = generic_gemm(
            left,
            transposed_a,
            right,
            transposed_b,
            None,
            None,
            None,
            added,
            None,
            False,
            None,
            grad,
            None,
            0,
            False,
            False,
        )
        _written(places[number], made, accumulate)
        if of_bias is not None:
            added.copy_(of_bias)
    return bias


def _written(out, made: Tensor, accumulate: bool) -> Tensor:
    if out is None:
        return made
    made = made.view_as(out)
    return out.add_(made) if accumulate else out.copy_(made)


def rmsnorm_fwd(x, weight, eps, out, quantizer, out_type, margin, zero_centered):
    rsigma = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    made = (x.float() * rsigma * (weight.float() + zero_centered)).to(TYPES[DType(out_type)])
    return _written(out, made, False), None, rsigma.reshape(-1)


def rmsnorm_bwd(gradient, x, rsigma, weight, margin, zero_centered):
    unit, scale = x.float() * rsigma.view(*x.shape[:-1], 1), weight.float() + zero_centered
    scaled = gradient.float() * scale
    of_x = rsigma.view(*x.shape[:-1], 1) * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    of_weight = (gradient.float() * unit).reshape(-1, x.shape[-1]).sum(0)
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


def layernorm_fwd(x, weight, bias, eps, out, quantizer, out_type, margin, zero_centered):
    scale = weight.float() + zero_centered
    made, mean, rsigma = torch.native_layer_norm(x.float(), x.shape[-1:], scale, bias.float(), eps)
    return _written(out, made.to(TYPES[DType(out_type)]), False), mean.reshape(-1), rsigma.reshape(-1)


def layernorm_bwd(gradient, x, mean, rsigma, weight, margin, zero_centered):
    places = (*x.shape[:-1], 1)
    of_x, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
        gradient.float(),
        x.float(),
        x.shape[-1:],
        mean.view(places),
        rsigma.view(places),
        weight.float() + zero_centered,
        weight.float(),
        [True, True, True],
    )
    return of_x.to(x.dtype), of_weight.to(weight.dtype), of_bias.to(weight.dtype)


def convert_thd_to_bshd(packed, boundaries, rows, longest):
    padded = packed.new_zeros(rows, longest, *packed.shape[1:])
    for row, (start, stop) in enumerate(itertools.pairwise(boundaries.tolist())):
        padded[row, : stop - start] = packed[start:stop]
    return padded


def convert_bshd_to_thd(padded, boundaries, total):
    packed = padded.new_zeros(total, *padded.shape[2:])
    for row, (start, stop) in enumerate(itertools.pairwise(boundaries.tolist())):
        packed[start:stop] = padded[row, : stop - start]
    return packed


COMPUTED = {
    function.__name__: function
    for function in (
        generic_gemm,
        te_general_grouped_gemm,
        rmsnorm_fwd,
        rmsnorm_bwd,
        layernorm_fwd,
        layernorm_bwd,
        convert_thd_to_bshd,
        convert_bshd_to_thd,
    )
} | {
    "DType": DType,
    "get_cudnn_version": lambda: 92400,
    "get_cublasLt_version": lambda: 130100,
    "get_num_cublas_streams": lambda: 4,
}


class _Same:
    """An object whose attributes are another's, but for those given."""

    def __init__(self, other, **others):
        self._other = other
        vars(self).update(others)

    def __getattr__(self, name: str):
        return getattr(self._other, name)


class _Extension(types.ModuleType):
    """transformer_engine_torch: COMPUTED, classes of numbered names, and functions that raise."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in COMPUTED:
            made = COMPUTED[name]
        elif name[0].isupper():
            made = _Numbered(name, (), {"__init__": lambda self, *args, **kwargs: None})
        else:

            def made(*args, **kwargs):
                raise NotImplementedError(f"{name} of the C++ extension is not computed here")

        setattr(self, name, made)
        return made


class _Numbered(type):
    """A class whose attributes are numbers, each its own: what enums of the extension are asked for."""

    def __getattr__(cls, name: str):
        if name == "__members__":
            return {key: value for key, value in vars(cls).items() if isinstance(value, int)}
        if name.startswith("__"):
            raise AttributeError(name)
        value = sum(isinstance(other, int) for other in vars(cls).values())
        setattr(cls, name, value)
        return value


class _Absent:
    """Finds a package that is not installed, and everything in it: modules of names that do nothing."""

    def __init__(self, name: str):
        self._name = name

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != self._name:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Nothing(spec.name)

    def exec_module(self, module):
        pass


class _Nothing(types.ModuleType):
    """Each attribute and each call of it is another such."""

    def __getattr__(self, name: str):
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return _Nothing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        return self
