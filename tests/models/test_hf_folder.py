"""Exported folders and the layers that predict further tokens (MTP)."""

import json
import logging

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint, read_config
from megatron_rl_corr.models.hf_folder import UnfinishedFolder, write_index

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 4,
    "hidden_size": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2,
    "kv_lora_rank": 1,
    "qk_rope_head_dim": 1,
    "dtype": "float32",
}
TRAINED, ENORM, HNORM = (
    "model.embed_tokens.weight",
    "model.layers.1.enorm.weight",
    "model.layers.1.hnorm.weight",
)
COPY = "model.layers.1.embed_tokens.weight"


def test_index_when_written_then_total_size_is_the_tensors_bytes_and_not_the_files(tmp_path):
    # 3 x 5 float32 + 7 bfloat16 + 2 int64 + 1 bool + none of an empty one: 60 + 14 + 16 + 1.
    save_file(
        {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors"
    )
    others = {
        "c": torch.zeros(2, dtype=torch.int64),
        "d": torch.ones(1, dtype=torch.bool),
        "e": torch.zeros(0, 4),
    }
    save_file(others, tmp_path / "model-2.safetensors", metadata={"format": "pt", "much": "x" * 5000})
    write_index(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 91
    plan = split_torch_state_dict_into_shards(
        {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16), **others}, max_shard_size=40
    )
    # as huggingface_hub, whose number transformers writes, counts them
    assert plan.metadata["total_size"] == 91


@pytest.fixture
def export(tmp_path):
    """export(source's names, exported names): the folder that is made; the source's tensors are
    0, the exported 1.
    """

    def make(names, written):
        source = tmp_path / "source"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(CONFIG))
        save_file({name: torch.zeros(2) for name in names}, source / "model.safetensors")
        folder = UnfinishedFolder(tmp_path / "out", {"step": 1})
        folder.begin()
        folder.write("model", [(name, torch.ones(2)) for name in written])
        folder.finish(HFCheckpoint(source))
        return HFCheckpoint(folder.final)

    return make


def test_folder_when_the_layer_was_not_trained_then_it_is_the_sources(export):
    found = export([TRAINED, ENORM, COPY], [TRAINED])
    assert {name: found.tensor(name).tolist() for name in found.names} == {
        TRAINED: [1, 1],
        ENORM: [0, 0],
        COPY: [0, 0],
    }
    assert read_config(found.path) == CONFIG


def test_folder_when_the_layer_was_trained_then_its_copy_is_the_trained_embedding(export):
    assert export([TRAINED, ENORM, COPY], [TRAINED, ENORM]).tensor(COPY).tolist() == [1, 1]


def test_folder_when_only_a_part_of_the_layer_was_written_then_refused_with_what_lacks(export):
    with pytest.raises(ValueError, match=f"only a part of the layers .* lacks {HNORM} \\(one of 1\\)"):
        export([TRAINED, ENORM, HNORM], [TRAINED, ENORM])


def test_folder_when_the_source_promises_a_layer_that_it_lacks_then_the_folder_does_not_and_it_is_told(
    export, caplog
):
    with caplog.at_level(logging.WARNING):
        found = export([TRAINED], [TRAINED])
    assert read_config(found.path) == CONFIG | {"num_nextn_predict_layers": 0}
    [told] = [record.getMessage() for record in caplog.records]
    assert "num_nextn_predict_layers is 0 in its config.json" in told and "says 1 and has no weights" in told
