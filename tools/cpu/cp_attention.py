"""Causal attention over context-parallel ranks and packed sequences, within a window and with sinks, for
Megatron's local spec and for tests.

Local tokens t (of T = cp * t), batch b, heads h, key-value heads g, head size d.

The local spec's own attention takes neither context parallelism nor packed sequences; Transformer Engine's,
which takes both, needs a GPU. This one gathers the keys and values of all ranks and masks by position.
"""

import itertools
import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention

from megatron_rl_corr.reduce.context import zigzag_positions
from tools.cpu.attention import attend, within


class _AllGatherTokens(torch.autograd.Function):
    """[t, ...] -> [T, ...], rank after rank; backward sums over the ranks and takes this rank's part."""

    @staticmethod
    def forward(ctx, local: torch.Tensor, group) -> torch.Tensor:
        ctx.group = group
        gathered = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        local = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)
        return local, None


class ContextParallelAttention(MegatronModule):
    """A `core_attention` for `get_gpt_layer_local_spec`, with DotProductAttention's arguments."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
        model_comm_pgs=None,  # what 0.14 calls it
    ) -> None:
        super().__init__(config=config)
        pg_collection = pg_collection or model_comm_pgs
        assert attn_mask_type.name in ("causal", "padding_causal"), f"only causal masks, got {attn_mask_type}"
        self.group = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window, self.softmax_offset = _window(config, layer_number), None
        if vars(config).get("softmax_type") == "learnable":  # before 0.15 there are no sinks
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            config.init_method(self.softmax_offset)

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """query [t, b, h, d], key and value [t, b, g, d] -> [t, b, h * d]; packed: the same without b."""
        assert attention_bias is None, "attention_bias is not supported here"
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        tokens, size = query.shape[0], self.group.size()
        if size > 1:
            key, value = _AllGatherTokens.apply(key, self.group), _AllGatherTokens.apply(value, self.group)
        boundaries = _boundaries(packed_seq_params) if packed else [0, size * tokens]
        if size == 1 and self.window is None and self.softmax_offset is None:
            # a sequence by itself, as no other is seen
            parts = [
                self._causal(query[a:b], key[a:b], value[a:b]) for a, b in itertools.pairwise(boundaries)
            ]
            out = torch.cat(parts)
            return out.squeeze(1) if packed else out
        out = attend(
            *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)),
            self._visible(boundaries),
            sinks=self.softmax_offset,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
        )
        out = out.permute(2, 0, 1, 3).flatten(2)
        return out.squeeze(1) if packed else out

    def _causal(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Of one sequence's tokens, all of which this rank has."""
        out = scaled_dot_product_attention(
            *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)),
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _visible(self, boundaries: list[int]) -> torch.Tensor:
        """[t, T] bool: the key is of the query's sequence, and not after it."""
        rank, size = self.group.rank(), self.group.size()
        queries = zigzag_positions(rank, size, boundaries)
        keys = torch.cat([zigzag_positions(r, size, boundaries) for r in range(size)])
        sequence = torch.bucketize(torch.arange(boundaries[-1]), torch.tensor(boundaries[1:]), right=True)
        same = sequence[queries][:, None] == sequence[keys][None, :]
        visible = same & (keys[None, :] <= queries[:, None])
        return visible if self.window is None else visible & within(self.window, queries, keys)


def _window(config, layer_number: int) -> int | None:
    """Positions before its own that a query of this layer sees; None: all. Layers count from 1."""
    if not config.window_size:
        return None
    skip = vars(config).get("window_attn_skip_freq")  # before 0.15 all layers have a window
    if isinstance(skip, int):
        full = layer_number % skip == 0
    else:
        full = skip is not None and not skip[layer_number - 1]
    return None if full else config.window_size[0]


def _boundaries(packed_seq_params) -> list[int]:
    padded = packed_seq_params.cu_seqlens_q_padded
    return (packed_seq_params.cu_seqlens_q if padded is None else padded).tolist()
