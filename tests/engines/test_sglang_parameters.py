"""Where a tensor ends up in an SGLang server, and what a rank may hold of it."""

import pytest
import torch

from megatron_rl_corr.engines.stacked_parameters import possible_layouts, server_parameter, single_experts


@pytest.mark.parametrize(
    ("name", "parameter", "part"),
    [
        ("model.layers.3.self_attn.v_proj.bias", "model.layers.3.self_attn.qkv_proj.bias", (-1, 2)),
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.gate_up_proj.weight", (-1, 1)),
        ("model.layers.3.mlp.down_proj.weight", "model.layers.3.mlp.down_proj.weight", (-1, 0)),
        ("model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight", (-1, 0)),
        ("model.layers.3.mlp.experts.11.up_proj.weight", "model.layers.3.mlp.experts.w13_weight", (11, 1)),
        ("model.layers.3.mlp.experts.0.down_proj.weight", "model.layers.3.mlp.experts.w2_weight", (0, 0)),
        (
            "model.layers.3.mlp.shared_experts.gate_proj.weight",
            "model.layers.3.mlp.shared_experts.gate_up_proj.weight",
            (-1, 0),
        ),
        (
            "model.layers.3.block_sparse_moe.experts.2.w3.weight",
            "model.layers.3.block_sparse_moe.experts.w13_weight",
            (2, 1),
        ),
        (
            "model.layers.3.block_sparse_moe.experts.2.w2.weight",
            "model.layers.3.block_sparse_moe.experts.w2_weight",
            (2, 0),
        ),
        (
            "model.layers.3.self_attn.q_a_proj.weight",
            "model.layers.3.self_attn.fused_qkv_a_proj_with_mqa.weight",
            (-1, 0),
        ),
        (
            "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
            "model.layers.3.self_attn.fused_qkv_a_proj_with_mqa.weight",
            (-1, 1),
        ),
        ("model.layers.3.self_attn.q_b_proj.weight", "model.layers.3.self_attn.q_b_proj.weight", (-1, 0)),
        ("lm_head.weight", "lm_head.weight", (-1, 0)),
        (
            "model.layers.3.self_attn.k_proj.weight_scale_inv",
            "model.layers.3.self_attn.qkv_proj.weight_scale_inv",
            (-1, 1),
        ),
        (
            "model.layers.3.mlp.experts.11.up_proj.weight_scale_inv",
            "model.layers.3.mlp.experts.w13_weight_scale_inv",
            (11, 1),
        ),
    ],
)
def test_parameter_of_a_tensor_then_its_stack_and_its_place(name, parameter, part):
    assert server_parameter(name) == (parameter, part)


def rows(*numbers):
    return torch.tensor(numbers)[:, None] + torch.tensor([0.0, 0.5])


def test_layouts_of_a_stack_when_two_ranks_then_each_part_is_cut_for_itself():
    # q has rows 0 1 2 3, k 10 11, v 20 21; they came in another order.
    parts = {(-1, 2): rows(20, 21), (-1, 0): rows(0, 1, 2, 3), (-1, 1): rows(10, 11)}
    whole, by_row, by_column = possible_layouts(parts, rank=1, size=2)
    assert whole[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 20, 21]
    assert by_row[:, 0].tolist() == [2, 3, 11, 21]
    assert by_column[:, 0].tolist() == [0.5, 1.5, 2.5, 3.5, 10.5, 11.5, 20.5, 21.5]


def test_layouts_of_experts_when_they_came_mixed_then_in_the_order_of_their_numbers():
    parts = {(e, p): rows(100 * e + 10 * p) for e in (1, 10, 0, 2) for p in (1, 0)}
    (whole,) = possible_layouts(parts, rank=0, size=1)
    assert whole[..., 0].tolist() == [[0, 10], [100, 110], [200, 210], [1000, 1010]]


def test_layouts_of_a_vocabulary_when_its_size_is_no_multiple_of_64_then_padded_with_zeros_too():
    table = torch.ones(83, 2)
    plain, padded = possible_layouts({(-1, 0): table}, rank=0, size=1)
    assert plain.shape == (83, 2) and padded.shape == (128, 2) and padded.sum() == 166


def test_layouts_when_a_dimension_does_not_divide_then_it_is_not_cut():
    (whole, by_row) = possible_layouts({(-1, 0): torch.ones(4, 3)}, rank=0, size=2)
    assert whole.shape == (4, 3) and by_row.shape == (2, 3)


def test_stack_of_experts_when_hashed_then_each_as_a_server_holds_it():
    stack = torch.arange(24.0).view(2, 3, 4)  # experts x inputs x outputs
    prefix = "model.layers.1.mlp.experts."
    parts = {}
    for name, tensor in single_experts(prefix + "gate_up_proj", stack):
        parameter, part = server_parameter(name)
        assert parameter == server_parameter(prefix + "gate_up_proj")[0] == prefix + "w13_weight"
        parts[part] = tensor
    [whole] = possible_layouts(parts, rank=0, size=1)
    assert torch.equal(whole, stack.transpose(1, 2))
    # row-parallel: inputs are cut
    down = {
        server_parameter(name)[1]: one for name, one in single_experts(prefix + "down_proj", stack[:, :2])
    }
    assert any(
        torch.equal(one, stack[:, 1:2].transpose(1, 2)) for one in possible_layouts(down, rank=1, size=2)
    )
    biases = single_experts(prefix + "down_proj_bias", stack[:, 0])
    assert [server_parameter(name) for name, _ in biases] == [
        (prefix + "w2_weight_bias", (0, 0)),
        (prefix + "w2_weight_bias", (1, 0)),
    ]
    assert torch.equal(biases[1][1], stack[1, 0])
    own = {server_parameter(name)[1]: one for name, one in biases}
    # added once: the other ranks of a server have zeros
    assert any(not one.any() and one.shape == (2, 4) for one in possible_layouts(own, rank=1, size=2))
    assert all(one.any() for one in possible_layouts(own, rank=0, size=2))
    for other in ("model.layers.1.mlp.down_proj.weight", prefix + "3.down_proj.weight"):
        assert single_experts(other, stack) == [(other, stack)]
