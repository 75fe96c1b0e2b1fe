"""Attention within a window and with sinks, by torch: what both of a CPU's core attentions compute with.

Batch b, heads h, groups g of keys and values, queries t, keys T, head size d.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from tools.cpu import batch_invariant


def within(left: int, queries: Tensor, keys: Tensor) -> Tensor:
    """[t, T] bool: the key lies at most `left` positions before the query. Positions: [t], [T]."""
    return queries[:, None] - keys[None, :] <= left


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    *,
    sinks: Tensor | None,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """Softmax over the visible keys and, where there are sinks, one more score of each head without a value.

    Args:
        query: [b, h, t, d]; key, value: [b, g, T, d].
        visible: bool, [t, T] or [b, 1, 1 or t, T].
        sinks: [h], or None.

    Returns:
        [b, h, t, d].
    """
    if batch_invariant.is_on() and not dropout_p:
        shape = (len(query), 1, query.shape[2], key.shape[2])
        return batch_invariant.attend_rows(query, key, value, visible.expand(shape), scale, sinks)
    mask = visible
    if sinks is not None:
        # One more key, of zeros, whose score is what the mask adds.
        heads, queries = query.shape[1:3]
        scores = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, -torch.inf)
        scores = scores.expand(*scores.shape[:-3], heads, queries, -1)
        last = sinks.to(query.dtype).view(heads, 1, 1).expand(*scores.shape[:-1], 1)
        mask = torch.cat([scores, last], dim=-1)
        key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout_p,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
