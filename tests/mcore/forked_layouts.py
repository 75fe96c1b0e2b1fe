"""Runs what a worker computes under several layouts, each in fresh forks of a process that has
Megatron already.
"""

import json
import os

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from tests import tensor_files
from tools.local_server import free_port


def save_results(result_of, processes, model_dir, samples, out, specs):
    """out: of each spec, JSON, every rank's result_of(model_dir, samples, spec)."""
    size, paths = int(processes), []
    for number, spec in enumerate(map(json.loads, specs)):
        own = f"{out}.{number}"
        # A fork a layout: the threads of its gloo groups go with it.
        start_processes(
            _rank_main,
            (size, free_port(), result_of, model_dir, samples, spec, own),
            size,
            start_method="fork",
        )
        paths.append([f"{own}.{rank}" for rank in range(size)])
    tensor_files.save(tensor_files.Files(paths), out)


def _rank_main(rank, size, port, result_of, model_dir, samples, spec, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    tensor_files.save(result_of(model_dir, samples, spec), f"{out}.{rank}")
    dist.barrier()
    os._exit(0)  # Megatron's leftovers may wait for each other at interpreter exit
