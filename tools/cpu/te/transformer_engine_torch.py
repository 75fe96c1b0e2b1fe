"""The one function of Transformer Engine's C++ extension that Megatron calls itself."""

import torch
from torch import Tensor
from transformer_engine.pytorch.attention.positions import positions_of_rank


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Positions of a packed row that context-parallel rank `rank` of `world_size` holds, int32."""
    return positions_of_rank(rank, world_size, cu_seqlens.tolist()).to(torch.int32)
