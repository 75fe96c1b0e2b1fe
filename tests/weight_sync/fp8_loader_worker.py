"""Sends FP8 weights to SGLang's own models through its own loaders, in this process and without a server.

fp8_loader_worker.py TP PLAIN_DIR FP8_DIR [PLAIN_DIR FP8_DIR ...]  prints a line of JSON for each pair, of the first of
TP tensor-parallel ranks: see `judge`.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.distributed.device_communicators import pynccl
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader import get_model
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.weight_checker import WeightChecker

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.types import ServerChecksums
from megatron_rl_corr.models.architectures import FAMILIES, ends
from megatron_rl_corr.models.hf_checkpoint import read_config
from megatron_rl_corr.models.quantization import SCALE, BlockFP8
from megatron_rl_corr.weight_sync.coverage import make_coverage
from megatron_rl_corr.weight_sync.export import buckets
from megatron_rl_corr.weight_sync.quantization import quantised_units
from megatron_rl_corr.weight_sync.verify import make_verifiers
from tools.cpu import sglang_arguments
from tools.local_server import free_port

ENGINE = load_engine("sglang")


def load(path, rank, size, port):
    """As a server's scheduler does."""
    flags = ["--model-path", str(path), "--dtype", "float32", "--tp-size", str(size), *sglang_arguments()]
    args = prepare_server_args(flags)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank))
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=port)
    config = ModelConfig.from_server_args(args)
    model = get_model(
        model_config=config, load_config=LoadConfig(load_format="auto"),
        device_config=DeviceConfig(device="cpu", gpu_id=rank),
    )  # fmt: skip
    updater = WeightUpdater(
        tp_rank=rank, device="cpu", gpu_id=rank, model_config=config, custom_weight_loaders={}, get_model=lambda: model,
        update_model_fields=None, recapture_cuda_graph=None, get_model_runner=None,
    )  # fmt: skip
    return model, updater


def state(model):
    """What a forward pass may read: parameters, and what SGLang derives from them; not the scales of a KV cache."""
    derived = {
        f"{path}.{name}": value for path, module in model.named_modules() for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }  # fmt: skip
    found = dict(model.named_parameters()) | derived
    return {name: tensor for name, tensor in found.items() if not name.endswith((".k_scale", ".v_scale"))}


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.float(), other.float())


def units_of(weights, config):
    """As an exporter has them: what servers fuse and want in one request stands together."""
    rows = [*ends(config, config["vocab_size"]), *(r for part in FAMILIES[config["model_type"]] for r in part(config))]
    left, units = dict(weights), []
    for layer in range(config["num_hidden_layers"]):
        for together in {row.sent_with for row in rows if row.sent_with}:
            names = [name.format(L=layer) for name in together]
            units.append([(name, left.pop(name)) for name in names])
    return units + [[named] for named in left.items()]


def judge(plain, fp8, rank, size, port):
    """What the loader makes of a push, beside what it makes of the FP8 folder itself.

    wrong: parameters that differ. unused: tensors that changed no parameter of any rank. in_fp8: what SGLang holds in
    FP8, by its own layers, and what was sent so. proven, held: parameters whose checksums were as expected, and all.
    coverage: what the count of parameters says.
    """
    model, updater = load(fp8, rank, size, port)
    expected = {name: tensor.clone() for name, tensor in state(model).items()}
    for tensor in state(model).values():
        tensor.data.fill_(7)
    config, quantization = read_config(plain), BlockFP8.from_config(read_config(fp8))
    weights = {n: w for n, w in load_file(plain / "model.safetensors").items() if "rotary_emb" not in n}
    requests = list(buckets(quantised_units(units_of(weights, config), quantization), 1))
    coverage, verifier = make_coverage(plain, quantization), make_verifiers("checksum", plain, {"s": ENGINE})["s"]
    unused = []
    updater.begin_weight_update()
    for bucket in requests:
        coverage.count(bucket)
        verifier.keep(bucket, "1")
        before = {name: tensor.clone() for name, tensor in model.named_parameters()}
        done, why = updater.load_weights_from_distributed(bucket)
        assert done, why
        changed = sum(not same(before[name], tensor) for name, tensor in model.named_parameters())
        counts = [None] * size
        dist.all_gather_object(counts, changed)
        fused = len({ENGINE.server_parameter(name)[0] for name, _ in bucket})
        if max(counts) < fused:
            unused.append([name for name, _ in bucket])
    updater.end_weight_update(run_post_load=False)
    sums = WeightChecker(get_model=lambda: model).handle("checksum", role="target")["checksums"]
    all_sums = [None] * size
    dist.all_gather_object(all_sums, sums)
    layout = (size, 1, 1, "float32", "cpu", 1)
    shown = ServerChecksums("http://a", "cpu", size, layout, "fp8", tuple(enumerate(all_sums)))
    coverage_said = None
    try:
        if size == 1:
            coverage.all_reduce_check()
        coverage.check_servers([shown], ENGINE)
    except RolloutError as error:
        coverage_said = str(error)
    sent = {ENGINE.server_parameter(name)[0] for bucket in requests for name, _ in bucket if name.endswith(SCALE)}
    held = {name for name, tensor in model.named_parameters() if name.endswith(SCALE)}
    return {
        "wrong": sorted(name for name, tensor in state(model).items() if not same(tensor, expected[name])),
        "unused": unused, "sent": sorted(sent), "in_fp8": sorted(held), "proven": verifier.compare([shown]),
        "held": len(sums), "coverage": coverage_said,
    }  # fmt: skip


def main():
    size, folders = int(sys.argv[1]), list(map(Path, sys.argv[2:]))
    if size > 1:  # SGLang wants a core named for each rank
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(size)))
        pynccl.PyNcclCommunicator = lambda **options: SimpleNamespace(disabled=True)  # it asks for a GPU
    for plain, fp8 in zip(folders[::2], folders[1::2], strict=True):
        port, children = free_port(), []
        for rank in range(size):
            if child := os.fork():
                children.append(child)
                continue
            found = judge(plain, fp8, rank, size, port)
            if rank == 0:
                print("RESULT " + json.dumps({"model": fp8.name} | found), flush=True)
            dist.destroy_process_group()
            os._exit(0)
        for child in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, fp8


main()
