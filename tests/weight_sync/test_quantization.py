"""What a server's weights are in: its checkpoint's config.json and its options, agreement, and
refusals by name.
"""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import IncompletePush, RolloutProtocolError
from megatron_rl_corr.models.block_fp8 import quantise_blockwise
from megatron_rl_corr.models.quantization import SCALE, BlockFP8
from megatron_rl_corr.weight_sync.export import buckets
from megatron_rl_corr.weight_sync.quantization import (
    check_finite,
    check_quantization,
    find_quantization,
    quantised_units,
    served_quantization,
)
from tests.weight_sync.fp8_models import CONFIG

SGLANG, VLLM = load_engine("sglang"), load_engine("vllm")
FP8 = BlockFP8("float32")
UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    """folder(name, **quantization_config): a checkpoint's; without any it is not quantised."""

    def made(name, **quantization):
        (tmp_path / name).mkdir(exist_ok=True)
        config = {"quantization_config": quantization} if quantization else {}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return str(tmp_path / name)

    return made


def served(path, checkpoint=None, *, kind="qwen3", **info):
    info = {"quantization": None, "load_format": "auto"} | info
    model = SGLANG.served_model({"model_path": path, "model_type": kind}, info)
    return served_quantization(SGLANG, info, model, checkpoint)


def test_server_when_its_folder_is_in_fp8_or_not_then_its_config_tells(folder):
    assert served(folder("plain")) is None
    assert served(folder("fp8", **CONFIG)) == FP8
    assert served(folder("fp8", **CONFIG), quantization="fp8") == FP8  # the flag says the same again
    assert served(folder("power", **CONFIG, scale_fmt="ue8m0")) == BlockFP8("ue8m0")
    assert served(folder("fp8", **CONFIG), load_format="flash_rl") is None  # it quantises what it is sent


def test_server_when_its_folder_can_not_be_read_here_then_by_the_flag_or_taken_for_16_bits(folder):
    assert served("Qwen/Qwen3-8B-FP8") is None
    assert served("Qwen/Qwen3-8B-FP8", folder("fp8", **CONFIG)) == FP8


@pytest.mark.parametrize(
    ("quantization", "info", "said"),
    [
        (
            {},
            {"quantization": "fp8"},
            r"its weights are quantised \(fp8\) otherwise than by a checkpoint in FP8.*; "
            "serve the model in 16 bits, or a checkpoint in FP8 .*, or Qwen2 and Qwen3 with --load-format "
            "flash_rl",
        ),
        (CONFIG, {"quantization": "w8a8_fp8"}, r"its weights are quantised \(w8a8_fp8\)"),
        (CONFIG | {"weight_block_size": [1, 32]}, {}, r"weight_block_size \[1, 32\], and a push"),
        ({"quant_method": "awq", "bits": 4}, {"quantization": "awq"}, "quant_method 'awq', and a push"),
        (
            CONFIG,
            {"kind": "llama"},
            "SGLang is not known to load new ones of a llama .proven: deepseek_v3, glm4_moe, "
            "glm4_moe_lite, kimi_k2, mixtral, ",
        ),
    ],
)
def test_server_when_quantised_otherwise_then_refused_by_name_with_the_remedy(
    folder, quantization, info, said
):
    with pytest.raises(ValueError, match=said):
        served(folder("served", **quantization), **info)


def test_server_when_modelopt_has_quantised_its_checkpoint_then_refused(folder, tmp_path):
    path = folder("modelopt")
    (tmp_path / "modelopt/hf_quant_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=f"{path}: hf_quant_config.json quantises the weights as a push can't"
    ):
        served(path)


SHAPE = {"model_type": "qwen3", "num_hidden_layers": 2, "vocab_size": 8}
WEIGHTS = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]


