"""Weights in wrong places, each as a change of the trainer's model that would put them right.

A loader may take gate for up, or key heads for value heads, and its inverse sends servers the right weights:
then a trainer computes otherwise than its servers although every checksum fits. Each change here is of
Megatron's own parameters, as Megatron reads them, and asks no table of names: a wrong one would hide itself.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl_corr.features.ledger.parts import part_of
from megatron_rl_corr.models.hybrid import layers_per_block
from megatron_rl_corr.models.megatron_flags import DELTA_NETS
from megatron_rl_corr.models.shards import LocalParameter
from megatron_rl_corr.reduce.collectives import all_gather_stacked, collective
from megatron_rl_corr.reduce.layout import Layout

GATED = r".*\.linear_fc1\.(?:weight|bias)\d*"
GATED_EXPERTS = r".*\.experts\.(?:.*\.)?linear_fc1\.(?:weight|bias)\d*"
GATED_SHARED = r".*\.shared_experts\.linear_fc1\.(?:weight|bias)"
QKV = r".*\.linear_qkv\.(?:weight|bias)"
MODULES = {
    "queries": "self_attention.core_attention",
    "attention": "self_attention",
    "mlp": "mlp",
}
"""Second word of a cause -> a layer's module, where what is wrong is none of the layouts that are known."""
SHARED = r".*\.shared_experts\.linear_fc2\.weight"


@dataclass(frozen=True)
class Move:
    """What becomes of the parameters of a name.

    Example, rows [gate, up] of each rank in the other order: Move(GATED, exchanged_halves).
    """

    pattern: str
    """Regular expression for the whole local name."""
    moved: Callable[[Tensor], Tensor]
    """moved(parameter): another one of its shape."""
    rows: int | None = None
    """Rows of the whole parameter, which is gathered over the tensor-parallel ranks where one has fewer;
    None: each rank moves its own.
    """


@dataclass(frozen=True)
class WrongLayout:
    """One way in which weights may be in wrong places."""

    moves: tuple[Move, ...] = ()
    exchanged: tuple[str, str] | None = None
    """Ends of the local names of two parameters of a layer that change places."""
    ungated: bool = False
    """Shared experts count whole, without their gate."""


