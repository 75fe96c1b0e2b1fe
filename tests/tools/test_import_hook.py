"""The import hook: inert unless asked for, cheap at the start, and changing just what its list says."""

import json
import runpy
import subprocess
import sys

import pytest

from tests.preloaded import run_preloaded
from tools.cpu.process_environment import ENGINES, VARIABLE, environment, gpu_available, replacements

pytestmark = pytest.mark.skipif(gpu_available(), reason="the hook is inert where there is a GPU")

LOADED = (
    "import json, sys; print(json.dumps([[type(f).__name__ for f in sys.meta_path], 'torch' in sys.modules]))"
)


def run(code: str, variables: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=variables, capture_output=True, text=True
    )


def output(code: str, variables: dict[str, str]):
    answer = run(code, variables)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


def preloaded_output(code: str, engine: str, folder):
    """What `output` reads, of a process that has imported the engine under the hook."""
    (folder / "code.py").write_text(code)
    answer = run_preloaded([folder / "code.py"], engine=engine)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


def test_hook_when_variable_is_unset_then_python_is_as_it_was():
    variables = environment("megatron")
    del variables[VARIABLE]
    finders, torch_loaded = output(LOADED, variables)
    assert "_Waiting" not in finders and not torch_loaded


@pytest.mark.parametrize("engine", ["megatron", "sglang", "vllm"])
def test_hook_when_engine_is_not_imported_then_nothing_is_loaded(engine):
    finders, torch_loaded = output(LOADED, environment(engine))
    assert finders[0] == "_Waiting" and not torch_loaded


@pytest.mark.parametrize("value", ["slime", "", "Megatron"])
def test_hook_when_value_is_unknown_then_the_process_ends(value):
    answer = run("print('went on')", {**environment("megatron"), VARIABLE: value})
    assert answer.returncode == 2 and answer.stdout == ""
    assert VARIABLE in answer.stderr and "megatron, sglang" in answer.stderr and repr(value) in answer.stderr


SNAPSHOT = """
import inspect, json, sys
import torch, torch.distributed, torch.utils.cpp_extension
import tools.cpu.replacement as replacement

OWNERS = {"torch": torch, "torch.Tensor": torch.Tensor, "torch.nn.Module": torch.nn.Module,
          "torch.cuda": torch.cuda, "torch.cuda.random": torch.cuda.random, "torch.cuda.nvtx":
          torch.cuda.nvtx, "torch.utils.cpp_extension": torch.utils.cpp_extension,
          "torch.distributed": torch.distributed, "torch.backends": torch.backends,
          "torch.distributed.distributed_c10d": torch.distributed.distributed_c10d}
def attributes():  # of a class also those it inherits
    return {f"{o}.{n}": inspect.getattr_static(owner, n) for o, owner in OWNERS.items() for n in dir(owner)}
before = attributes()
import megatron.core, megatron.training
from megatron.core.models.gpt import GPTModel
after = attributes()
other = sorted(k for k in before if k in after and before[k] is not after[k] and callable(after[k]))
changed = [k for k in other if hasattr(after[k], replacement.MARK)]
foreign = [k for k in other if not hasattr(after[k], replacement.MARK)]

from tools.cpu.megatron_replacements import EARLY, LATE
ours = {id(getattr(*r.locate())) for r in (*EARLY, *LATE)}
strays = [f"{m}.{n}" for m, module in list(sys.modules.items()) if m.startswith("megatron.") and module
          for n, v in list(vars(module).items()) if hasattr(type(v), "__call__")
          and getattr(v, replacement.MARK, False) is True and id(v) not in ours]
print(json.dumps({"changed": changed, "foreign": foreign, "strays": strays,
                  "missing": [r.target for r in (*EARLY, *LATE) if not r.is_applied()]}))
"""


def test_megatron_when_imported_under_the_hook_then_the_list_is_what_is_replaced():
    report = output(SNAPSHOT, environment("megatron"))
    listed = {target for target, _ in replacements("megatron")}
    assert report["missing"] == []
    assert report["strays"] == []
    assert report["foreign"] == []
    assert set(report["changed"]) == {target for target in listed if target.startswith("torch.")}


def test_megatron_when_hook_is_absent_then_nothing_is_replaced():
    variables = environment("megatron")
    del variables[VARIABLE]
    code = """
import json, torch, megatron.core.transformer.moe.moe_utils
from tools.cpu.megatron_replacements import EARLY, LATE
from tools.cpu.replacement import MissingName  # nothing in the installed release, where the name is bound
import megatron.training.initialize
print(json.dumps([r.target for r in (*EARLY, *LATE) if r.is_applied() and not isinstance(r, MissingName)]))
"""
    assert output(code, variables) == []