def with_scales(folder, spared, *, lists=()):
    """A checkpoint whose index has scales of all linear weights but those of `spared`; its
    list names `lists`.
    """
    path = Path(folder("scales", **CONFIG, modules_to_not_convert=list(lists)))
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | SHAPE))
    names = [f"model.layers.{layer}.{weight}.weight" for layer in (0, 1) for weight in WEIGHTS]
    scales = [name + SCALE for name in names if name not in spared]
    both = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", *names, *scales]
    index = {"weight_map": dict.fromkeys(both, "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(path)


def test_server_when_its_checkpoint_has_scales_as_its_list_says_then_taken(folder):
    assert served(with_scales(folder, [])) == FP8
    down = "model.layers.1.mlp.down_proj"
    assert served(with_scales(folder, [down + ".weight"], lists=[down])).spared == {"layers.1.mlp.down_proj"}


@pytest.mark.parametrize(
    ("spared", "lists", "said"),
    [
        # A list that misses what was spared, and one that spares what was quantised.
        (
            ["model.layers.1.mlp.down_proj.weight"],
            [],
            "has model.layers.1.mlp.down_proj.weight in FP8 .one of 1., and "
            "there is no model.layers.1.mlp.down_proj.weight_scale_inv",
        ),
        (
            [],
            ["model.layers.0.mlp.down_proj"],
            "has model.layers.0.mlp.down_proj.weight in 16 bits .one of 1., and "
            "there is a model.layers.0.mlp.down_proj.weight_scale_inv",
        ),
        ([], ["mlp"], "has model.layers.0.mlp.down_proj.weight in 16 bits .one of 6."),
        (["model.layers.0.mlp.down_proj.weight"], ["model.layers.0.mlp.down_project"], "in FP8 .one of 1."),
    ],
)
def test_server_when_its_checkpoint_has_other_scales_than_its_list_says_then_refused(
    folder, spared, lists, said
):
    with pytest.raises(ValueError, match=said):
        served(with_scales(folder, spared, lists=lists))


def test_server_when_it_runs_vllm_in_fp8_then_refused(folder):
    info = {"vllm_config": {"model_config": {"quantization": "fp8", "model": folder("fp8", **CONFIG)}}}
    with pytest.raises(
        ValueError, match="its weights are in FP8, and vLLM is not known to load new ones of a model;"
    ):
        served_quantization(VLLM, info, VLLM.served_model({}, info))
    info["vllm_config"]["model_config"]["quantization"] = None
    with pytest.raises(ValueError, match="vLLM"):
        served_quantization(VLLM, info, VLLM.served_model({}, info))


def test_flag_when_it_contradicts_what_the_server_has_then_refused(folder):
    with pytest.raises(ValueError, match="`quantized_checkpoint` .*plain has no quantization_config"):
        served("elsewhere", folder("plain"))
    for other in ({}, CONFIG | {"scale_fmt": "ue8m0"}, CONFIG | {"ignored_layers": ["mlp"]}):
        with pytest.raises(
            ValueError, match="`quantized_checkpoint` .*fp8 is quantised otherwise than .*other, which"
        ):
            served(folder("other", **other), folder("fp8", **CONFIG))
    assert served(folder("same", **CONFIG), folder("fp8", **CONFIG)) == FP8


def test_flag_when_the_server_is_on_another_host_then_the_folder_of_its_path_here_says_nothing(folder):
    info = {"quantization": None, "load_format": "auto"}
    model = SGLANG.served_model({"model_path": folder("other"), "model_type": "qwen3"}, info)
    assert served_quantization(SGLANG, info, model, folder("fp8", **CONFIG), same_host=False) == FP8


@pytest.mark.parametrize(
    ("url", "path", "said"),
    [
        ("http://127.0.0.1:1", "{here}", ""),
        (
            "http://10.0.0.7:1",
            "{here}",
            "by the folder of this name on this host its weights are not quantised",
        ),
        (
            "http://127.0.0.1:1",
            "/no/such/folder",
            "which can't be read here: its weights are taken for not quantised",
        ),
        ("http://127.0.0.1:1", "Qwen/Qwen3-8B", ""),
    ],
)
def test_servers_when_it_is_not_certain_how_one_is_quantised_then_that_is_told(
    folder, caplog, url, path, said
):
    servers = control(path.format(here=folder("plain")))
    servers.base_urls = (url,)
    assert asyncio.run(find_quantization(servers)) is None
    assert (said in caplog.text) if said else not caplog.text


def control(*paths):
    """The servers http://0, http://1, ..., started with these folders."""

    async def infos():
        return [{"quantization": None, "load_format": "auto"} for _ in paths]

    async def models():
        return [{"model_path": path, "model_type": "qwen3"} for path in paths]

    urls = tuple(f"http://{i}" for i in range(len(paths)))
    return SimpleNamespace(base_urls=urls, server_info=infos, model_info=models, engine_of=lambda url: SGLANG)


def test_servers_when_they_differ_or_one_can_not_be_sent_weights_then_it_is_named(folder):
    fp8, plain = folder("fp8", **CONFIG), folder("plain")
    assert asyncio.run(find_quantization(control(fp8, fp8))) == FP8
    with pytest.raises(RolloutProtocolError, match="http://1 .*not quantised, and those of http://0 in FP8"):
        asyncio.run(find_quantization(control(fp8, plain)))
    with pytest.raises(RolloutProtocolError, match="http://1 .*quant_method 'gptq'"):
        asyncio.run(find_quantization(control(plain, folder("gptq", quant_method="gptq"))))


@pytest.mark.parametrize("was_fp8", [True, False])
def test_server_when_restarted_in_another_form_then_the_push_refuses_it(folder, was_fp8):
    folders = {True: folder("fp8", **CONFIG), False: folder("plain")}
    before = FP8 if was_fp8 else None
    asyncio.run(check_quantization(control(folders[was_fp8]), before, None))
    with pytest.raises(RolloutProtocolError, match="http://0 .* when the run began; start it as it was"):
        asyncio.run(check_quantization(control(folders[not was_fp8]), before, None))


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_units_when_quantised_then_scales_follow_their_values_and_buckets_count_the_bytes_that_are_sent():
    units = [
        [(UP, random(256, 256))],
        [(NORM, random(256))],
        [("a.q_a_proj.weight", random(4, 4)), ("a.kv_a_proj_with_mqa.weight", random(4, 4))],
    ]
    up, norm, latent = quantised_units(units, FP8)
    values, scales = quantise_blockwise(units[0][0][1])
    assert [name for name, _ in up] == [UP, UP + SCALE] and norm == units[1]
    assert torch.equal(up[0][1].view(torch.uint8), values.view(torch.uint8)) and torch.equal(up[1][1], scales)
    assert [name.rsplit(".", 1)[1] for name, _ in latent] == ["weight", "weight" + SCALE] * 2
    # 65536 bytes of values and 4 scales of 4 bytes; of 512 bytes is the norm.
    assert len(list(buckets(quantised_units(units[:2], FP8), 65536 + 16 + 512))) == 1
    assert len(list(buckets(quantised_units(units[:2], FP8), 65536 + 16 + 511))) == 2
    assert list(quantised_units(units, None)) == units


def test_bucket_when_a_weight_is_not_finite_then_it_is_named():
    weight = random(256, 4)
    check_finite([named for unit in quantised_units([[(UP, weight)]], FP8) for named in unit])
    weight[130, 1] = torch.nan
    with pytest.raises(IncompletePush, match=rf"{UP} has numbers that are not finite .one of 1"):
        check_finite([named for unit in quantised_units([[(UP, weight)]], FP8) for named in unit])


def test_verified_weights_when_in_fp8_then_what_values_and_scales_stand_for_in_bfloat16():
    (unit,) = quantised_units([[(UP, random(130, 256))]], FP8)
    ((name, tensor),) = SGLANG.hashed(unit)
    # A code of float8 has 4 bits, and a scale of float32 24: bfloat16 keeps 8 of their product.
    assert name == UP and tensor.dtype == torch.bfloat16
    expected = unit[0][1].float()[129, 200] * unit[1][1][1, 1]
    assert tensor[129, 200] == expected.bfloat16()
    assert SGLANG.hashed([(NORM, tensor)]) == [(NORM, tensor)]
