"""Sends FP8 weights to SGLang's own models through its own loaders, in this process and without a server.

fp8_loader_worker.py TP PLAIN_DIR FP8_DIR [PLAIN_DIR FP8_DIR ...]  prints a line of JSON for each pair, of
the first of TP tensor-parallel ranks: see `judge`.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sglang.srt.distributed.device_communicators import pynccl
from sglang.srt.utils.weight_checker import WeightChecker

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.types import ServerChecksums
from megatron_rl_corr.models.hf_checkpoint import read_config
from megatron_rl_corr.models.quantization import SCALE, BlockFP8
from megatron_rl_corr.weight_sync.coverage import make_coverage
from megatron_rl_corr.weight_sync.export import buckets
from megatron_rl_corr.weight_sync.quantization import quantised_units
from megatron_rl_corr.weight_sync.verify import make_verifiers
from tests.sglang_loader import load_model, start_rank, units_of
from tools.local_server import free_port

ENGINE = load_engine("sglang")


def state(loaded):
    """What a forward pass may read, but for the scales of a KV cache."""
    return {
        name: tensor for name, tensor in loaded.state().items() if not name.endswith((".k_scale", ".v_scale"))
    }


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.float(), other.float())


def judge(plain, fp8, rank, size, port):
    """What the loader makes of a push, beside what it makes of the FP8 folder itself.

    wrong: parameters that differ. unused: tensors that changed no parameter of any rank. in_fp8: what
    SGLang holds in FP8, by its own layers, and what was sent so. proven, held: parameters whose checksums
    were as expected, and all. coverage: what the count of parameters says.
    """
    loaded = load_model(start_rank(fp8, rank, size, port), rank)
    model, expected = loaded.model, {name: tensor.clone() for name, tensor in state(loaded).items()}
    loaded.forget()
    config, quantization = read_config(plain), BlockFP8.from_config(read_config(fp8))
    weights = {n: w for n, w in load_file(plain / "model.safetensors").items() if "rotary_emb" not in n}
    requests = list(buckets(quantised_units(units_of(weights, config), quantization), 1))
    coverage, verifier = (
        make_coverage(plain, quantization),
        make_verifiers("checksum", plain, {"s": ENGINE})["s"],
    )
    unused = []
    loaded.updater.begin_weight_update()
    for bucket in requests:
        coverage.count(bucket)
        verifier.keep(bucket, "1")
        before = {name: tensor.clone() for name, tensor in model.named_parameters()}
        loaded.load(bucket)
        changed = sum(not same(before[name], tensor) for name, tensor in model.named_parameters())
        counts = [None] * size
        dist.all_gather_object(counts, changed)
        fused = len({ENGINE.server_parameter(name)[0] for name, _ in bucket})
        if max(counts) < fused:
            unused.append([name for name, _ in bucket])
    loaded.updater.end_weight_update(run_post_load=False)
    sums = WeightChecker(get_model=lambda: model).handle("checksum", role="target")["checksums"]
    all_sums = [None] * size
    dist.all_gather_object(all_sums, sums)
    layout = (size, 1, 1, "float32", "cpu", 1)
    shown = ServerChecksums("http://a", "cpu", size, layout, "fp8", tuple(enumerate(all_sums)))
    coverage_said = None
    try:
        if size == 1:
            coverage.check_all_sent()
        coverage.check_servers([shown], ENGINE)
    except RolloutError as error:
        coverage_said = str(error)
    sent = {
        ENGINE.server_parameter(name)[0] for bucket in requests for name, _ in bucket if name.endswith(SCALE)
    }
    held = {name for name, tensor in model.named_parameters() if name.endswith(SCALE)}
    return {
        "wrong": sorted(name for name, tensor in state(loaded).items() if not same(tensor, expected[name])),
        "unused": unused,
        "sent": sorted(sent),
        "in_fp8": sorted(held),
        "proven": verifier.compare([shown]),
        "held": len(sums),
        "coverage": coverage_said,
    }


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
