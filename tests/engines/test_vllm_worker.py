"""The extension that runs inside vLLM: what it needs, which updates it refuses, how tensors travel."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr import __version__
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.vllm.checks import bucket_problem, config_problem, incomplete, problem
from megatron_rl_corr.engines.vllm.tensors import decoded, entries, serialized
from megatron_rl_corr.engines.vllm.worker_code import _ENGINES, _FILES, check_code, worker_code

VLLM = load_engine("vllm")

IMPORT = """
import importlib.abc, sys, types


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] not in {
            "megatron_rl_corr",
            "torch",
            "numpy",
            *sys.stdlib_module_names,
            *ALLOWED,
        }:
            if name.split(".")[0] in OURS:
                raise ImportError("blocked: " + name)


ALLOWED, OURS = (
    (),
    {"aiohttp", "orjson", "yaml", "megatron", "transformers", "pyarrow", "matplotlib", "safetensors"},
)


class StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(
            name,
            type(
                name,
                (),
                {
                    "_registry": {},
                    "register_engine": print,
                    "__class_getitem__": classmethod(lambda cls, _: cls),
                },
            ),
        )


for name in (
    "vllm",
    "vllm.config",
    "vllm.distributed",
    "vllm.distributed.weight_transfer",
    "vllm.distributed.weight_transfer.base",
    "vllm.distributed.weight_transfer.factory",
    "vllm.model_executor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.model_loader.reload",
    "vllm.model_executor.model_loader.reload.meta",
):
    sys.modules[name] = StandIn(name)
import contextlib

sys.modules["vllm.config"].set_current_vllm_config = contextlib.nullcontext
sys.meta_path.insert(0, Blocked())
from megatron_rl_corr.engines.vllm.worker import Extension

