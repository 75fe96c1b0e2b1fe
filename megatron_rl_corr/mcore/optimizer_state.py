"""The state of an optimizer that has made no update yet, for a checkpoint before the first one.

Optimizers make their state in their first update. Of one without, Megatron 0.19 can't save the distributed
optimizer's, and what it saves of others can't be loaded. A run gets there whose steps were all skipped.
"""

from __future__ import annotations

from typing import Any

import torch


def begin_optimizer_state(optimizer: Any) -> None:
    """Give an optimizer that has made no update the state that its first one would begin with: moments of 0,
    step 0. One that has some is left as it is.

    Args:
        optimizer: Megatron's, a chain of several too; None is left as it is.

    Source: `init_state_fn` of Megatron's optimizers, which it calls before it loads a checkpoint.
    """
    for one in [] if optimizer is None else _members(optimizer):
        inner = one.optimizer
        if inner is None or inner.state:
            continue
        if one.init_state_fn is None:  # of SGD, and with --optimizer-cpu-offload
            continue
        if one.config.use_precision_aware_optimizer:
            _begin_precise(inner)
        else:
            one.init_state_fn(inner, one.config)
        if isinstance(inner, torch.optim.Adam):  # AdamW too; Transformer Engine counts in its groups
            _begin_steps(inner)


def _members(optimizer: Any) -> list[Any]:
    """Those of a chain, which may hold chains: Megatron's layer-wise optimizer of Muon is one."""
    chained = vars(optimizer).get("chained_optimizers")
    return [optimizer] if chained is None else [one for part in chained for one in _members(part)]


def _begin_precise(inner: Any) -> None:
    """As Transformer Engine's first update does; `init_state_fn` lacks an argument here."""
    for group in inner.param_groups:
        for weight in group["params"]:
            inner.initialize_state(weight, inner.store_param_remainders and weight.dtype == torch.bfloat16)


def _begin_steps(inner: torch.optim.Adam) -> None:
    for group in inner.param_groups:
        on_device = group["capturable"] or group["fused"]
        for weight in group["params"]:
            device = weight.device if on_device else "cpu"
            inner.state[weight].setdefault("step", torch.zeros((), dtype=torch.float32, device=device))