@dataclass(frozen=True)
class MovedParts:
    """Layers of the model with their weights in other places."""

    parameters: Sequence[LocalParameter]
    layout: Layout
    wrong: WrongLayout
    _moves: list[tuple[re.Pattern[str], Move]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._moves.extend((re.compile(one.pattern), one) for one in self.wrong.moves)

    @contextmanager
    @torch.no_grad()
    @collective
    def changed(self, parts: Collection[str], chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Within, these layers are changed; after, they are byte for byte as before. Every rank of a
        tensor-parallel group calls it.
        """
        chosen = [one for one in self.parameters if part_of(one) in parts]
        held: list[tuple[Tensor, Tensor]] = []
        gates = _gated_experts(parts, chunks) if self.wrong.ungated else []
        try:
            for live, value in [*self._moved(chosen), *self._exchanged(chosen)]:
                held.append((live, live.to("cpu", copy=True)))
                live.copy_(value)
            for one in gates:
                one.use_shared_expert_gate = False
            yield
        finally:
            for one in gates:
                one.use_shared_expert_gate = True
            for live, own in held:
                live.copy_(own)

    @collective
    def _moved(self, chosen: Sequence[LocalParameter]) -> Iterator[tuple[Tensor, Tensor]]:
        for one in chosen:
            move = next((move for pattern, move in self._moves if pattern.fullmatch(one.local_name)), None)
            if move is None:
                continue
            live = one.tensor.detach()
            if move.rows is None or live.shape[0] == move.rows:
                yield live, move.moved(live)
                continue
            shard = self.layout.shard
            whole = all_gather_stacked(live.contiguous(), self.layout.tp_group).flatten(0, 1)
            yield live, move.moved(whole).chunk(shard.tp_size)[shard.tp_rank]

    def _exchanged(self, chosen: Sequence[LocalParameter]) -> Iterator[tuple[Tensor, Tensor]]:
        first, second = self.wrong.exchanged or ("", "")
        by_name = {one.local_name: one.tensor.detach() for one in chosen if first}
        for name, live in by_name.items():
            other = by_name.get(name.removesuffix(first) + second) if name.endswith(first) else None
            if other is not None:
                own = live.clone()
                yield live, other.clone()
                yield other, own


@contextmanager
def silenced(kind: str, layer: str, chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Within, one layer's queries, its attention or its MLP are zeros; without queries it attends to all
    tokens alike.

    A trainer may have there what is unlike any change that is known, as query heads in an order of their own:
    e is what it adds and, unrelated, what it lacks, so that about half of its square lies along d.
    """
    with ExitStack() as hooks:
        for one in _layers((layer,), chunks):
            modules = dict(one.named_modules())
            module = modules.get(MODULES[kind])
            if module is None:  # one layer of a HybridModel has one of them
                continue
            of = module.register_forward_pre_hook(_no_queries) if kind == "queries" else None
            hooks.enter_context(of or module.register_forward_hook(_zeros))
        yield


def _no_queries(module: nn.Module, given: tuple) -> tuple:
    return (torch.zeros_like(given[0]), *given[1:])


def _zeros(module: nn.Module, given: tuple, made: Any) -> Any:
    if isinstance(made, tuple):
        return tuple(_zeros(module, given, one) for one in made)
    return torch.zeros_like(made) if isinstance(made, Tensor) else made


def layouts_of(args: argparse.Namespace, config: Any) -> dict[str, WrongLayout]:
    """Name of a cause -> what is tried of a model, the same on all ranks.

    Args:
        args: Megatron's, of which the rotated share of a head is read.
        config: the model's TransformerConfig.
    """
    found = {}
    if config.gated_linear_unit:
        found["layout/gate_up"] = WrongLayout((Move(GATED, exchanged_halves),))
        found["layout/gate_up_turns"] = WrongLayout((Move(GATED, taken_apart),))
        if config.num_moe_experts and vars(config).get("moe_shared_expert_intermediate_size"):
            # checkpoints that stack routed experts have shared ones in tensors of their own
            found["layout/gate_up_experts"] = WrongLayout((Move(GATED_EXPERTS, exchanged_halves),))
            found["layout/gate_up_shared"] = WrongLayout((Move(GATED_SHARED, exchanged_halves),))
    attention = _latent if config.multi_latent_attention else _grouped
    if vars(config).get("attention_output_gate"):
        attention = _gated
    found |= attention(args, config)
    if vars(config).get("experimental_attention_variant") == DELTA_NETS:
        found |= _delta_net(args, config)
    if config.qk_layernorm and not config.multi_latent_attention:
        found["layout/qk_norms"] = WrongLayout(exchanged=("q_layernorm.weight", "k_layernorm.weight"))
    found |= {f"without/{name}": one for name, one in _without(config).items()}
    return found


def _grouped(args: argparse.Namespace, config: Any) -> dict[str, WrongLayout]:
    heads, groups, size = config.num_attention_heads, config.num_query_groups, config.kv_channels
    each, rows = heads // groups, (heads + 2 * groups) * size

    def by_group(change: Callable[[Tensor], Tensor]) -> WrongLayout:
        """change: of [groups, queries of one + 2, head size, ...]."""

        def moved(whole: Tensor) -> Tensor:
            grouped = whole.view(groups, each + 2, size, *whole.shape[1:])
            return change(grouped).reshape(whole.shape)

        return WrongLayout((Move(QKV, moved, rows),))

    def dealt(grouped: Tensor, first: int, second: int) -> Tensor:
        queries = grouped[:, :each].flatten(0, 1).unflatten(0, (first, second)).transpose(0, 1)
        return torch.cat([queries.reshape(groups, each, *grouped.shape[2:]), grouped[:, each:]], dim=1)

    def behind(grouped: Tensor) -> Tensor:
        q, k, v = grouped.reshape(heads + 2 * groups, *grouped.shape[2:]).split([heads, groups, groups])
        return torch.cat([q.unflatten(0, (groups, each)), k[:, None], v[:, None]], dim=1)

    def rotated(turn: Callable[[Tensor], Tensor], grouped: Tensor) -> Tensor:
        count = int(size * args.rotary_percent)
        turned = turn(grouped[:, :-1, :count].movedim(2, 0)).movedim(0, 2)
        queries_keys = torch.cat([turned, grouped[:, :-1, count:]], dim=2)
        return torch.cat([queries_keys, grouped[:, -1:]], dim=1)

    found = {
        "layout/keys_values": by_group(lambda one: one[:, [*range(each), each + 1, each]]),
        "layout/qkv_behind": by_group(behind),
        "layout/rotary_pairs": by_group(partial(rotated, taken_apart)),
        "layout/rotary_halves": by_group(partial(rotated, taking_turns)),
    }
    if 1 < groups < heads:
        found["layout/heads_dealt"] = by_group(partial(dealt, first=groups, second=each))
        if groups != each:
            found["layout/heads_grouped"] = by_group(partial(dealt, first=each, second=groups))
    return found


def _gated(args: argparse.Namespace, config: Any) -> dict[str, WrongLayout]:
    """Groups of query heads, as many gates of their outputs, a key head and a value head."""
    heads, groups, size = config.num_attention_heads, config.num_query_groups, config.kv_channels
    each = heads // groups

    def by_group(order: Sequence[int]) -> WrongLayout:
        def moved(whole: Tensor) -> Tensor:
            return whole.unflatten(0, (groups, 2 * each + 2, size))[:, list(order)].reshape(whole.shape)

        return WrongLayout((Move(QKV, moved, 2 * (heads + groups) * size),))

    queries, gates, last = range(each), range(each, 2 * each), (2 * each, 2 * each + 1)
    turns = [*range(0, 2 * each, 2), *range(1, 2 * each, 2)]
    found = {
        "layout/keys_values": by_group([*queries, *gates, *last[::-1]]),
        "layout/query_gates": by_group([*gates, *queries, *last]),
    }
    return found | ({"layout/query_gate_turns": by_group([*turns, *last])} if each > 1 else {})


def _delta_net(args: argparse.Namespace, config: Any) -> dict[str, WrongLayout]:
    """Sections of a delta net's projection, of each of which a rank has its share, that change places."""
    ranks, heads = args.tensor_model_parallel_size, config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim // ranks
    values = heads * config.linear_value_head_dim // ranks
    sections = [keys, keys, values, values, heads // ranks, heads // ranks]

    def exchanged(first: int) -> WrongLayout:
        def moved(rows: Tensor) -> Tensor:
            parts = list(rows.split(sections))
            parts[first : first + 2] = parts[first : first + 2][::-1]
            return torch.cat(parts)

        return WrongLayout((Move(r".*\.self_attention\.in_proj\.weight", moved),))

    names = {"delta_keys": 0, "delta_gates": 2, "delta_steps": 4}
    return {f"layout/{name}": exchanged(first) for name, first in names.items()}


def _latent(args: argparse.Namespace, config: Any) -> dict[str, WrongLayout]:
    heads, plain, rotated = config.num_attention_heads, config.qk_head_dim, config.qk_pos_emb_head_dim
    values, latent = config.v_head_dim, config.kv_lora_rank

    def kept_and(kept: int, turn: Callable[[Tensor], Tensor], count: int, whole: Tensor) -> Tensor:
        """The last rows of each of `count` blocks turned, the first ones kept."""
        blocks = whole.view(count, -1, *whole.shape[1:])
        turned = turn(blocks[:, kept:].movedim(1, 0)).movedim(0, 1)
        return torch.cat([blocks[:, :kept], turned], dim=1).reshape(whole.shape)

    def of_rotated(turn: Callable[[Tensor], Tensor]) -> WrongLayout:
        queries = partial(kept_and, plain, turn, heads)
        keys = partial(kept_and, latent, turn, 1)
        return WrongLayout(
            (
                Move(r".*\.linear_q_up_proj\.weight", queries, heads * (plain + rotated)),
                Move(r".*\.linear_kv_down_proj\.weight", keys, latent + rotated),
            )
        )

    def behind(whole: Tensor) -> Tensor:
        keys, of_values = whole.split([heads * plain, heads * values])
        return torch.cat([keys.unflatten(0, (heads, -1)), of_values.unflatten(0, (heads, -1))], 1).flatten(
            0, 1
        )

    return {
        "layout/rotary_pairs": of_rotated(taken_apart),
        "layout/rotary_halves": of_rotated(taking_turns),
        "layout/kv_behind": WrongLayout(
            (Move(r".*\.linear_kv_up_proj\.weight", behind, heads * (plain + values)),)
        ),
    }


def _without(config: Any) -> dict[str, WrongLayout]:
    """Parts that a side may leave out: biases of zero, sinks that no score goes to, shared experts."""
    settings, found = vars(config), {}
    if config.add_qkv_bias or config.add_bias_linear:
        found["qkv_bias"] = WrongLayout((Move(r".*\.linear_qkv\.bias", torch.zeros_like),))
    if config.add_bias_linear:
        found["output_bias"] = WrongLayout((Move(r".*\.linear_proj\.bias", torch.zeros_like),))
        found["mlp_bias"] = WrongLayout((Move(r".*\.linear_fc[12]\.bias\d*", torch.zeros_like),))
    if config.num_moe_experts and config.add_bias_linear:
        found["router_bias"] = WrongLayout((Move(r".*\.router\.bias", torch.zeros_like),))
    if settings.get("softmax_type") == "learnable":
        found["sinks"] = WrongLayout((Move(r".*\.softmax_offset", unreachable),))
    if settings.get("moe_shared_expert_intermediate_size"):
        found["shared_experts"] = WrongLayout((Move(SHARED, torch.zeros_like),))
    if settings.get("moe_shared_expert_gate"):
        found["shared_gate"] = WrongLayout(ungated=True)
    return found


def exchanged_halves(rows: Tensor) -> Tensor:
    """[a, b] -> [b, a], of halves along dimension 0."""
    return torch.cat(rows.chunk(2)[::-1])


def taken_apart(rows: Tensor) -> Tensor:
    """[a0, b0, a1, b1] -> [a0, a1, b0, b1] along dimension 0."""
    return torch.cat([rows[::2], rows[1::2]])


def taking_turns(rows: Tensor) -> Tensor:
    """[a0, a1, b0, b1] -> [a0, b0, a1, b1] along dimension 0, the inverse of `taken_apart`."""
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def unreachable(scores: Tensor) -> Tensor:
    """The least number of their type, of which a softmax makes 0."""
    return torch.full_like(scores, torch.finfo(scores.dtype).min)


def _gated_experts(parts: Collection[str], chunks: Sequence[nn.Module]) -> list[nn.Module]:
    """Shared experts with a gate, of these layers."""
    modules = (one for layer in _layers(parts, chunks) for one in layer.modules())
    return [one for one in modules if vars(one).get("use_shared_expert_gate")]


def _layers(parts: Collection[str], chunks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The layers of these numbers that this rank has, of chunks in any wrappers."""
    inner = (one for chunk in chunks for one in chunk.modules() if "decoder" in dict(one.named_children()))
    for chunk in inner:
        block = layers_per_block(chunk)
        for layer in chunk.decoder.layers:
            if str((layer.layer_number - 1) // block) in parts:
                yield layer