worker = Extension()
worker.vllm_config = worker.weight_transfer_engine = None
methods = [name for name in dir(Extension) if name.startswith("rl_corr")]
sys.modules["safetensors"] = StandIn("safetensors")  # vLLM has it
arguments = {
    "rl_corr_bucket": [[]],
    "rl_corr_begin_changes": ["1", "0", 1],
    "rl_corr_load_folder": ["/"],
    "rl_corr_leave": ["x"],
}
print({name: getattr(worker, name)(*arguments.get(name, [])) for name in methods})
"""


def test_extension_when_imported_beside_vllm_then_it_needs_torch_and_the_standard_library_alone():
    ran = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "rl_corr_begin" in ran.stdout and "rl_corr <class" in ran.stdout  # the backend was registered
    # A method that fails answers and raises nothing: an exception puts every later answer of other
    # ranks one call late.
    answers = eval(ran.stdout.splitlines()[-1])
    assert len(answers) == 9
    for answer in answers.values():
        assert answer == {
            "error": 'start the server with --weight-transfer-config \'{"backend": "rl_corr"}\''
        }


def test_answer_when_ranks_have_refused_then_error_says_why_once():
    refused = json.dumps({"results": [{"error": "why"}, {"error": "why"}, {}]}).encode()
    with pytest.raises(
        RolloutServerError, match="answered POST /collective_rpc with HTTP 400: why$"
    ) as error:
        VLLM.parse_control(refused, server="http://a", endpoint="/collective_rpc", status=200)
    assert error.value.status == 400
    assert VLLM.parse_control(b'{"results": ["None"]}', server="u", endpoint="e", status=200) == {
        "results": ["None"]
    }


PLAIN = {
    "weight_transfer_config": SimpleNamespace(backend="rl_corr"),
    "model_config": SimpleNamespace(quantization=None),
    "kv_transfer_config": None,
    "lora_config": None,
    "parallel_config": SimpleNamespace(data_parallel_size=1, enable_eplb=False, pipeline_parallel_size=1),
}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"weight_transfer_config": None}, '--weight-transfer-config \'{"backend": "rl_corr"}\''),
        (
            {"weight_transfer_config": SimpleNamespace(backend="nccl")},
            "start the server with --weight-transfer-config",
        ),
        ({"model_config": SimpleNamespace(quantization="fp8")}, r"quantised weights \(fp8\) are not proven"),
        (
            {"kv_transfer_config": SimpleNamespace(kv_connector="LMCacheConnectorV1")},
            "its LMCacheConnectorV1 keeps",
        ),
        ({"lora_config": object()}, "--enable-lora"),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, "without --data-parallel-size"),
        ({"parallel_config": SimpleNamespace(data_parallel_size=1, enable_eplb=True)}, "--enable-eplb"),
        (
            {
                "parallel_config": SimpleNamespace(
                    data_parallel_size=1, enable_eplb=False, pipeline_parallel_size=2
                )
            },
            "pipeline stages are not proven",
        ),
    ],
)
def test_server_when_started_so_that_an_update_is_not_proven_then_the_flag_is_named(changed, told):
    assert config_problem(SimpleNamespace(**PLAIN)) is None
    assert re.search(told, config_problem(SimpleNamespace(**PLAIN | changed)))


HELD = {
    "model.embed_tokens.weight": [83, 4],
    "model.norm.weight": [4],
    **{
        f"model.layers.0.self_attn.{kind}_proj.{what}": [4, 4][: 2 if what == "weight" else 1]
        for kind in "qkv"
        for what in ("weight", "bias")
    },
    **{
        f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight": [8, 4]
        for expert in range(2)
        for kind in ("gate", "up", "down")
    },
}


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
        (
            HELD | {"model.norm.weight": [5]},
            r"model.norm.weight has shape \[5\], and \[4\] in its checkpoint",
        ),
        (
            without("model.layers.0.self_attn.v_proj.bias"),
            "qkv_proj is one layer there, of which .*v_proj.bias would",
        ),
        (
            without("model.layers.0.mlp.experts.1.up_proj.weight"),
            "experts is one layer there, of which .*1.up_proj",
        ),
        (
            without("model.layers.0.mlp.experts.0.down_proj.weight"),
            "experts is one layer there, of which .*0.down_pro",
        ),
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
    assert incomplete(HELD, set(HELD) - {"model.norm.weight"}).startswith(
        "1 of 14 tensors have not come: model"
    )


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
    def buckets(*entries):
        return VLLM.update_weights_from_tensor(entries).json["kwargs"]["buckets"]

    assert buckets("a", "a") == [{"serialized": "a"}]
    assert buckets("a", "b") == [{"serialized": "a"}, {"serialized": "b"}]


def test_handle_when_the_senders_gpu_is_another_one_of_this_server_then_it_is_opened_there(monkeypatch):
    uuids, opened = ["GPU-own", "GPU-trainer"], []
    fields = [None, [1], [1], 0, None, None, "GPU-trainer", "", 0, 0, 0, "", 0, "", True]

    class Opened:
        def to(self, device, copy):
            return device, copy

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=uuids[number])
    )
    monkeypatch.setattr(
        "torch.multiprocessing.reductions.rebuild_cuda_tensor",
        lambda *fields: opened.append(fields) or Opened(),
    )
    entry = {"name": "x", "dtype": "bfloat16", "shape": [1], "handle": fields}
    assert decoded(entry, "cuda:0") == ("cuda:0", True)  # a copy, on the rank's own GPU
    assert opened[0][6] == 1
    uuids.pop()
    with pytest.raises(
        ValueError, match="x lies on GPU GPU-trainer, and this server sees GPU-own; .*CUDA_VISIB"
    ):
        decoded(entry, "cuda:0")


def test_code_when_it_is_not_the_trainers_then_refused_with_both_names():
    code = worker_code()
    files = {path.name for pattern in _FILES for path in _ENGINES.glob(pattern)}
    assert {"weight_changes.py", "changes.py", "loading.py", "checks.py"} <= files
    assert re.fullmatch(re.escape(__version__) + "-[0-9a-f]{8}", code)
    begin, folder = VLLM.begin_weight_update({}), VLLM.update_weights_from_disk("folder")
    assert [request.json["kwargs"]["code"] for request in (begin, folder)] == [code, code]
    check_code(code, code)
    for theirs, named in (("0.0.9-deadbeef", "0.0.9-deadbeef"), (None, "older")):
        with pytest.raises(
            ValueError, match=f"is of megatron-rl-corr {code}, and the trainer's is {named}; install"
        ):
            check_code(code, theirs)


def test_changes_when_the_server_quantises_then_refused_by_name():
    plain = {"vllm_config": {"model_config": {"quantization": None}}}
    assert VLLM.changes_problem(plain) is None
    fp8 = {"vllm_config": {"model_config": {"quantization": "fp8"}}}
    assert VLLM.changes_problem(fp8) == (
        "it quantises what it is sent, all of a tensor at once; use `push` full"
    )


def test_pause_modes_then_retract_computes_keys_anew_and_in_place_keeps_them():
    ends = [VLLM.pause_generation(mode).endpoint for mode in ("abort", "in_place", "retract")]
    assert ends == ["/pause?mode=abort", "/pause?mode=keep&clear_cache=false", "/pause?mode=keep"]
    info = {"vllm_config": {"cache_config": {"enable_prefix_caching": True}}}
    assert "--no-enable-prefix-caching" in VLLM.pause_problem(
        info, "in_place", keyed_cache=False, samples_ahead=True
    )
    assert VLLM.pause_problem(info, "in_place", keyed_cache=True, samples_ahead=True) is None
    assert VLLM.pause_problem(info, "retract", keyed_cache=False, samples_ahead=True) is None


def test_checksums_when_answered_then_parameters_have_the_names_that_senders_know():
    rank = {
        "device": "cpu",
        "tp_rank": 0,
        "tp_size": 1,
        "expert_parallel": False,
        "dtype": "bfloat16",
        "quantization": None,
        "checksums": {
            "a.mlp.experts.routed_experts.w13_weight": "ab",
            "a.self_attn.fused_qkv_a_proj.weight": "cd",
            "a.self_attn.mla_attn.mla_attn.W_UK_T": "",
            "a.self_attn.mla_attn.mla_attn.W_UV": "",
        },
    }
    server = VLLM.checksums("http://a", {}, {"results": [rank]})
    latent, place = VLLM.server_parameter("a.self_attn.kv_a_proj_with_mqa.weight")
    assert server.ranks == ((0, {"a.mlp.experts.w13_weight": "ab", latent: "cd"}),) and place == (-1, 1)
    assert server.layout_is_known
