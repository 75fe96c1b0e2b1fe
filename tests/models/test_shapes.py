"""A checkpoint whose tensors have other shapes than the model: the tensor, both shapes and
the file are named.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.names import NameTable
from megatron_rl_corr.models.shards import LocalParameter, ShardRanks, load_shards

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 6,
    "tie_word_embeddings": False,
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "num_experts": 2,
    "moe_intermediate_size": 6,
}
QKV, ATTENTION = "decoder.layers.0.self_attention.linear_qkv.weight", "model.layers.0.self_attn"
FC1, EXPERT = "decoder.layers.0.mlp.experts.linear_fc1.weight0", "model.layers.0.mlp.experts.0"
EMBEDDING, OUT = "embedding.word_embeddings.weight", "decoder.layers.0.self_attention.linear_proj.weight"
SHAPES = {
    f"{ATTENTION}.q_proj.weight": (8, 8),
    f"{ATTENTION}.k_proj.weight": (4, 8),
    f"{ATTENTION}.v_proj.weight": (4, 8),
    f"{ATTENTION}.o_proj.weight": (8, 8),
    f"{EXPERT}.gate_proj.weight": (6, 8),
    f"{EXPERT}.up_proj.weight": (6, 8),
    "model.embed_tokens.weight": (6, 8),
}
LOCAL = {QKV: (8, 8), OUT: (8, 4), FC1: (6, 8), EMBEDDING: (4, 8)}
"""Of a rank of two; the vocabulary is padded to 8."""


def load(folder, *parameters, local=None, **changed):
    """What is loaded into these parameters; changed: shapes of tensors by their last word but one."""
    shapes = {name: changed.get(name.split(".")[-2], shape) for name, shape in SHAPES.items()}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    own = [torch.zeros(local or LOCAL[parameter]) for parameter in parameters]
    table = NameTable(CONFIG, padded_vocab_size=8)
    ranks = ShardRanks(tp_rank=1, tp_size=2, expert_tp_rank=1, expert_tp_size=2)
    made = [LocalParameter(*pair, 0, 2, table) for pair in zip(own, parameters, strict=True)]
    load_shards(made, HFCheckpoint(folder), ranks)
    return own


@pytest.mark.parametrize(
    "parameter, name, shape, expected",
    [
        (QKV, "q_proj", (4, 8), (8, 8)),
        (QKV, "k_proj", (8, 4), (4, 8)),  # as many numbers, so that nothing but the shape tells
        (QKV, "v_proj", (4,), (4, 8)),
        (OUT, "o_proj", (8, 16), (8, 8)),
        (FC1, "up_proj", (7, 8), (6, 8)),
        (FC1, "gate_proj", (6, 4), (6, 8)),
        (EMBEDDING, "embed_tokens", (9, 8), (6, 8)),
        (EMBEDDING, "embed_tokens", (5, 8), (6, 8)),
    ],
)
def test_tensor_when_of_another_shape_then_it_both_shapes_and_its_file_are_named(
    tmp_path, parameter, name, shape, expected
):
    with pytest.raises(ValueError) as raised:
        load(tmp_path, parameter, **{name: shape})
    [whole] = [one for one in SHAPES if one.split(".")[-2] == name]
    said = (
        f"{tmp_path / 'model.safetensors'}: {whole} is {shape}, and the model ({parameter}) needs "
        f"{expected}; give "
    )
    assert str(raised.value).startswith(said)


def test_model_when_its_own_shard_is_of_no_such_tensors_then_it_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=rf"{QKV}: the model has \(9, 8\) on each of 2 ranks, of which .*q_proj"
    ):
        load(tmp_path, QKV, local=(9, 8))
    with pytest.raises(ValueError, match=r"o_proj.weight is \(8, 8\), and the model .* needs \(8, 6\)"):
        load(tmp_path, OUT, local=(8, 3))


def test_tensors_when_their_shapes_are_right_then_loaded(tmp_path):
    for name, own in zip(LOCAL, load(tmp_path, *LOCAL), strict=True):
        # Of the vocabulary the second rank has two rows, and two of padding, which is zero.
        assert own.sum() == (2 * 8 if name == EMBEDDING else own.numel())
