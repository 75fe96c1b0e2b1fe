"""Weights in wrong places: each change puts right what a wrong loader did, worked out row by row."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_rl_corr.core.ledger_verdict import LAYOUTS, cause_lines
from megatron_rl_corr.features.ledger.layouts import (
    MovedParts,
    WrongLayout,
    exchanged_halves,
    layouts_of,
    silenced,
    taken_apart,
    taking_turns,
)
from megatron_rl_corr.models.shards import LocalParameter

ARGS = SimpleNamespace(rotary_percent=1.0)
ONE = SimpleNamespace(shard=SimpleNamespace(tp_rank=0, tp_size=1), tp_group=None)


def config(**changes):
    return SimpleNamespace(
        **{
            "gated_linear_unit": True,
            "multi_latent_attention": False,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 2,
            "qk_layernorm": True,
            "add_qkv_bias": False,
            "add_bias_linear": False,
            "num_moe_experts": None,
        }
        | changes
    )


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


def moved(name, parameter, value, of=None, args=ARGS):
    """What a change makes of a parameter of this local name."""
    [move] = [one for one in layouts_of(args, of or config())[name].moves if _fits(one, parameter)]
    return move.moved(value)


def _fits(move, parameter):
    return re.fullmatch(move.pattern, parameter) is not None


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def test_gate_and_up_then_halves_change_places_and_turns_are_taken_apart():
    assert exchanged_halves(rows(1, 2, 11, 12)).tolist() == [11, 12, 1, 2]
    assert taken_apart(rows(1, 11, 2, 12)).tolist() == [1, 2, 11, 12]
    assert taking_turns(rows(1, 2, 11, 12)).tolist() == [1, 11, 2, 12]
    for name in (
        "decoder.layers.3.mlp.linear_fc1.weight",
        "decoder.layers.3.mlp.experts.linear_fc1.weight7",
        "decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.bias",
        "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
    ):
        assert moved("layout/gate_up", name, rows(1, 2, 11, 12)).tolist() == [11, 12, 1, 2]
    norm = "decoder.layers.3.mlp.linear_fc1.layer_norm_weight"
    assert not any(_fits(one, norm) for one in layouts_of(ARGS, config())["layout/gate_up"].moves)


def test_gate_and_up_when_there_are_shared_experts_then_of_either_kind_alone():
    mixed = config(num_moe_experts=4, moe_shared_expert_intermediate_size=8)
    routed = [
        "decoder.layers.3.mlp.experts.linear_fc1.weight7",
        "decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.bias",
    ]
    shared, dense = (f"decoder.layers.3.mlp.{part}linear_fc1.weight" for part in ("shared_experts.", ""))
    for cause, names, others in (
        ("layout/gate_up_experts", routed, [shared, dense]),
        ("layout/gate_up_shared", [shared], [*routed, dense]),
    ):
        for name in names:
            assert moved(cause, name, rows(1, 2, 11, 12), mixed).tolist() == [11, 12, 1, 2]
        [move] = layouts_of(ARGS, mixed)[cause].moves
        assert not any(_fits(move, name) for name in others)
    assert "layout/gate_up_experts" not in layouts_of(ARGS, config(num_moe_experts=4))


# Four query heads of two rows, two groups: q0 = 1, 2, q1 = 3, 4 (group 0), q2 = 5, 6, q3 = 7, 8 (group 1),
# k0 = 11, 12, k1 = 13, 14, v0 = 21, 22, v1 = 23, 24.
RIGHT = rows(1, 2, 3, 4, 11, 12, 21, 22, 5, 6, 7, 8, 13, 14, 23, 24)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("keys_values", rows(1, 2, 3, 4, 21, 22, 11, 12, 5, 6, 7, 8, 23, 24, 13, 14)),
        ("qkv_behind", rows(1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 21, 22, 23, 24)),
        # q0 and q2 are taken for group 0's
        ("heads_dealt", rows(1, 2, 5, 6, 11, 12, 21, 22, 3, 4, 7, 8, 13, 14, 23, 24)),
    ],
)
def test_queries_keys_and_values_in_wrong_places_then_put_right(name, wrong):
    assert moved(f"layout/{name}", QKV, wrong).tolist() == RIGHT.tolist()
    both = torch.stack([wrong, wrong + 100], dim=1)  # a weight of two inputs
    assert moved(f"layout/{name}", QKV, both)[:, 1].tolist() == (RIGHT + 100).tolist()


# Two query heads of one row in one group, their gates behind them, a key and a value.
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("keys_values", rows(1, 2, 31, 32, 21, 11)),
        ("query_gates", rows(31, 32, 1, 2, 11, 21)),
        ("query_gate_turns", rows(1, 31, 2, 32, 11, 21)),
    ],
)
def test_queries_with_gates_in_wrong_places_then_put_right(name, wrong):
    of = config(num_attention_heads=2, num_query_groups=1, kv_channels=1, attention_output_gate=True)
    assert moved(f"layout/{name}", QKV, wrong, of).tolist() == [1, 2, 31, 32, 11, 21]
    assert "layout/heads_dealt" not in layouts_of(ARGS, of) and "layout/rotary_pairs" not in layouts_of(
        ARGS, of
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        # queries 1, 2, keys 11, 12, values 21, 22, 23, their gates 31, 32, 33, steps 41, decays 51
        ("delta_keys", rows(11, 12, 1, 2, 21, 22, 23, 31, 32, 33, 41, 51)),
        ("delta_gates", rows(1, 2, 11, 12, 31, 32, 33, 21, 22, 23, 41, 51)),
        ("delta_steps", rows(1, 2, 11, 12, 21, 22, 23, 31, 32, 33, 51, 41)),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_sections_of_a_delta_net_in_wrong_places_then_put_right(name, wrong, ranks):
    """Each rank of two has as much as the one of one, of a model of twice the heads."""
    of = config(
        experimental_attention_variant="gated_delta_net",
        linear_num_key_heads=ranks,
        linear_key_head_dim=2,
        linear_num_value_heads=ranks,
        linear_value_head_dim=3,
    )
    args = SimpleNamespace(rotary_percent=1.0, tensor_model_parallel_size=ranks)
    name, parameter = f"layout/{name}", "decoder.layers.0.self_attention.in_proj.weight"
    assert moved(name, parameter, wrong, of, args).tolist() == (
        [1, 2, 11, 12, 21, 22, 23, 31, 32, 33, 41, 51]
    )


def test_query_heads_of_more_groups_than_heads_in_one_then_both_directions():
    # six heads of one row in three groups of two, k = 11.., v = 21..
    of = config(num_attention_heads=6, num_query_groups=3, kv_channels=1)
    right = rows(0, 1, 11, 21, 2, 3, 12, 22, 4, 5, 13, 23)
    # dealt: group g has heads g and g + 3
    dealt = rows(0, 3, 11, 21, 1, 4, 12, 22, 2, 5, 13, 23)
    assert moved("layout/heads_dealt", QKV, dealt, of).tolist() == right.tolist()
    assert moved("layout/heads_grouped", QKV, moved("layout/heads_dealt", QKV, right, of), of).tolist() == (
        right.tolist()
    )
    assert "layout/heads_grouped" not in layouts_of(ARGS, config())  # two groups of two: the same
    assert "layout/heads_dealt" not in layouts_of(ARGS, config(num_query_groups=4))  # each head its own


def test_rotated_dimensions_then_queries_and_keys_are_turned_and_values_stay():
    # one head of four dimensions, of which the first two pairs are (0, 2) and (1, 3) in halves
    of = config(num_attention_heads=1, num_query_groups=1, kv_channels=4)
    halves, pairs = (
        rows(0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23),
        rows(0, 2, 1, 3, 10, 12, 11, 13, 20, 21, 22, 23),
    )
    assert moved("layout/rotary_pairs", QKV, pairs, of).tolist() == halves.tolist()
    assert moved("layout/rotary_halves", QKV, halves, of).tolist() == pairs.tolist()
    half = SimpleNamespace(rotary_percent=0.5)  # the first two dimensions alone: as they are
    assert moved("layout/rotary_pairs", QKV, pairs, of, half).tolist() == pairs.tolist()


def test_latent_attention_then_rotated_rows_of_each_head_and_of_the_keys():
    of = config(
        multi_latent_attention=True,
        num_attention_heads=2,
        qk_head_dim=1,
        qk_pos_emb_head_dim=4,
        v_head_dim=2,
        kv_lora_rank=3,
    )
    queries = rows(100, 0, 2, 1, 3, 200, 10, 12, 11, 13)
    name = "decoder.layers.0.self_attention.linear_q_up_proj.weight"
    assert moved("layout/rotary_pairs", name, queries, of).tolist() == [100, 0, 1, 2, 3, 200, 10, 11, 12, 13]
    keys = rows(1, 2, 3, 30, 32, 31, 33)
    name = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    assert moved("layout/rotary_pairs", name, keys, of).tolist() == [1, 2, 3, 30, 31, 32, 33]
    # keys of both heads, then values of both; by heads: k0, v0, v0, k1, v1, v1
    name = "decoder.layers.0.self_attention.linear_kv_up_proj.weight"
    assert moved("layout/kv_behind", name, rows(1, 2, 11, 12, 13, 14), of).tolist() == [1, 11, 12, 2, 13, 14]


class Table:
    """Of names that no test here needs."""


def parameter(name, value):
    return LocalParameter(nn.Parameter(value), name, 4, 0, Table())


def test_layers_that_are_changed_then_these_alone_and_byte_for_byte_back():
    one, two = (parameter(f"decoder.layers.{n}.mlp.linear_fc1.weight", rows(1, 2)) for n in (0, 1))
    parts = MovedParts([one, two], ONE, layouts_of(ARGS, config())["layout/gate_up"])
    with parts.changed(("5",), []):  # layer 1 of a stage that begins with layer 4
        assert (one.tensor.tolist(), two.tensor.tolist()) == ([1, 2], [2, 1])
    assert (one.tensor.tolist(), two.tensor.tolist()) == ([1, 2], [1, 2])
    with pytest.raises(RuntimeError, match="within"), parts.changed(("4", "5"), []):
        raise RuntimeError("within")
    assert (one.tensor.tolist(), two.tensor.tolist()) == ([1, 2], [1, 2])


def test_norms_of_queries_and_keys_then_exchanged_within_a_layer():
    made = {
        f"decoder.layers.{n}.self_attention.{part}_layernorm.weight": rows(10 * n + add)
        for n in (0, 1)
        for part, add in (("q", 1), ("k", 2))
    }
    parameters = [parameter(name, value) for name, value in made.items()]
    with MovedParts(parameters, ONE, layouts_of(ARGS, config())["layout/qk_norms"]).changed(("4", "5"), []):
        assert [one.tensor.item() for one in parameters] == [2, 1, 12, 11]
    assert [one.tensor.item() for one in parameters] == [1, 2, 11, 12]


def test_parts_that_are_left_out_then_zeros_and_sinks_that_no_softmax_sees():
    of = config(
        add_qkv_bias=True,
        add_bias_linear=True,
        num_moe_experts=4,
        softmax_type="learnable",
        moe_shared_expert_intermediate_size=8,
        moe_shared_expert_gate=True,
    )
    found = layouts_of(ARGS, of)
    assert {name.partition("/")[2] for name in found if name.startswith("without/")} == {*LAYOUTS["without"]}
    scores = torch.tensor([0.0, moved("without/sinks", "core_attention.softmax_offset", rows(3), of).item()])
    assert scores.softmax(0).tolist() == [1, 0]
    assert moved("without/qkv_bias", "self_attention.linear_qkv.bias", rows(3, 4), of).tolist() == [0, 0]
    assert found["without/shared_gate"] == WrongLayout(ungated=True)


def wrapped_chunk(layers):
    """A chunk of these layers, from the first on, in a wrapper as DDP's."""
    for number, layer in enumerate(layers, start=1):
        layer.layer_number = number
    wrapper, chunk, decoder = nn.Module(), nn.Module(), nn.Module()
    decoder.layers, chunk.decoder, wrapper.module = nn.ModuleList(layers), decoder, chunk
    return wrapper