def test_finder_when_torch_sees_a_gpu_then_it_replaces_nothing(monkeypatch):
    import torch

    from tools.cpu.import_hook import ReplacingFinder

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for engine in ENGINES:
        finder = ReplacingFinder(engine)
        assert finder.early == [] and not finder.late and finder.stub is None


def test_sglang_when_imported_under_the_hook_then_the_list_is_what_is_replaced(tmp_path):
    code = """
import json, sys
import sglang.srt.mem_cache.pool_host.common
from tools.cpu.sglang_replacements import EARLY, LATE
import sgl_kernel
from sgl_kernel.some.module import some_kernel

try:
    some_kernel(1)
except RuntimeError as error:
    said = str(error)
import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32

seeds = torch.tensor([0, 2**32 + 1, 2**62 + 1, 2**63 - 1, -7]).to(torch.uint64)
hashed = murmur_hash32(
    seeds, torch.tensor([0, 5, 100, 2**31 - 1, 7]), torch.tensor([0, 501, 151002])
).tolist()
from sglang.kernels.ops.elementwise.elementwise import fused_gate_sigmoid_mul_add
from sglang.srt.models.deepseek_common import attention_backend_handler as ways

summed = torch.tensor([[10.0, 20.0], [10.0, 20.0]])
hidden, shared = torch.tensor([[1.0, 2.0], [0.0, 800.0]]), torch.tensor([[2.0, 4.0], [2.0, 4.0]])
fused_gate_sigmoid_mul_add(hidden, torch.tensor([0.5, -0.25]), shared, summed)
get_handler = ways.AttentionBackendRegistry.get_handler
latent = get_handler("torch_native") is ways._dispatch_mla_subtype
latent = latent and get_handler("triton") is ways.handle_attention_triton
print(
    json.dumps(
        {
            "missing": [r.target for r in (*EARLY, *LATE) if not r.is_applied()],
            "said": said,
            "hash": hashed,
            "gated": summed.tolist(),
            "latent": latent,
        }
    )
)
"""
    report = preloaded_output(code, "sglang", tmp_path)
    assert report["hash"] == [  # of SGLang's Triton kernel, run by Triton's interpreter
        [2167721464, 4176715095, 3842988096],
        [1883961327, 2072097339, 1608137182],
        [3622880924, 1197178069, 440920767],
        [1367382394, 1966476278, 266885461],
        [3714741056, 1455808999, 3730616299],
    ]
    # sigmoid(1 * 0.5 - 2 * 0.25) = 1/2 of [2, 4] is added, and sigmoid(-200) = 0
    assert report["gated"] == [[11, 22], [10, 20]] and report["latent"]
    assert report["missing"] == []
    assert report["said"].startswith("sgl_kernel.some.module.some_kernel needs a GPU")
    listed = [target for target, _ in replacements("sglang")]
    fp8 = "sglang.srt.layers.quantization.fp8"
    native = "sglang.srt.layers.attention.torch_native_backend"
    updater = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    assert [target for target in listed if target.startswith(fp8)] == [
        f"{fp8}.Fp8LinearMethod.process_weights_after_loading_block_quant",
        f"{fp8}.Fp8LinearMethod.apply",
        f"{fp8}.Fp8MoEMethod.process_weights_after_loading_block_quant",
        f"{fp8}.Fp8MoEMethod.apply",
        f"{fp8}.Fp8Config.get_supported_act_dtypes",
    ]
    kernels, delta_nets = "sglang.kernels.ops", "sglang.srt.layers.attention.linear"
    assert [target for target in listed if not target.startswith((fp8, "torch.distributed.broadcast"))] == [
        "sgl_kernel",
        "torch.distributed.distributed_c10d.ProcessGroupGloo",
        "torch.ops.sgl_kernel.fused_qk_gemma_rmsnorm_cpu",
        "torch.ops.sgl_kernel.fused_qk_gemma_rmsnorm_with_gate_cpu",
        "torch.ops.sgl_kernel.fused_sigmoid_mul_cpu",
        "torch.ops.sgl_kernel.fused_qkvzba_split_reshape_cat_contiguous_cpu",
        "torch.ops.sgl_kernel.fused_gdn_gating_cpu",
        "torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu",
        "torch.get_device_module",
        "torch.cuda.synchronize",
        "sglang.srt.entrypoints.engine._set_envs_and_config",
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register",
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        "sglang.srt.arg_groups.overrides._deterministic_attention_backend",
        "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode",
        f"{native}.scaled_dot_product_attention",
        f"{kernels}.elementwise.elementwise.fused_gate_sigmoid_mul_add",
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler",
        f"{delta_nets}.gdn_backend.causal_conv1d_fn",
        f"{delta_nets}.gdn_backend.causal_conv1d_update",
        f"{delta_nets}.kernels.gdn_triton.chunk_gated_delta_rule",
        f"{kernels}.attention.fla.layernorm_gated.RMSNorm.forward",
        f"{kernels}.attention.fla.fused_norm_gate.FusedRMSNormGated.forward",
        "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create",
        f"{updater}.release_memory_occupation",
        f"{updater}.resume_memory_occupation",
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        f"{native}.TorchNativeAttnBackend.forward_extend",
        f"{native}.TorchNativeAttnBackend.forward_decode",
        f"{native}.scaled_dot_product_attention",
        "sglang.srt.arg_groups.model_hook.is_mps",
        "sglang.srt.arg_groups.model_hook.use_mlx",
    ]


