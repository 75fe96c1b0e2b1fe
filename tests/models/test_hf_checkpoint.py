"""Hugging Face folders that can't be read: the file is named, whatever is wrong with it."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl_corr.models import hf_checkpoint
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.arange(4096.0)}, tmp_path / "model.safetensors")
    return tmp_path


def test_folder_when_whole_then_its_tensor_and_shape(folder):
    checkpoint = HFCheckpoint(folder)
    assert list(checkpoint.names) == ["a"] and checkpoint.shape("a") == (4096,)
    assert torch.equal(checkpoint.tensor("a"), torch.arange(4096.0))
    with pytest.raises(ValueError, match=f"the checkpoint {folder} has no tensor b"):
        checkpoint.tensor("b")


def test_tensors_when_one_file_behind_the_other_then_each_file_is_opened_once(folder, monkeypatch):
    files = {"a": "model.safetensors", "b": "other.safetensors", "c": "other.safetensors"}
    save_file({"b": torch.ones(2), "c": torch.zeros(3)}, folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    opened, real = [], hf_checkpoint.safe_open
    monkeypatch.setattr(
        hf_checkpoint, "safe_open", lambda path, **how: opened.append(path.name) or real(path, **how)
    )
    checkpoint = HFCheckpoint(folder)
    assert [checkpoint.tensor(name).sum() for name in "aabccb"] == [8386560, 8386560, 2, 0, 0, 2]
    assert checkpoint.shape("c") == (3,)
    assert opened == ["model.safetensors", "other.safetensors"]


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("config.json", "{", "is not JSON: Expecting property name"),
        ("config.json", "[1]", r"is no JSON object, but \[1\]"),
        ("model.safetensors.index.json", '{"x":', "is not JSON: Expecting value"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": 1}}',
            "has no weight_map, which names the file of each",
        ),
        ("model.safetensors.index.json", "{}", "has no weight_map, which names the file of each tensor"),
    ],
)
def test_folder_when_a_json_file_is_wrong_then_it_is_named(folder, file, content, words):
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=f"{folder / file} {words}"):
        HFCheckpoint(folder)


def test_folder_when_its_only_file_was_cut_then_it_is_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(
        ValueError, match=f"{file} can't be read as safetensors .* copy or save the model anew"
    ):
        HFCheckpoint(folder)


@pytest.mark.parametrize("shard", ["model.safetensors", "missing.safetensors"])
def test_tensor_when_its_shard_is_cut_or_missing_then_it_is_named(folder, shard):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    checkpoint = HFCheckpoint(folder)
    (folder / "model.safetensors").write_bytes(b"12")
    for read in (checkpoint.tensor, checkpoint.shape):
        with pytest.raises(ValueError, match=f"{folder / shard} can't be read as safetensors"):
            read("a")


def test_files_when_looked_at_then_a_cut_one_and_a_tensor_that_is_elsewhere_are_named_without_reading_any(
    folder,
):
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    HFCheckpoint(folder).check_files()
    index.write_text(json.dumps({"weight_map": {"a": single.name, "b": single.name, "c": single.name}}))
    with pytest.raises(
        ValueError, match=rf"{single} has no tensor b \(one of 2 that model.safetensors.index.json"
    ):
        HFCheckpoint(folder).check_files()
    index.write_text(json.dumps({"weight_map": {"a": single.name}}))
    whole = single.read_bytes()
    single.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"{single} can't be read as safetensors"):
        HFCheckpoint(folder).check_files()
