"""What tells a server of another model from those that are trained, before anything is sent."""

import asyncio
import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.mcore.checks.model_check import difference
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 6,
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "tie_word_embeddings": True,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
NAMES = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"]
INFO = {"tp_size": 1, "pp_size": 1, "ep_size": 1, "dtype": "float32", "device": "cpu", "quantization": None}
SGLANG = load_engine("sglang")


class Client:
    """One SGLang server, as far as its answers go."""

    def __init__(self, model, names, url="http://127.0.0.1:1", **info):
        self.base_urls, self._model, self._names, self._info = (url,), model, names, INFO | info
        self.asked = []

    def engine_of(self, url):
        return SGLANG

    async def server_info(self):
        return [self._info]

    async def model_info(self):
        return [{"model_type": "qwen3", "weight_version": "default"} | self._model]

    async def ask(self, url, request):
        self.asked.append(request.endpoint)
        sums = dict.fromkeys(self._names, "1")
        return {"ranks": [{"parallelism_info": [{"role": "target", "tp_rank": 0}], "checksums": sums}]}


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: torch.ones(2) for name in NAMES}, tmp_path / "model.safetensors")
    return HFCheckpoint(tmp_path)


def said(client, checkpoint, *, with_names=True):
    return asyncio.run(difference(client, checkpoint, with_names=with_names))


def test_server_when_it_has_the_model_then_nothing_is_said(checkpoint):
    assert said(Client({"model_path": str(checkpoint.path)}, [*NAMES, "lm_head.weight"]), checkpoint) is None


@pytest.mark.parametrize(("own", "served"), [("kimi_k2", "deepseek_v3"), ("deepseek_v3", "kimi_k2")])
def test_server_when_config_json_names_the_same_architecture_otherwise_then_nothing_is_said(
    tmp_path, own, served
):
    """Kimi-K2 is served as a DeepSeek-V3 where a server knows no other."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": own}))
    save_file({name: torch.ones(2) for name in NAMES}, tmp_path / "model.safetensors")
    assert said(Client({"model_type": served}, NAMES), HFCheckpoint(tmp_path), with_names=False) is None
    _, what = said(Client({"model_type": "qwen3"}, NAMES), HFCheckpoint(tmp_path), with_names=False)
    assert what == f"its model_type is qwen3, the checkpoint's {own}"


@pytest.mark.parametrize(
    "model, names, words",
    [
        ({"model_type": "qwen2"}, NAMES, "its model_type is qwen2, the checkpoint's qwen3"),
        ({}, NAMES[:2], "it has none of 1 of its 3 parameters: model.layers.0.input_layernorm.weight"),
        (
            {},
            [*NAMES, "model.layers.1.input_layernorm.weight"],
            "it has 1 parameters that the checkpoint lacks: model",
        ),
    ],
)
def test_server_when_it_has_another_model_then_what_differs(checkpoint, model, names, words):
    url, what = said(Client(model, names), checkpoint)
    assert url == "http://127.0.0.1:1" and what.startswith(words)


def test_server_of_this_host_when_its_folder_has_other_sizes_then_they_are_named_and_of_another_host_not(
    checkpoint, tmp_path
):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(
        json.dumps(CONFIG | {"hidden_size": 4, "num_hidden_layers": 2, "rope": 1})
    )
    _, what = said(Client({"model_path": str(other)}, NAMES), checkpoint)
    assert what == (
        f"its folder {other} has hidden_size 4 where the checkpoint has 8, "
        "num_hidden_layers 2 where the checkpoint has 1, rope 1 where the checkpoint has it not set"
    )
    assert said(Client({"model_path": str(other)}, NAMES, url="http://10.0.0.1:1"), checkpoint) is None
    assert said(Client({"model_path": "org/name"}, NAMES), checkpoint) is None


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"hidden_act": "gelu"}, "hidden_act gelu where the checkpoint has silu"),
        ({"rope_theta": 1000000.0}, "rope rope_theta 1000000.0 where the checkpoint has 10000.0"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope factor 4.0 where the checkpoint has it not set",
        ),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 where the checkpoint has 1e-06"),
        ({"attention_bias": True}, "attention_bias True where the checkpoint has False"),
        ({"head_dim": 4}, "head_dim 4 where the checkpoint has 128"),
        (
            {"rope_scaling": [1]},
            "settings that can't be compared: config.json: rope_scaling [1] must be an object",
        ),
    ],
)
def test_server_of_this_host_when_its_folder_has_other_settings_then_they_are_named(
    checkpoint, tmp_path, changed, words
):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps(CONFIG | changed))
    _, what = said(Client({"model_path": str(tmp_path / "other")}, NAMES), checkpoint)
    assert what.startswith(f"its folder {tmp_path / 'other'} has {words}")


def test_server_of_this_host_when_its_folder_says_the_same_otherwise_then_nothing_is_said(
    checkpoint, tmp_path
):
    (tmp_path / "other").mkdir()
    same = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "head_dim": 128,
        "hidden_act": "silu",
        "sliding_window": None,
        "attention_dropout": 0.1,
        "torch_dtype": "float16",
        "max_position_embeddings": 64,
        "layer_types": ["full_attention"],
        "quantization_config": {"quant_method": "fp8"},
    }
    (tmp_path / "other/config.json").write_text(json.dumps(CONFIG | same))
    assert said(Client({"model_path": str(tmp_path / "other")}, NAMES), checkpoint) is None


def test_server_when_its_parameters_are_not_to_be_asked_for_then_they_are_not(checkpoint):
    killed = Client({"weight_version": "unfinished 3"}, [])
    assert said(killed, checkpoint) is None and killed.asked == []
    plain = Client({}, [])
    assert said(plain, checkpoint, with_names=False) is None and plain.asked == []
    assert said(Client({}, NAMES[:1], pp_size=2), checkpoint) is None  # it shows its first stage's alone
