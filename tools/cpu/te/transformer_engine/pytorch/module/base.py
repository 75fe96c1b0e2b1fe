"""What all layers share: parameters and how they begin, an empty extra state, the tensor-parallel group."""

import torch
from torch import Tensor

from transformer_engine.pytorch.distributed import size_of


def get_dummy_wgrad(shape: list, dtype: torch.dtype, zero=False) -> Tensor:
    """What backward returns where the gradient is in main_grad already; Megatron drops it."""
    return torch.zeros(shape, dtype=dtype)


class WeightGradient(torch.autograd.Function):
    """x [n, in] @ weight [out, in]^T -> [n, out]; fused: backward adds the weight's gradient
    to its main_grad.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fused = weight, fused  # the saved one has lost main_grad
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_x, None, None
        of_weight = gradient.t() @ x
        if not ctx.fused:
            return of_x, of_weight, None
        ctx.weight.main_grad.add_(of_weight.to(ctx.weight.main_grad.dtype))
        if not hasattr(ctx.weight, "grad_added_to_main_grad"):
            return of_x, None, None
        ctx.weight.grad_added_to_main_grad = True
        return of_x, get_dummy_wgrad(weight.shape, weight.dtype), None


class TransformerEngineBaseModule(torch.nn.Module):
    """Base of all layers with a state of fp8, which is empty here."""

    def __init__(self, name=None):
        super().__init__()
        self.name = name
        self.fp8 = self.fp8_calibration = self.primary_weights_in_fp8 = False
        self.fp8_meta = {"fp8_checkpoint": False, "recipe": None}
        self.tp_group, self.tp_group_initialized = None, False

    def set_tensor_parallel_group(self, tp_group) -> None:
        self.tp_group, self.tp_group_initialized = tp_group, True

    def _join(self, tp_group, tp_size: int) -> None:
        self.tp_size = tp_size if tp_group is None else size_of(tp_group)
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)

    def _add_parameter(self, name, shape, init, *, device, dtype, tracker=None, tracker_name=None) -> Tensor:
        """A parameter begun by init, in the tracker's state of the random generator where one is given."""
        parameter = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter(name, parameter)
        if parameter.device.type != "meta":
            with torch.no_grad():
                if tracker is None:
                    init(parameter)
                else:
                    with tracker().fork(*([tracker_name] if tracker_name else [])):
                        init(parameter)
        return parameter

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        if isinstance(state, Tensor) and state.numel():
            raise NotImplementedError("the checkpoint holds a state of fp8, which needs a GPU")

    def init_fp8_metadata(self, num_gemms=1) -> None:
        pass

    def need_backward_dw(self) -> bool:
        return False


def mark_tensor_parallel(parameter: Tensor, dim: int) -> None:
    """What Megatron reads of a parameter that is cut over ranks."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


def refuse_on_a_cpu(**options) -> None:
    """Raises NotImplementedError for an option that is on."""
    on = [name for name, value in options.items() if value]
    if on:
        raise NotImplementedError(f"{', '.join(on)} needs a GPU")