def test_module_that_gives_nothing_then_zeros_in_this_layer_and_all_as_before():
    class Core(nn.Module):
        def forward(self, query, key):
            return query + key

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.core_attention = Core()

        def forward(self, hidden):
            return self.core_attention(10 * hidden, hidden), None

    layers = []
    for _ in range(2):
        layer = nn.Module()
        layer.self_attention = Attention()
        layers.append(layer)
    chunk, hidden = wrapped_chunk(layers), torch.ones(1)

    def made():
        return [layer.self_attention(hidden)[0].item() for layer in layers]

    with silenced("attention", "1", [chunk]), silenced("mlp", "0", [chunk]):
        assert made() == [11, 0]
    with silenced("queries", "0", [chunk]):
        assert made() == [1, 11]
    assert made() == [11, 11]


def test_gate_of_shared_experts_then_left_out_in_the_layers_alone_that_are_changed():
    class Shared(nn.Module):
        use_shared_expert_gate = False

        def __init__(self):
            super().__init__()
            self.use_shared_expert_gate = True

    layers = [nn.ModuleList([Shared()]) for _ in range(2)]
    chunk = wrapped_chunk(layers)
    with MovedParts([], ONE, WrongLayout(ungated=True)).changed(("1",), [chunk]):
        assert [layer[0].use_shared_expert_gate for layer in layers] == [True, False]
    assert [layer[0].use_shared_expert_gate for layer in layers] == [True, True]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layout/gate_up/all", "90 % of the rest is as if servers had gate and up exchanged"),
        ("layout/heads_dealt/layer_2", "query heads by groups, not dealt to them in turn in layer 2"),
        (
            "without/sinks/layers_1-3",
            "90 % of the rest is as if servers had no attention sinks in layers 1 to 3",
        ),
        (
            "unused/shared_gate",
            "the trainer computes as without its gate of shared experts: unused, or all zero",
        ),
    ],
)
def test_words_of_a_wrong_layout_then_the_part_and_its_layers(name, words):
    [line] = cause_lines({f"ledger/as/{name}/share": 0.9, f"ledger/as/{name}/times": 1.0})
    assert line.endswith(words)
