"""The extension that runs inside vLLM: what it needs, which updates it refuses, how tensors travel."""

import re
import subprocess
import sys

import pytest
import torch

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.vllm.checks import bucket_problem, incomplete, problem
from megatron_rl_corr.engines.vllm.tensors import decoded, entries, serialized

VLLM = load_engine("vllm")

IMPORT = """
import importlib.abc, sys, types
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] not in {"megatron_rl_corr", "torch", "numpy", *sys.stdlib_module_names, *ALLOWED}:
            if name.split(".")[0] in OURS:
                raise ImportError("blocked: " + name)
ALLOWED, OURS = (), {"aiohttp", "orjson", "yaml", "megatron", "transformers", "pyarrow", "matplotlib", "safetensors"}
class StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, type(name, (), {"_registry": {}, "register_engine": print,
                                                             "__class_getitem__": classmethod(lambda cls, _: cls)}))
for name in ("vllm", "vllm.config", "vllm.distributed", "vllm.distributed.weight_transfer",
             "vllm.distributed.weight_transfer.base", "vllm.distributed.weight_transfer.factory",
             "vllm.model_executor", "vllm.model_executor.model_loader", "vllm.model_executor.model_loader.reload",
             "vllm.model_executor.model_loader.reload.meta"):
    sys.modules[name] = StandIn(name)
sys.meta_path.insert(0, Blocked())
from megatron_rl_corr.engines.vllm.worker import Extension
print([name for name in dir(Extension) if name.startswith("rl_corr")])
"""


def test_extension_when_imported_beside_vllm_then_it_needs_torch_and_the_standard_library_alone():
    ran = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "rl_corr_begin" in ran.stdout and "rl_corr <class" in ran.stdout  # the backend was registered


HELD = {
    "model.embed_tokens.weight": [83, 4], "model.norm.weight": [4],
    **{f"model.layers.0.self_attn.{kind}_proj.{what}": [4, 4][: 2 if what == "weight" else 1]
       for kind in "qkv" for what in ("weight", "bias")},
    **{f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight": [8, 4] for expert in range(2)
       for kind in ("gate", "up", "down")},
}  # fmt: skip


def without(*names):
    return {name: shape for name, shape in HELD.items() if name not in names}


def test_update_when_all_or_whole_layers_are_sent_then_no_problem():
    assert problem(HELD, HELD) is None
    assert problem({"model.norm.weight": [4]}, HELD) is None
    assert problem(without(*(name for name in HELD if "experts" in name)), HELD) is None


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (HELD | {"model.layers.7.x": [1]}, "its checkpoint has none of model.layers.7.x;"),
        (HELD | {"model.norm.weight": [5]}, r"model.norm.weight has shape \[5\], and \[4\] in its checkpoint"),
        (without("model.layers.0.self_attn.v_proj.bias"), "qkv_proj is one layer there, of which .*v_proj.bias would"),
        (without("model.layers.0.mlp.experts.1.up_proj.weight"), "experts is one layer there, of which .*1.up_proj"),
        (without("model.layers.0.mlp.experts.0.down_proj.weight"), "experts is one layer there, of which .*0.down_pro"),
        ({}, "no tensors"),
    ],
)
def test_update_when_it_does_not_fit_then_the_tensor_is_named(sent, told):
    assert re.search(told, problem(sent, HELD))


def test_bucket_when_it_is_no_part_of_the_update_then_the_tensor_is_named():
    assert bucket_problem({"model.norm.weight": [4]}, HELD, set()) is None
    assert "sent before" in bucket_problem({"model.norm.weight": [4]}, HELD, {"model.norm.weight"})
    assert "not part" in bucket_problem({"x": [4]}, HELD, set())
    assert "has shape [3]" in bucket_problem({"model.norm.weight": [3]}, HELD, set())
    assert incomplete(HELD, set(HELD)) is None
    assert incomplete(HELD, set(HELD) - {"model.norm.weight"}).startswith("1 of 14 tensors have not come: model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_when_sent_as_text_then_the_same_bits_in_the_same_shape(dtype):
    bucket = [("a", torch.randn(3, 4, dtype=dtype).t()), ("scalar", torch.tensor(2.5, dtype=dtype))]
    for entry, (name, tensor) in zip(entries(serialized(bucket)), bucket, strict=True):
        back = decoded(entry, torch.device("cpu"))
        assert entry["name"] == name and back.dtype == dtype and torch.equal(back, tensor)


def test_tensors_when_of_a_type_that_is_not_sent_then_refused():
    (entry,) = entries(serialized([("a", torch.zeros(2))]))
    with pytest.raises(ValueError, match="not as 'save'"):
        decoded(entry | {"dtype": "save"}, torch.device("cpu"))


def test_bucket_when_every_rank_gets_the_same_text_then_it_is_sent_once():
    assert VLLM.update_weights_from_tensor(["a", "a"]).json == {"update_info": {"serialized": "a"}}
    assert VLLM.update_weights_from_tensor(["a", "b"]).json["update_info"] == [{"serialized": "a"}, {"serialized": "b"}]


def test_pause_modes_then_retract_computes_keys_anew_and_in_place_keeps_them():
    ends = [VLLM.pause_generation(mode).endpoint for mode in ("abort", "in_place", "retract")]
    assert ends == ["/pause?mode=abort", "/pause?mode=keep&clear_cache=false", "/pause?mode=keep"]
    info = {"vllm_config": {"cache_config": {"enable_prefix_caching": True}}}
    assert "--no-enable-prefix-caching" in VLLM.pause_problem(info, "in_place", keyed_cache=False, samples_ahead=True)
    assert VLLM.pause_problem(info, "in_place", keyed_cache=True, samples_ahead=True) is None
    assert VLLM.pause_problem(info, "retract", keyed_cache=False, samples_ahead=True) is None


def test_checksums_when_answered_then_experts_have_the_names_that_senders_know():
    rank = {"device": "cpu", "tp_rank": 0, "tp_size": 1, "expert_parallel": False, "dtype": "bfloat16",
            "quantization": None,
            "checksums": {"model.layers.0.mlp.experts.routed_experts.w13_weight": "ab"}}  # fmt: skip
    server = VLLM.checksums("http://a", {}, {"results": [rank]})
    assert server.ranks == ((0, {"model.layers.0.mlp.experts.w13_weight": "ab"}),) and server.layout_is_known
