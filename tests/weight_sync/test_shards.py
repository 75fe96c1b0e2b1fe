"""A rank's shards from a checkpoint on disk and back: routers' biases, a tied embedding's copy,
what is left over.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.names import NameTable
from megatron_rl_corr.models.shards import LocalParameter, ShardRanks, load_shards, local_parameters
from megatron_rl_corr.reduce.layout import StageGroups
from megatron_rl_corr.weight_sync.export import StageExporter

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 4,
    "tie_word_embeddings": True,
    "num_hidden_layers": 3,
    "q_lora_rank": 4,
    "kv_lora_rank": 3,
    "qk_rope_head_dim": 1,
}
GATE = "model.layers.2.mlp.gate."
BIAS = torch.tensor([0.1, 0.2, 0.3])


class Router(nn.Module):
    """Megatron's, as far as names go."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))
        self.register_buffer("expert_bias", torch.zeros(3))
        self.register_buffer("local_tokens_per_expert", torch.zeros(3), persistent=False)


def last_stage():
    """A chunk with the third of three layers: its router, half of its query projection, all of its
    key-value one, and an output layer.
    """
    layer = nn.Module()
    layer.mlp, layer.self_attention, layer.layer_number = nn.Module(), nn.Module(), 3
    layer.mlp.router, layer.self_attention.linear_q_down_proj = Router(), nn.Linear(2, 2, bias=False)
    layer.self_attention.linear_kv_down_proj = nn.Linear(2, 4, bias=False)
    chunk = nn.Module()
    chunk.decoder, chunk.output_layer = nn.Module(), nn.Linear(2, 4, bias=False)
    chunk.decoder.layers = nn.ModuleList([layer])
    chunk.config, chunk.share_embeddings_and_output_weights = (
        SimpleNamespace(num_layers=3, mtp_num_layers=None),
        True,
    )
    return chunk


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(more tensors): a folder with those of last_stage(), and of other layers."""

    def make(**more):
        tensors = {
            "model.embed_tokens.weight": torch.arange(8.0).view(4, 2),
            GATE + "weight": torch.ones(3, 2),
            GATE + "e_score_correction_bias": BIAS.clone(),
            "model.layers.1.self_attn.o_proj.weight": torch.ones(2, 2),
            "model.layers.2.self_attn.q_a_proj.weight": torch.arange(8.0).view(4, 2),
            "model.layers.2.self_attn.kv_a_proj_with_mqa.weight": torch.arange(8.0).view(4, 2),
            # A layer that predicts further tokens, behind the last.
            "model.layers.3.enorm.weight": torch.ones(2),
        }
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        save_file(tensors | more, tmp_path / "model.safetensors")
        return HFCheckpoint(tmp_path)

    return make


def load(chunk, checkpoint):
    parameters = local_parameters([chunk], NameTable(CONFIG, padded_vocab_size=4), experts_per_rank=0)
    load_shards(parameters, checkpoint, ShardRanks(tp_rank=1, tp_size=2))


def test_load_when_the_model_was_cast_to_bfloat16_then_the_routers_bias_is_float32_again(checkpoint):
    chunk = last_stage()
    chunk.output_layer.weight = nn.Parameter(torch.zeros(2, 2))  # the second half of the vocabulary
    chunk.bfloat16()
    load(chunk, checkpoint())
    router = chunk.decoder.layers[0].mlp.router
    # 0.1 has no exact bfloat16: any rounding on the way would show.
    assert router.expert_bias.dtype == torch.float32 and torch.equal(router.expert_bias, BIAS)
    assert chunk.output_layer.weight.tolist() == [[4, 5], [6, 7]]
    assert chunk.decoder.layers[0].self_attention.linear_q_down_proj.weight.tolist() == [[4, 5], [6, 7]]


def test_load_when_a_projection_is_whole_on_every_rank_then_all_of_it(checkpoint):
    chunk = last_stage()
    chunk.output_layer.weight = nn.Parameter(torch.zeros(2, 2))
    down = chunk.decoder.layers[0].self_attention.linear_q_down_proj
    down.weight = nn.Parameter(torch.zeros(4, 2))
    load(chunk, checkpoint())
    assert torch.equal(down.weight, torch.arange(8.0).view(4, 2))


def test_load_when_the_model_has_no_place_for_a_tensor_of_its_layers_then_refused_with_its_name(checkpoint):
    chunk = last_stage()
    chunk.output_layer.weight = nn.Parameter(torch.zeros(2, 2))
    more = {
        "model.layers.2.self_attn.q_b_proj.weight": torch.ones(2),
        "model.layers.2.rotary_emb.inv_freq": BIAS,
    }
    with pytest.raises(
        ValueError, match=r"no place for model.layers.2.self_attn.q_b_proj.weight \(one of 1 tensors\)"
    ):
        load(chunk, checkpoint(**more))


def test_load_when_flags_leave_out_the_routers_bias_then_refused(checkpoint):
    chunk = last_stage()
    chunk.output_layer.weight = nn.Parameter(torch.zeros(2, 2))
    del chunk.decoder.layers[0].mlp.router.expert_bias
    with pytest.raises(
        ValueError, match=r"no place for .*e_score_correction_bias .*--moe-router-enable-expert-bias"
    ):
        load(chunk, checkpoint())


def test_parameters_when_the_model_does_not_tie_what_the_checkpoint_ties_then_refused():
    chunk = last_stage()
    chunk.share_embeddings_and_output_weights = False
    with pytest.raises(ValueError, match="leave out --untie-embeddings-and-output-weights"):
        local_parameters([chunk], NameTable(CONFIG, padded_vocab_size=4), experts_per_rank=0)


def test_export_of_a_last_stage_when_embeddings_are_tied_then_all_but_the_copy():
    chunk = last_stage()
    chunk.decoder.layers[0].mlp.router.expert_bias.copy_(BIAS)
    parameters = local_parameters([chunk], NameTable(CONFIG, padded_vocab_size=4), experts_per_rank=0)
    groups = StageGroups(tp=None, expert=None, sender=0)
    exporter = StageExporter(parameters, ShardRanks(), groups, stage=1, num_stages=2)
    units = list(exporter.units())
    attention = "model.layers.2.self_attn."
    assert sorted([name for name, _ in unit] for unit in units) == [
        [GATE + "e_score_correction_bias"],
        [GATE + "weight"],
        # in one request, or neither
        [attention + "q_a_proj.weight", attention + "kv_a_proj_with_mqa.weight"],
    ]
    sent = dict(named for unit in units for named in unit)
    assert torch.equal(sent[GATE + "e_score_correction_bias"], BIAS)
    assert exporter.planned() == {name: list(tensor.shape) for name, tensor in sent.items()}


def further_tokens(tmp_path, **more):
    """A rank that has the first norm of a layer that predicts further tokens; and a checkpoint of
    it, with `more`.
    """
    config = CONFIG | {"num_nextn_predict_layers": 1, "tie_word_embeddings": False}
    embedding, head = torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.layers.3.enorm.weight": torch.ones(2),
        "model.layers.3.embed_tokens.weight": embedding.clone(),
        "model.layers.3.shared_head.head.weight": head.clone(),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors | more, tmp_path / "model.safetensors")
    table, held = NameTable(config, padded_vocab_size=4), torch.zeros(2)
    return [LocalParameter(held, "mtp.layers.0.enorm.weight", 0, 0, table)], HFCheckpoint(tmp_path)


def test_load_when_a_layer_predicts_further_tokens_then_its_copies_of_the_models_tensors_need_no_place(
    tmp_path,
):
    parameters, checkpoint = further_tokens(tmp_path)
    load_shards(parameters, checkpoint, ShardRanks())
    assert parameters[0].tensor.tolist() == [1, 1]


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_load_when_such_a_layer_has_an_embedding_or_an_output_layer_of_its_own_then_refused(tmp_path, name):
    own = {f"model.layers.3.{name}.weight": torch.zeros(4, 2)}
    with pytest.raises(
        ValueError, match=f"--mtp-num-layers: model.layers.3.{name}.weight of .* differs from .*leave"
    ):
        load_shards(*further_tokens(tmp_path, **own), ShardRanks())


def test_load_when_such_a_layer_has_a_tensor_that_megatrons_has_not_then_refused_with_its_name(tmp_path):
    more = {"model.layers.3.extra.weight": torch.ones(2)}
    with pytest.raises(ValueError, match=r"no place for model.layers.3.extra.weight \(one of 1 tensors\)"):
        load_shards(*further_tokens(tmp_path, **more), ShardRanks())
