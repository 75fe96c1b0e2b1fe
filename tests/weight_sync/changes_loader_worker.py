"""Sends changes to SGLang's own models through its own loaders, in this process and without a server.

changes_loader_worker.py TP DIR [DIR ...]  prints a line of JSON for each folder and tensor-parallel rank: its
number of parameters, and those that are others than after a push of everything.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from sglang.srt.distributed.device_communicators import pynccl

from megatron_rl_corr.engines.sglang import changes_loader
from megatron_rl_corr.engines.weight_changes import CODE, end_of_stage, packed
from megatron_rl_corr.models.hf_checkpoint import read_config
from megatron_rl_corr.weight_sync.changes import changed_units
from megatron_rl_corr.weight_sync.export import buckets
from tests.sglang_loader import load_model, start_rank, units_of
from tools.local_server import free_port


def judge(path, rank, size, port):
    """What the loader makes of changes, beside what it makes of everything."""
    loaded, config = load_model(start_rank(path, rank, size, port), rank), read_config(path)
    old = {n: w for n, w in load_file(path / "model.safetensors").items() if "rotary_emb" not in n}
    generator = torch.Generator().manual_seed(5)
    changed = {n: torch.rand(w.shape, generator=generator) < 0.05 for n, w in old.items()}
    new = {n: torch.where(changed[n], w + 0.1, w) for n, w in old.items()}
    changes = {n: torch.where(changed[n], w, torch.nan) for n, w in new.items()}

    def push(requests):
        loaded.updater.begin_weight_update()
        for request in requests:
            loaded.load(request)
        loaded.updater.end_weight_update(run_post_load=False)
        return {name: tensor.clone() for name, tensor in loaded.state().items()}

    expected = push(buckets(units_of(new, config), 1 << 20))
    push(buckets(units_of(old, config), 1 << 20))
    told = {"push": "1", "base": "0", "stages": 1, "code": CODE}
    changes_loader.begin(loaded.model, [(json.dumps(told), torch.zeros(1))])
    found = buckets(changed_units(units_of(changes, config)), 1 << 12)
    made = [packed(bucket, stage=0, number=number) for number, bucket in enumerate(found)]
    got = push([*made, end_of_stage(stage=0, buckets=len(made))])
    wrong = sorted(name for name in expected if not torch.equal(expected[name], got[name]))
    return {"buckets": len(made), "parameters": len(expected), "wrong": wrong}


def main():
    size, folders = int(sys.argv[1]), list(map(Path, sys.argv[2:]))
    if size > 1:  # SGLang wants a core named for each rank
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(size)))
        pynccl.PyNcclCommunicator = lambda **_: SimpleNamespace(disabled=True)
    for folder in folders:
        port, ranks = free_port(), []
        for rank in range(size):
            if child := os.fork():
                ranks.append(child)
                continue
            status = 1
            try:
                print("RESULT", json.dumps(judge(folder, rank, size, port)), flush=True)
                status = 0
            finally:
                os._exit(status)
        for child in ranks:
            if os.waitpid(child, 0)[1]:
                sys.exit(f"{folder}: a rank failed")


if __name__ == "__main__":
    main()
