"""DotProductAttention by torch's scaled_dot_product_attention, masked by position.

t positions of this rank, T = cp * t of all context-parallel ranks, batch b, heads h, groups g of
keys and values.
"""

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from tools.cpu.attention import attend, within
from transformer_engine.pytorch.attention.positions import positions_of_rank
from transformer_engine.pytorch.distributed import Exchange, gather_along_first_dim, size_of
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, refuse_on_a_cpu


def _forgive_missing_state(module, incompatible_keys) -> None:
    """Megatron's sharded checkpoints leave out the attention's extra state; the real layer
    forgives it too.
    """
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if not key.endswith("core_attention._extra_state")]


class DotProductAttention(TransformerEngineBaseModule):
    """Causal or full attention of [t, b, h, d], or of packed sequences [t, h, d]."""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        bottom_right_diagonal=None,
        softcap=0.0,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
        name=None,
    ):
        super().__init__(name)
        refuse_on_a_cpu(
            window_size=window_size is not None and window_size[1] not in (-1, 0),
            softcap=softcap,
            softmax_type=softmax_type == "off-by-one",
            return_max_logit=return_max_logit,
        )
        self._join(tp_group, tp_size)
        self.window_size, self.softmax_offset = window_size, None
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads // tp_size))
        self.qkv_format, self.attn_mask_type, self.layer_number = qkv_format, attn_mask_type, layer_number
        self.attention_dropout, self.get_rng_state_tracker = attention_dropout, get_rng_state_tracker
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = 1 / math.sqrt(channels) if softmax_scale is None else softmax_scale
        self.register_load_state_dict_post_hook(_forgive_missing_state)

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p") -> None:
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def forward(
        self,
        query_layer=None,
        key_layer=None,
        value_layer=None,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        bottom_right_diagonal=None,
        softcap=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
        bf16_backward=False,
        num_splits=1,
        **others,
    ) -> Tensor:
        kind, layout = attn_mask_type or self.attn_mask_type, qkv_format or self.qkv_format
        refuse_on_a_cpu(
            core_attention_bias=core_attention_bias is not None,
            softcap=softcap,
            qkv_format=layout not in ("sbhd", "thd"),
            **{name: value is not None for name, value in others.items()},
        )
        packed, size = layout == "thd", size_of(self.cp_group)
        assert not packed or kind.startswith("padding"), f"packed sequences take a padding mask, got {kind}"
        q, k, v = (x[:, None] if packed else x for x in (query_layer, key_layer, value_layer))
        if size > 1:
            k, v = (Exchange.apply(x, self.cp_group, gather_along_first_dim) for x in (k, v))
        if packed:
            starts = (cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded).tolist()
            lengths = cu_seqlens_q.diff().tolist()
        else:
            starts, lengths = [0, size * len(q)], [size * len(q)]
        visible, real = self._visible(starts, lengths, len(q), len(k), causal="causal" in kind)
        if not packed and kind in ("padding", "padding_causal", "arbitrary"):
            visible = visible & ~attention_mask  # True is masked; [b, 1, 1 or t, T]
        dropped = self.attention_dropout if self.training else 0.0
        states = (
            self.get_rng_state_tracker().fork() if dropped and self.get_rng_state_tracker else nullcontext()
        )
        with states:
            out = attend(
                *(x.permute(1, 2, 0, 3) for x in (q, k, v)),
                visible | ~real[:, None],  # a row that sees nothing would be NaN
                sinks=self.softmax_offset,
                dropout_p=dropped,
                scale=self.softmax_scale,
            )
        out = torch.where(real[:, None], out, 0.0).permute(2, 0, 1, 3).flatten(2)
        return out[:, 0] if packed else out

    def _visible(self, starts, lengths, queries: int, keys: int, *, causal: bool) -> tuple[Tensor, Tensor]:
        """[t, T] the key is of the query's sequence, no padding, and not after the query; [t] the
        query is no padding.

        starts: where sequences begin, padding included, and the end of the last; lengths: without padding.
        """
        size = size_of(self.cp_group)
        rank = self.cp_group.rank() if size > 1 else 0
        own = positions_of_rank(rank, size, starts)
        all_ = torch.cat([positions_of_rank(at, size, starts) for at in range(size)])
        sequence = torch.bucketize(torch.arange(starts[-1]), torch.tensor(starts[1:]), right=True)
        real = torch.arange(starts[-1]) - torch.tensor(starts)[sequence] < torch.tensor(lengths)[sequence]
        visible = (sequence[own][:, None] == sequence[all_]) & real[all_]
        if causal:
            visible &= all_ <= own[:, None]
        if self.window_size is not None and self.window_size[0] >= 0:
            visible &= within(self.window_size[0], own, all_)
        # What lies behind the last sequence belongs to none.
        behind = queries - len(own)
        assert not behind or size == 1, "positions behind the last sequence, under context parallelism"
        pad = torch.nn.functional.pad
        return pad(visible, (0, keys - len(all_), 0, behind)), pad(real[own], (0, behind))
