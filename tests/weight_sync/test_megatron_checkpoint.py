"""Exporting a Megatron checkpoint that is broken, of another model, or to another's folder: an
error that names it.

What a checkpoint of Megatron itself gives is in tests/mcore/test_hf_models.py and test_runs.py.
"""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from megatron_rl_corr import cli
from megatron_rl_corr.models import hf_folder
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint, read_config

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 6,
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "intermediate_size": 6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LAYER = {
    "self_attn.q_proj.weight": (4, 4),
    "self_attn.k_proj.weight": (2, 4),
    "self_attn.v_proj.weight": (2, 4),
    "self_attn.o_proj.weight": (4, 4),
    "self_attn.q_norm.weight": (2,),
    "self_attn.k_norm.weight": (2,),
    "mlp.gate_proj.weight": (6, 4),
    "mlp.up_proj.weight": (6, 4),
    "mlp.down_proj.weight": (4, 6),
    "input_layernorm.weight": (4,),
    "post_attention_layernorm.weight": (4,),
}
ENDS = {"model.embed_tokens.weight": (6, 4), "model.norm.weight": (4,), "lm_head.weight": (6, 4)}


def stacked(numbers, layers=2):
    """What Megatron saves of `numbers` (name -> tensor) on Transformer Engine's spec, the
    vocabulary padded to 8.
    """

    def stack(*names):
        return torch.stack(
            [torch.cat([numbers[f"model.layers.{i}.{name}"] for name in names]) for i in range(layers)]
        )

    def padded(tensor):
        return torch.cat([tensor, tensor.new_ones(2, 4)])

    # One key-value head: its two query heads, its key, its value.
    return {
        "embedding.word_embeddings.weight": padded(numbers["model.embed_tokens.weight"]),
        "output_layer.weight": padded(numbers["lm_head.weight"]),
        "decoder.final_layernorm.weight": numbers["model.norm.weight"],
        "decoder.layers.self_attention.linear_qkv.weight": stack(
            *(f"self_attn.{x}_proj.weight" for x in "qkv")
        ),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": stack("input_layernorm.weight"),
        "decoder.layers.self_attention.linear_proj.weight": stack("self_attn.o_proj.weight"),
        "decoder.layers.self_attention.q_layernorm.weight": stack("self_attn.q_norm.weight"),
        "decoder.layers.self_attention.k_layernorm.weight": stack("self_attn.k_norm.weight"),
        "decoder.layers.mlp.linear_fc1.weight": stack("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": stack("post_attention_layernorm.weight"),
        "decoder.layers.mlp.linear_fc2.weight": stack("mlp.down_proj.weight"),
        "optimizer.state.param.output_layer.weight": torch.zeros(8, 4),
    }


@pytest.fixture
def numbers():
    names = ENDS | {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()}
    return {name: torch.randn(shape) for name, shape in names.items()}


@pytest.fixture
def source(tmp_path, numbers):
    """The model that training began with, in bfloat16."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tools.jinja").write_text("[tools]")
    scale = {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}
    save_file({name: x.bfloat16() for name, x in numbers.items()} | scale, folder / "model.safetensors")
    return folder


def saved(folder, tensors):
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


def export(checkpoint, source, out, capsys):
    status = cli.main(["export", str(checkpoint), "--hf-checkpoint", str(source), "--out", str(out)])
    return status, capsys.readouterr().err


def test_checkpoint_when_it_is_the_newest_then_its_weights_with_what_is_not_trained(
    tmp_path, numbers, source, capsys
):
    for step in (3, 40):
        saved(tmp_path / f"saved/iter_{step:07d}", stacked({name: x + step for name, x in numbers.items()}))
    (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("40\n")
    for _ in range(2):  # the second takes the first one's place
        assert export(tmp_path / "saved", source, tmp_path / "out", capsys) == (0, "")
    found = HFCheckpoint(tmp_path / "out")
    assert set(found.names) == {*numbers, "model.layers.0.self_attn.k_scale"}
    for name, tensor in numbers.items():
        assert torch.equal(found.tensor(name), tensor + 40), name
    assert found.tensor("model.layers.0.self_attn.k_scale") == 0.5
    assert read_config(found.path) == CONFIG | {"torch_dtype": "float32"}
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out/additional_chat_templates/tools.jinja").read_text() == "[tools]"
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "source", "out"}


def test_checkpoint_when_it_is_broken_or_of_another_model_then_an_error_that_names_it(
    tmp_path, numbers, source, capsys
):
    tensors, out = stacked(numbers), tmp_path / "out"

    def said(checkpoint):
        status, error = export(checkpoint, source, out, capsys)
        assert status == 2 and not out.exists()
        return error

    assert "is no Megatron checkpoint of --ckpt-format torch_dist, as it has no file .metadata" in said(
        source
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/latest_checkpointed_iteration.txt").write_text("40\n")
    assert "names 40, which is not there; there are none" in said(tmp_path / "empty")
    shorter = saved(tmp_path / "shorter", stacked(numbers, layers=1))
    assert "--num-layers 1: the checkpoint has 2" in said(shorter)
    other = saved(tmp_path / "other", {"encoder.weight": torch.ones(2)})
    assert "has no embedding.word_embeddings.weight: it is not of a GPTModel" in said(other)
    key = "decoder.layers.mlp.linear_fc2.weight"
    without = saved(tmp_path / "without", {name: x for name, x in tensors.items() if name != key})
    assert "lacks 2 tensors, model.layers.0.mlp.down_proj.weight for one" in said(without)
    unknown = saved(
        tmp_path / "unknown", tensors | {"decoder.layers.self_attention.linear_qkv.bias": torch.ones(2, 8)}
    )
    assert "Megatron's parameter decoder.layers.0.self_attention.linear_qkv.bias does not exist in" in said(
        unknown
    )
    # Models of one family and as many layers: other sizes, other heads.
    key = "decoder.layers.mlp.linear_fc2.weight"
    wider = saved(tmp_path / "wider", tensors | {key: torch.ones(2, 4, 8)})
    assert (
        "down_proj.weight of shape (4, 8) and" in (error := said(wider))
        and "of (4, 6): did training begin" in error
    )
    key = "decoder.layers.self_attention.linear_qkv.weight"
    heads = saved(tmp_path / "heads", tensors | {key: torch.ones(2, 10, 4)})
    assert f"linear_qkv.weight of {heads} is not of the model {source}" in said(heads)
    cut = saved(tmp_path / "cut", tensors)
    [file] = cut.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:2000])
    assert f"{cut} is damaged" in said(cut)
    zeros = saved(tmp_path / "zeros", tensors)
    [file] = zeros.glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    assert f"{zeros} is damaged" in said(zeros)
    for content in (b"", bytes(100)):
        (zeros / ".metadata").write_bytes(content)
        assert f"{zeros} is damaged: .metadata cannot be read" in said(zeros)


def test_folder_when_it_is_anothers_then_refused_and_left(tmp_path, numbers, source, capsys):
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "thesis.tex").write_text("dear")
    checkpoint = saved(tmp_path / "checkpoint", stacked(numbers))
    status, error = export(checkpoint, source, mine, capsys)
    assert status == 2 and "was not made by this program; name another folder" in error
    assert [path.name for path in mine.iterdir()] == ["thesis.tex"]
    assert export(checkpoint, source, source, capsys)[0] == 2
    assert (source / "model.safetensors").is_file()


def test_folder_when_it_is_read_from_then_refused_and_left(tmp_path, numbers, source, capsys):
    checkpoint = saved(tmp_path / "checkpoint", stacked(numbers))
    for folder in (checkpoint, source):
        # Made here, so that it could be replaced.
        (folder / hf_folder.MARKER).write_text("{}")
        before = sorted(folder.iterdir())
        status, error = export(checkpoint, source, folder, capsys)
        assert status == 2 and f"would replace {folder}, which is read" in error
        assert sorted(folder.iterdir()) == before


def test_folder_when_it_is_a_link_or_has_no_name_then_the_one_it_leads_to(
    tmp_path, numbers, source, capsys, monkeypatch
):
    checkpoint = saved(tmp_path / "checkpoint", stacked(numbers))
    (tmp_path / "link").symlink_to(tmp_path / "disk/out")
    for _ in range(2):  # the second takes the first one's place
        assert export(checkpoint, source, tmp_path / "link", capsys) == (0, "")
    assert (tmp_path / "link").is_symlink() and [path.name for path in (tmp_path / "disk").iterdir()] == [
        "out"
    ]
    monkeypatch.chdir(tmp_path / "disk/out")
    assert export(checkpoint, source, ".", capsys) == (0, "")
    assert set(HFCheckpoint(tmp_path / "link").names) >= set(numbers)


def test_folder_when_a_file_system_is_mounted_there_then_refused_before_anything_is_written(
    tmp_path, numbers, source, capsys, monkeypatch
):
    checkpoint = saved(tmp_path / "checkpoint", stacked(numbers))
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(hf_folder.Path, "is_mount", lambda path: path.name == "out")
    status, error = export(checkpoint, source, tmp_path / "out", capsys)
    assert status == 2 and "is mounted at" in error and "name a folder in it" in error
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "source", "out"}


def test_folder_when_a_death_ends_its_replacement_then_what_is_in_its_place_is_whole(
    tmp_path, numbers, source, capsys, monkeypatch
):
    checkpoint, out = saved(tmp_path / "checkpoint", stacked(numbers)), tmp_path / "out"
    assert export(checkpoint, source, out, capsys) == (0, "")
    real, left = hf_folder.remove, []

    def die(folder):
        """In the middle of removing the folder that was there."""
        if (folder / "config.json").is_file():
            (folder / "config.json").unlink()
            left.append(folder)
            raise OSError("killed")
        real(folder)

    monkeypatch.setattr(hf_folder, "remove", die)
    assert export(checkpoint, source, out, capsys)[0] == 2 and len(left) == 1
    assert set(HFCheckpoint(out).names) >= set(numbers)
    monkeypatch.setattr(hf_folder, "remove", real)
    assert export(checkpoint, source, out, capsys) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "source", "out"}


@pytest.mark.parametrize("keys", [(), ("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")])
def test_config_when_it_names_the_dtype_twice_or_not_then_every_key_says_that_of_the_weights(
    tmp_path, numbers, source, capsys, keys
):
    config = {name: value for name, value in CONFIG.items() if name != "torch_dtype"}
    (source / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, "bfloat16")))
    checkpoint = saved(tmp_path / "checkpoint", stacked(numbers))
    assert export(checkpoint, source, tmp_path / "out", capsys) == (0, "")
    assert read_config(tmp_path / "out") == config | dict.fromkeys(keys or ("torch_dtype",), "float32")


@pytest.mark.parametrize("keys", [(), ("dtype",), ("torch_dtype",)])
def test_config_of_a_model_of_images_and_text_then_its_part_for_text_says_the_dtype_too(tmp_path, keys):
    text = {"hidden_size": 4} | dict.fromkeys(keys, "bfloat16")
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "text_config": text}))
    save_file({"model.language_model.embed_tokens.weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    hf_folder._set_dtype(tmp_path)
    assert read_config(tmp_path) == {
        "dtype": "float32",
        "text_config": {"hidden_size": 4} | dict.fromkeys(keys, "float32"),
    }
