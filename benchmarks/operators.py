"""Counts the operators that launch a kernel, and those that make the host wait for the device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# These allocate, or only look at memory otherwise; with the views, they are all that launches nothing. Every
# other operator counts as one kernel, though a GPU's sort or cumsum may take a few.
LAUNCHES_NOTHING = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "alias",
    "lift_fresh",
    "_unsafe_view",
    "_reshape_alias",
}
HOST_READS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
    "unique",
    "_unique2",
}


class OperatorCount(TorchDispatchMode):
    """Names of the operators run inside the block: `kernels`, and `host_reads`."""

    def __init__(self):
        super().__init__()
        self.kernels: list[str] = []
        self.host_reads: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in HOST_READS:
            self.host_reads.append(name)
        if name.startswith("index") and isinstance(args[1], (list, tuple)):
            by_mask = any(index is not None and index.dtype == torch.bool for index in args[1])
            self.host_reads += ["index by a mask"] * by_mask
        # A view's result is memory of an argument that it does not write to.
        results = [result.alias_info for result in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in results)
        if not is_view and name not in LAUNCHES_NOTHING:
            self.kernels.append(name)
        return func(*args, **(kwargs or {}))
