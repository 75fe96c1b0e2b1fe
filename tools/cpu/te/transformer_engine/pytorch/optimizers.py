"""FusedAdam and FusedSGD: torch's own steps, with the state that Megatron's optimizer saves of
Transformer Engine's.

That is a step count in the parameter group, where torch has one a parameter.
"""

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW (adam_w_mode) or Adam with weight decay in the gradient."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        store_param_remainders=False,
        use_decoupled_grad=False,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        master_weight_dtype=torch.float32,
        set_grad_none=None,
    ):
        low = {exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype} != {torch.float32}
        if amsgrad or capturable or master_weights or store_param_remainders or use_decoupled_grad or low:
            raise NotImplementedError("FusedAdam's own master weights, precisions and graphs need a GPU")
        settings = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, settings | {"weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        assert closure is None and grad_scaler is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            corrections = [
                1 - beta ** group["step"] if group["bias_correction"] else 1.0 for beta in group["betas"]
            ]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self.initialize_state(parameter, False)
                gradient = parameter.grad.float()
                if self.adam_w_mode:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                else:
                    gradient = gradient + group["weight_decay"] * parameter
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                size = (state["exp_avg_sq"] / corrections[1]).sqrt_().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], size, value=-group["lr"] / corrections[0])

    def initialize_state(self, param, store_param_remainders):
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros_like(param, dtype=torch.float32)


class FusedSGD(torch.optim.SGD):
    """torch's, under the name that Megatron imports beside FusedAdam."""
