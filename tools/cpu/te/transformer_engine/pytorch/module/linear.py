"""Linear and LayerNormLinear, with the exchanges of tensor and sequence parallelism."""

import torch
from torch import Tensor

from transformer_engine.pytorch.distributed import (
    Exchange,
    allreduce,
    copy_to_ranks,
    gather_along_first_dim,
    reduce_scatter_along_first_dim,
)
from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    WeightGradient,
    mark_tensor_parallel,
    refuse_on_a_cpu,
)
from transformer_engine.pytorch.module.norm import normalised


class Linear(TransformerEngineBaseModule):
    """x [t, ..., in] -> [t, ..., out], cut over the outputs (column), the inputs (row) or
    not at all (None).
    """

    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__(name)
        refuse_on_a_cpu(
            parameters_split=parameters_split,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
        )
        self._join(tp_group, tp_size)
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features = _divided(out_features, self.tp_size)
        elif parallel_mode == "row":
            self.in_features = _divided(in_features, self.tp_size)
        self.parallel_mode, self.sequence_parallel = parallel_mode, self.tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation, self.ub_name = fuse_wgrad_accumulation, ub_name
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.save_original_input = save_original_input
        place = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        weight = self._add_parameter(
            "weight",
            (self.out_features, self.in_features),
            init_method or _usual_init,
            tracker=get_rng_state_tracker,
            tracker_name=rng_tracker_name,
            **place,
        )
        mark_tensor_parallel(weight, dim=1 if parallel_mode == "row" else 0)
        if bias:
            added = self._add_parameter("bias", (self.out_features,), torch.nn.init.zeros_, **place)
            if parallel_mode == "row":
                added.sequence_parallel = self.sequence_parallel
            elif parallel_mode == "column":
                mark_tensor_parallel(added, dim=0)
        else:
            self.bias = torch.Tensor()

    def forward(self, inp: Tensor, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        return self._with_bias(self._product(inp))

    def _product(self, x: Tensor) -> Tensor:
        cut = self.tp_size > 1
        if cut and self.parallel_mode == "column":
            x = Exchange.apply(
                x, self.tp_group, gather_along_first_dim if self.sequence_parallel else copy_to_ranks
            )
        fused = self.fuse_wgrad_accumulation and torch.is_grad_enabled()
        y = WeightGradient.apply(x.reshape(-1, x.shape[-1]), self.weight, fused)
        y = y.view(*x.shape[:-1], self.out_features)
        if cut and self.parallel_mode == "row":
            exchange = reduce_scatter_along_first_dim if self.sequence_parallel else allreduce
            y = Exchange.apply(y, self.tp_group, exchange)
        return y

    def _with_bias(self, y: Tensor):
        if self.apply_bias:
            y = y + self.bias
        return (y, self.bias) if self.return_bias else y


class LayerNormLinear(Linear):
    """A norm of x, then Linear."""

    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        normalization="LayerNorm",
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        parameters_split=None,
        zero_centered_gamma=False,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_wgrad=False,
        ub_bulk_dgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        name=None,
    ):
        refuse_on_a_cpu(
            return_layernorm_output=return_layernorm_output,
            return_layernorm_output_gathered=return_layernorm_output_gathered,
        )
        super().__init__(
            in_features,
            out_features,
            sequence_parallel,
            fuse_wgrad_accumulation,
            tp_group,
            tp_size,
            get_rng_state_tracker,
            None,
            init_method,
            bias,
            return_bias,
            params_dtype,
            parallel_mode,
            parameters_split,
            device,
            ub_overlap_ag,
            ub_overlap_rs,
            ub_overlap_rs_dgrad,
            ub_bulk_dgrad,
            ub_bulk_wgrad,
            ub_name,
            delay_wgrad_compute,
            symmetric_ar_type,
            name=name,
        )
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        place = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        begin = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        scale = self._add_parameter("layer_norm_weight", (in_features,), begin, **place)
        scale.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            del self.layer_norm_bias
            shift = self._add_parameter("layer_norm_bias", (in_features,), torch.nn.init.zeros_, **place)
            shift.sequence_parallel = self.sequence_parallel
        # the norm comes first, which an optimizer's and a bucket's order follow
        for name in ("weight", "bias"):
            if name in self._parameters:
                self._parameters[name] = self._parameters.pop(name)

    def forward(self, inp: Tensor, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        x = normalised(
            inp,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self.eps,
            self.normalization,
            self.zero_centered_gamma,
        )
        return self._with_bias(self._product(x))


def _divided(features: int, ranks: int) -> int:
    assert features % ranks == 0, f"{features} features over {ranks} ranks"
    return features // ranks


def _usual_init(weight: Tensor) -> None:
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)
