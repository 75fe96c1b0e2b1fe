"""GroupedLinear: a Linear for each expert, over tokens that lie expert by expert."""

import torch
from torch import Tensor

from transformer_engine.pytorch.module.base import (
    TransformerEngineBaseModule,
    WeightGradient,
    mark_tensor_parallel,
    refuse_on_a_cpu,
)
from transformer_engine.pytorch.module.linear import _divided, _usual_init


class GroupedLinear(TransformerEngineBaseModule):
    """x [t, in] and m_splits, tokens of each of num_gemms experts -> [t, out]; no exchange over ranks."""

    def __init__(
        self,
        num_gemms,
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
        device="cuda",
        ub_overlap_rs=False,
        ub_overlap_ag=False,
        ub_name=None,
        delay_wgrad_compute=False,
        save_original_input=False,
        single_grouped_weight=False,
        single_grouped_bias=False,
        name=None,
        use_grouped_tensor=None,
    ):
        super().__init__(name)
        refuse_on_a_cpu(
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_ag=ub_overlap_ag,
            delay_wgrad_compute=delay_wgrad_compute,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            use_grouped_tensor=use_grouped_tensor,
        )
        self._join(tp_group, tp_size)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        if parallel_mode == "column":
            self.out_features = _divided(out_features, self.tp_size)
        elif parallel_mode == "row":
            self.in_features = _divided(in_features, self.tp_size)
        self.parallel_mode, self.sequence_parallel = parallel_mode, self.tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation, self.ub_name = fuse_wgrad_accumulation, ub_name
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.single_grouped_weight, self.save_original_input = single_grouped_weight, save_original_input
        place = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        for expert in range(num_gemms):
            weight = self._add_parameter(
                f"weight{expert}",
                (self.out_features, self.in_features),
                init_method or _usual_init,
                tracker=get_rng_state_tracker,
                tracker_name=rng_tracker_name,
                **place,
            )
            mark_tensor_parallel(weight, dim=1 if parallel_mode == "row" else 0)
            if bias:
                added = self._add_parameter(
                    f"bias{expert}", (self.out_features,), torch.nn.init.zeros_, **place
                )
                if parallel_mode == "row":
                    added.sequence_parallel = self.sequence_parallel
                elif parallel_mode == "column":
                    mark_tensor_parallel(added, dim=0)

    def forward(self, inp: Tensor, m_splits, is_first_microbatch=None, out=None, dgrad_out=None):
        splits = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        fused = self.fuse_wgrad_accumulation and torch.is_grad_enabled()
        parts = []
        for expert, x in enumerate(inp.reshape(-1, inp.shape[-1]).split(splits)):
            y = WeightGradient.apply(x, getattr(self, f"weight{expert}"), fused)
            parts.append(y + getattr(self, f"bias{expert}") if self.apply_bias else y)
        y = torch.cat(parts)
        if not self.return_bias:
            return y
        return y, [
            getattr(self, f"bias{expert}") for expert in range(self.num_gemms)
        ] if self.use_bias else []