def test_list_when_printed_then_every_target_and_reason_is_there(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tools.cpu"])
    runpy.run_module("tools.cpu", run_name="__main__")
    printed = capsys.readouterr().out
    for engine in ENGINES:
        for target, why in replacements(engine):
            assert f"    {target}\n" in printed and f"  {why}:\n" in printed


def test_devices_when_megatron_is_imported_then_cuda_is_the_cpu_and_other_devices_are_themselves(tmp_path):
    code = """
import json, torch, megatron.core
with torch.device("meta"):
    inside = torch.empty(2)
made = [torch.zeros(2, device="cuda"), torch.ones(2, device=torch.device("cuda")), torch.ones(2).to("cuda"),
        torch.ones(2).cuda(), torch.ones(2).to(device="cuda:0", dtype=torch.float64), inside,
        torch.empty(2, device="meta"), torch.arange(3, device=torch.cuda.current_device(), pin_memory=True)]
print(json.dumps([str(t.device) for t in made] + [str(made[4].dtype), made[0].type()]))
"""
    expected = ["cpu"] * 5 + ["meta"] * 2 + ["cpu", "torch.float64", "torch.cuda.FloatTensor"]
    assert preloaded_output(code, "megatron", tmp_path) == expected


def test_transformers_when_megatron_is_imported_before_then_its_rotary_frequencies_are_right(
    tiny_moe_dir, tmp_path
):
    code = f"""
import json, megatron.core, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(tiny_moe_dir)!r})
print(json.dumps(model.model.rotary_emb.inv_freq.tolist()))
"""
    # 10000 ** (-2 i / 32) for head size 32
    assert preloaded_output(code, "megatron", tmp_path) == pytest.approx([10 ** (-i / 4) for i in range(16)])


def test_vllm_when_imported_under_the_hook_then_its_list_is_replaced(tmp_path):
    code = """
import json, vllm.v1.engine.core
from tools.cpu.vllm_replacements import EARLY, LATE
print(json.dumps([r.is_applied() for r in (*EARLY, *LATE)]))
"""
    applied = preloaded_output(code, "vllm", tmp_path)
    assert applied and all(applied)


def test_groups_when_many_then_one_thread_serves_them_and_each_keeps_its_timeout(tmp_path):
    code = """
import json, os, time
from datetime import timedelta
import torch, torch.distributed as dist
import megatron.core

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
groups = [dist.new_group([0], timeout=timedelta(seconds=9)), *(dist.new_group([0]) for _ in range(7))]
ones = torch.ones(2)
for group in groups:
    dist.all_reduce(ones, group=group)


def serving():
    names = [
        open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")
    ]
    return names.count("gloo_tcp_loop")


end = time.monotonic() + 60
while not serving() and time.monotonic() < end:
    time.sleep(0.01)  # a thread names itself, once it has its turn
time.sleep(0.5)  # for others, if there were any
backends = [group._get_backend(torch.device("cpu")) for group in [dist.group.WORLD, *groups[:2]]]
timeouts = [backend.options._timeout.seconds for backend in backends]
print(json.dumps([ones.tolist(), serving(), timeouts]))
"""
    # torch does not hand on the first group's timeout
    assert preloaded_output(code, "megatron", tmp_path) == [[1.0, 1.0], 1, [77, 9, 1800]]


def test_process_of_an_engine_then_its_threads_do_not_preempt_each_other(tmp_path):
    code = "import os; print(os.sched_getscheduler(0) == os.SCHED_BATCH)"
    with_engine, without = (
        environment("megatron"),
        {n: v for n, v in environment("megatron").items() if n != VARIABLE},
    )
    assert [run(code, variables).stdout.split() for variables in (with_engine, without)] == [
        ["True"],
        ["False"],
    ]
