"""One tensor of every rank, stacked in rank order."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

try:
    from torch.distributed import all_gather_single
except ImportError:  # before torch 2.14; from then on the old name warns on every rank
    from torch.distributed import all_gather_into_tensor as all_gather_single


def all_gather_stacked(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """[...] on each of R ranks -> [R, ...] on all: one collective; without a group, or alone in it, a view.

    Reducing the result locally gives every rank the same bits, which a ring all-reduce does not promise.
    """
    if group is None or group.size() == 1:
        return tensor[None]
    # Flat, because gloo takes only the concatenation of its inputs' first dimension, not a new one.
    gathered = tensor.new_empty(group.size() * tensor.numel())
    all_gather_single(gathered, tensor.contiguous().view(-1), group=group)
    return gathered.view(group.size(), *tensor.shape)
