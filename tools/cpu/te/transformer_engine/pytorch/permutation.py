"""Tokens to the order of their experts and back, by a routing map [tokens, experts].

row_id_map, which the real functions make for each other, is here the chosen places of the map
[experts, tokens], flat.
"""

import torch
from torch import Tensor


def _chosen(routing_map: Tensor, num_out_tokens) -> Tensor:
    places = routing_map.bool().t().reshape(-1).nonzero()[:, 0]
    return places if num_out_tokens in (None, -1) else places[:num_out_tokens]


def moe_permute(inp: Tensor, routing_map: Tensor, num_out_tokens, max_token_num=-1, map_type="mask"):
    """[t, H] -> [t', H], expert by expert; and row_id_map."""
    assert map_type == "mask"
    places = _chosen(routing_map, num_out_tokens)
    return inp.index_select(0, places % len(routing_map)), places


def moe_permute_with_probs(inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens):
    """moe_permute, with each row's probability [t'] in the middle."""
    rows, places = moe_permute(inp, routing_map, num_out_tokens)
    return rows, probs.t().reshape(-1)[places], places


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs=None,
    restore_shape=None,
    map_type="mask",
    probs=None,
    pad_offsets=None,
):
    """[t', H] -> [t, H]: the sum of each token's rows, weighed by merging_probs [t, E] if given."""
    assert map_type == "mask" and pad_offsets is None
    weights = probs if merging_probs is None else merging_probs
    if weights is not None:
        inp = inp * weights.t().reshape(-1)[row_id_map][:, None]
    return inp.new_zeros(restore_shape).index_add(0, row_id_map % restore_shape[0], inp)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """The chunks of inp's first dimension in another order."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[at] for at in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
):
    """The same of rows and of their probabilities."""
    return (
        moe_sort_chunks_by_index(inp, split_sizes, sorted_index),
        moe_sort_chunks_by_index(probs, split_sizes, sorted_index),
    )


def moe_permute_and_pad_with_probs(inp, probs, routing_map, tokens_per_expert, align_size):
    """With each expert's rows padded, as fp8 wants them."""
    raise NotImplementedError("rows padded for fp8 need a GPU")
