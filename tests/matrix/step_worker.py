"""One corrected step, optimizer included, at TP 2 x PP 2 x EP 2 through the library, whatever the release.

step_worker.py MODEL_DIR REFERENCE.pt  prints RESULT and a line of JSON: the release, the gradients' worst
error against Hugging Face, the metrics, the gradient's norm, and the mean log-prob of the sampled tokens
before and after the update.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from layout_cases import CONFIGS, LENGTH
from layout_worker import gradient_error, set_up, step, whole_gradients
from megatron.core import __version__
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch.multiprocessing import start_processes

from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.forward import compute_log_probs
from megatron_rl_corr.mcore.session import start  # noqa: F401  what the launcher uses can be imported too
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.reduce.collectives import all_reduce_metrics
from tools.local_server import free_port

LAYOUT = {"tp": 2, "pp": 2, "ep": 2, "sp": True}
PROCESSES, MICROBATCHES, CASE = 4, 4, "token"


def run(model_dir, reference):
    """(gradients by Hugging Face name, numbers) of this rank; numbers on the last stage only."""
    model, parameters, layout, config, batch, shift, settings = set_up(
        model_dir, reference["samples"], LAYOUT
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, weight_decay=0.0, clip_grad=1.0, params_dtype=torch.float32
        ),
        model,
    )
    packs = Packs.of_rows(batch, batch.num_sequences // MICROBATCHES, LENGTH)

    def scored():
        return compute_log_probs(model, packs, settings, routes=Routes())

    before = scored()
    old = None if before is None else (before[0] + shift, before[1])
    metrics = step(model, layout, CONFIGS[CASE], packs, old, settings, config)
    grads = whole_gradients(parameters, layout)
    updated, norm, _ = optimizer.step()
    assert updated
    after = scored()
    if not layout.is_last_stage:
        return grads, {}
    means = [float(logprobs[batch.loss_mask].double().mean()) for logprobs, _ in (before, after)]
    numbers = {"metrics": all_reduce_metrics(metrics, layout.dp_cp_group), "grad_norm": float(norm)}
    return grads, numbers | {"before": means[0], "after": means[1]}


def rank_main(rank, port, model_dir, reference):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=PROCESSES)
    grads, numbers = run(model_dir, reference)
    everything = [None] * PROCESSES
    dist.all_gather_object(everything, (grads, numbers))
    if rank == 0:
        merged = {name: grad for part, _ in everything for name, grad in part.items()}
        error, worst = gradient_error(reference["cases"][CASE]["grads"], merged)
        numbers = next(found for _, found in everything if found)
        numbers |= {"release": __version__, "gradient": error, "worst": worst}
        print("RESULT " + json.dumps(numbers), flush=True)
    dist.barrier()
    os._exit(0)  # Megatron's leftovers may wait for each other at interpreter exit


if __name__ == "__main__":
    model_dir, reference_path = sys.argv[1:]
    # A fork: what was imported is there.
    start_processes(
        rank_main,
        (free_port(), model_dir, torch.load(reference_path, weights_only=True)),
        PROCESSES,
        start_method="fork",
    )
