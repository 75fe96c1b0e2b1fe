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
        if was and memory == was and not is_constant(parameter.data):
            unpacked.add(name)
        if not was or name in unpacked:
            found[name] = memory
    return found


def is_constant(tensor: Tensor) -> bool:
    """A tensor of equal numbers is the same in every order, and does not show whether it was packed."""
    return bool((tensor == tensor.flatten()[:1]).all())
