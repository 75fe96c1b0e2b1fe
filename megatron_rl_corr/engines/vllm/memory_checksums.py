"""Checksums of a server's parameters: of what lies in its memory, where its kernels take them as
they were loaded.

The server's worker imports this module: standard library and torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_rl_corr.engines.checksums import checksum

UNKNOWN = "unknown"
"""In the place of checksums after an update that was broken off."""


def checksums_of(
    model: nn.Module, device: torch.device, loaded: dict[str, str], unpacked: set[str]
) -> dict[str, str]:
    """The checksum of each parameter: as it lies in memory, or, if it was packed there, as it was loaded.

    A parameter that once lay in memory as it was loaded is not packed, and must lie there so from then on.

    Args:
        model: vLLM's.
        device: of the model.
        loaded: parameter -> checksum, of those that updates have loaded.
        unpacked: parameters that are known not to be packed; more may be added.
    """
    found = {}
    for name, parameter in model.named_parameters():
        was = loaded.get(name)
        found[name] = was or ""
        if was == UNKNOWN:
            continue
        memory = checksum(parameter.data, device.type) or ""
        if was and memory == was and name not in unpacked and shows_order(parameter.data):
            unpacked.add(name)
        if not was or name in unpacked:
            found[name] = memory
    return found


_LOOKED_AT = 2**20
"""Numbers of a tensor that `shows_order` looks at: the median of a layer's experts would take gigabytes."""


def shows_order(tensor: Tensor) -> bool:
    """False where most numbers are equal: what packing does to others may leave such a tensor as it is."""
    some = tensor.flatten()[:: max(1, tensor.numel() // _LOOKED_AT)]
    return some.numel() > 0 and bool((some == some.median()).sum() <= some.numel() / 2)
