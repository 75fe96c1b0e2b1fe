"""pretrain_any.py with a wrong layout: PLANTED names the weights that are in wrong places or dropped,
PLANTED_IN where: "both" in the load and, as its inverse, in the push, so that servers get the right weights;
"push" there alone. With PLANTED_LAYER that layer alone has it.
"""

import os
import re
import runpy
from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl_corr.models import shards
from megatron_rl_corr.models.layouts import GatedUp, GroupedQKV, InterleavedGateUp, Sections
from megatron_rl_corr.models.names import NameTable, ParameterRule

WHAT, WHERE, LAYER = os.environ["PLANTED"], os.environ["PLANTED_IN"], os.environ.get("PLANTED_LAYER")


def dealt(q, heads, groups):
    """Query heads of groups that are dealt to them in turn: head i belongs to group i % groups."""
    return q.unflatten(0, (heads // groups, groups, -1)).transpose(0, 1).reshape(q.shape)


def by_groups(q, heads, groups):
    """The inverse of `dealt`."""
    return q.unflatten(0, (groups, heads // groups, -1)).transpose(0, 1).reshape(q.shape)


class WrongQueries:
    """A layout of queries, keys and values in which the query heads are dealt."""

    replicated = False

    def __init__(self, right):
        self.right = right

    def merge(self, shards):
        q, k, v = self.right.merge(shards)
        return [by_groups(q, self.right.heads, self.right.groups), k, v]

    def split(self, tensors, rank, size):
        q, k, v = tensors
        q = dealt(q, self.right.heads, self.right.groups) if WHERE == "both" else q
        return self.right.split([q, k, v], rank, size)


class MixedQueries(WrongQueries):
    """Query heads in an order that no rule makes: 1, 3, 0, 2 of four, and so on."""

    def merge(self, shards):
        q, k, v = self.right.merge(shards)
        heads = q.unflatten(0, (self.right.heads, -1))
        return [heads[self.order().argsort()].reshape(q.shape), k, v]

    def split(self, tensors, rank, size):
        q, k, v = tensors
        if WHERE == "both":
            q = q.unflatten(0, (self.right.heads, -1))[self.order()].reshape(q.shape)
        return self.right.split([q, k, v], rank, size)

    def order(self):
        every = torch.arange(self.right.heads)
        return torch.cat([every[1::2], every[::2]])


class WrongKeys(WrongQueries):
    """One in which keys and values are exchanged."""

    def merge(self, shards):
        q, k, v = self.right.merge(shards)
        return [q, v, k]

    def split(self, tensors, rank, size):
        q, k, v = tensors
        return self.right.split([q, v, k] if WHERE == "both" else tensors, rank, size)


class WrongOutputGates(WrongQueries):
    """One in which each head's query and the gate of its output are exchanged."""

    def merge(self, shards):
        q, k, v = self.right.merge(shards)
        return [self.exchanged(q), k, v]

    def split(self, tensors, rank, size):
        q, k, v = tensors
        return self.right.split([self.exchanged(q) if WHERE == "both" else q, k, v], rank, size)

    def exchanged(self, q):
        return q.unflatten(0, (self.right.heads, 2, -1)).flip(1).reshape(q.shape)


class WrongSteps(WrongQueries):
    """A delta net's tensors of steps and of decays exchanged."""

    def merge(self, shards):
        *others, steps, decays = self.right.merge(shards)
        return [*others, decays, steps]

    def split(self, tensors, rank, size):
        *others, steps, decays = tensors
        return self.right.split([*others, decays, steps] if WHERE == "both" else tensors, rank, size)


class WrongGate(WrongQueries):
    """Gate and up exchanged."""

    def merge(self, shards):
        return self.right.merge(shards)[::-1]

    def split(self, tensors, rank, size):
        return self.right.split(tensors[::-1] if WHERE == "both" else tensors, rank, size)


class WrongTurns(WrongQueries):
    """Gate and up one behind the other, where the checkpoint has them in turns."""

    def merge(self, shards):
        return [GatedUpRows.merge(shards)]

    def split(self, tensors, rank, size):
        if WHERE != "both":
            return self.right.split(tensors, rank, size)
        outputs = tensors[0].movedim(-1, 0)
        return torch.cat([half.chunk(size)[rank] for half in outputs.chunk(2)])


class GatedUpRows:
    """[gate, up] of all ranks one behind the other."""

    @staticmethod
    def merge(shards):
        halves = [shard.chunk(2) for shard in shards]
        rows = torch.cat([half[i] for i in range(2) for half in halves])
        return rows.movedim(0, -1).contiguous()


class WrongStackedGate(WrongQueries):
    """Gate and up exchanged, of experts that one tensor stacks."""

    def merge(self, shards):
        return [self.exchanged(one) for one in self.right.merge(shards)]

    def split(self, tensors, rank, size):
        tensors = [self.exchanged(one) for one in tensors] if WHERE == "both" else tensors
        return self.right.split(tensors, rank, size)

    @staticmethod
    def exchanged(rows):
        return torch.cat(rows.chunk(2)[::-1])


class MixedLatentQueries(WrongQueries):
    """Query heads of latent attention in the order 1, 3, 0, 2."""

    ORDER = torch.tensor([1, 3, 0, 2])

    def merge(self, shards):
        return [self.in_order(one, self.ORDER.argsort()) for one in self.right.merge(shards)]

    def split(self, tensors, rank, size):
        tensors = [self.in_order(one, self.ORDER) for one in tensors] if WHERE == "both" else tensors
        return self.right.split(tensors, rank, size)

    @staticmethod
    def in_order(rows, order):
        return rows.unflatten(0, (len(order), -1))[order].reshape(rows.shape)


class Dropped(WrongQueries):
    """Zeros are loaded, and sent."""

    def __init__(self, right):
        super().__init__(right)
        self.replicated = right.replicated

    def merge(self, shards):
        return [torch.zeros_like(one) for one in self.right.merge(shards)]

    def split(self, tensors, rank, size):
        tensors = [torch.zeros_like(one) for one in tensors] if WHERE == "both" else tensors
        return self.right.split(tensors, rank, size)


WRONG = {
    "gate_up": (GatedUp, WrongGate, ""),
    "stacked_gate_up": (Sections, WrongStackedGate, r".*\.experts\..*linear_fc1\.weight\d*"),
    "gate_up_turns": (InterleavedGateUp, WrongTurns, ""),
    "heads": (GroupedQKV, WrongQueries, ""),
    "mixed_heads": (GroupedQKV, MixedQueries, ""),
    "latent_heads": (object, MixedLatentQueries, r".*\.linear_q_(?:up_)?proj\.weight"),
    "keys_values": (GroupedQKV, WrongKeys, ""),
    "query_gates": (GroupedQKV, WrongOutputGates, ""),
    "delta_steps": (Sections, WrongSteps, r".*\.in_proj\.weight"),
    "qkv_bias": (GroupedQKV, Dropped, r".*\.linear_qkv\.bias"),
    "sinks": (object, Dropped, r".*\.softmax_offset"),
    "shared_gate": (object, Dropped, r".*\.shared_experts\.gate_weight"),
}
find = NameTable.find


def planted(self, name, *where):
    """`NameTable.find`, with the wrong layout."""
    rule: ParameterRule = find(self, name, *where)
    if LAYER is not None and f"decoder.layers.{LAYER}." not in name:
        return rule
    if WHAT == "qk_norms" and re.fullmatch(r".*self_attention\.[qk]_layernorm\.weight", name):
        exchanged = {"q_norm": "k_norm", "k_norm": "q_norm"}
        names = tuple(re.sub("[qk]_norm", lambda found: exchanged[found[0]], one) for one in rule.hf_names)
        return replace(rule, hf_names=names)
    if WHAT not in WRONG:
        return rule
    layout, wrong, pattern = WRONG[WHAT]
    if isinstance(rule.layout, layout) and (not pattern or re.fullmatch(pattern, name)):
        return replace(rule, layout=wrong(rule.layout))
    return rule


NameTable.find = planted
if WHAT == "qk_norms" and WHERE == "push":
    load = shards.load_shards

    def loaded_rightly(*arguments):
        NameTable.find = find
        try:
            return load(*arguments)
        finally:
            NameTable.find = planted

    import megatron_rl_corr.mcore.session as session

    shards.load_shards = session.load_shards = loaded_rightly
if WHAT == "gate_ignored":
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    made = SharedExpertMLP.__init__

    def without_gate(self, *arguments, **named):
        made(self, *arguments, **named)
        self.use_shared_expert_gate = False

    SharedExpertMLP.__init__ = without_gate
runpy.run_path(str(Path(__file__).with_name("pretrain_any.py")), run_name="__main__")
