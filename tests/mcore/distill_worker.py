"""Steps that are distilled from what servers would say of a teacher, in several layouts.

distill_worker.py PROCESSES MODEL_DIR HF.pt '{"tp": 2, "sp": true}' ...  prints a line of JSON for each layout
and case of hf_distill.py: the gradients' worst error and the metrics. The scores come as a leader's scorer
gives them, and reach the ranks as they do in a run.
"""

import json
import os
import sys
from types import SimpleNamespace

import layout_worker
import torch
import torch.distributed as dist
from layout_worker import gradient_error, packs_of, set_up, step, whole_gradients
from torch.multiprocessing import start_processes

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import RejectionRule
from megatron_rl_corr.engines.inspection import TokenScores
from megatron_rl_corr.mcore.forward import BatchForward, compute_log_probs
from megatron_rl_corr.mcore.reference.served_scores import ServedScores
from megatron_rl_corr.mcore.reference.teacher import Teacher
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.reduce.collectives import all_reduce_metrics
from megatron_rl_corr.rollout.blocking import LoopThread
from tools.local_server import free_port

TOP = 5
TOKEN = {"loss": "reinforce", "distill_coef": 0.6, "rollout_is": "token", "rollout_is_upper": 1.02}
CONFIGS = {
    "sampled": TOKEN,
    "top": TOKEN | {"distill_top_k": TOP},
    "top, sequences, rejected": TOKEN
    | {
        "distill_top_k": TOP,
        "rollout_is": "sequence",
        "rollout_is_upper": 1.05,
        "advantage": "raw",
        "rollout_rs": (RejectionRule("token", "ratio", 0.9, 1.12),),
    },
    "once, top": TOKEN | {"distill_top_k": TOP},
}
MICROBATCHES = 4


class SaidByServers:
    """The scores of a file, in the place of those of servers."""

    def __init__(self, unscored):
        self._unscored = unscored

    async def score(self, samples, *, likeliest):
        given = [
            [sample.values[key].numpy() for key in ("teacher", "top_logprobs", "top_ids")]
            for sample in samples
        ]
        return [
            None if sample.number == self._unscored else TokenScores(*values)
            for sample, values in zip(samples, given, strict=True)
        ]

    async def changed_weights(self):
        return None

    async def close(self):
        pass


def own_samples(reference, layout, spec):
    """The replica's samples in the order of its batch, on its leader."""
    samples = reference["samples"]
    share = len(samples) // layout.dp_size
    numbers = range(layout.dp_rank * share, (layout.dp_rank + 1) * share)
    numbers = layout_worker.DEALT if "packed" in spec else numbers
    return [
        SimpleNamespace(
            prompt_ids=samples[n]["prompt"], output_ids=samples[n]["output"], number=n, values=samples[n]
        )
        for n in numbers
    ]


def run(model_dir, reference, spec):
    """Case -> (metrics, gradients) of this rank."""
    model, parameters, layout, config, batch, shift, settings = set_up(model_dir, reference["samples"], spec)
    packs = packs_of(batch, layout, spec, MICROBATCHES)
    samples = own_samples(reference, layout, spec) if layout.is_data_leader else ()
    forward = BatchForward(model, None, packs, settings, samples)
    scored = compute_log_probs(model, packs, settings, routes=Routes())
    scorer, loop, found = SaidByServers(reference["unscored"]), LoopThread(), {}
    for name in reference["cases"]:
        correction = RolloutCorrectionConfig(**CONFIGS[name])
        served = ServedScores(scorer, loop, layout, "--url", "teacher", correction.distill_top_k or 0)
        said = Teacher(served).scores(forward)
        assert bool(said) == layout.is_last_stage
        once = name.startswith("once")
        old = scored if scored is None or once else (scored[0] + shift, scored[1])
        metrics = step(
            model,
            layout,
            correction,
            packs,
            old,
            settings,
            config,
            updates=1 if once else 2,
            in_loss=once,
            teacher=said,
        )
        numbers = all_reduce_metrics(metrics, layout.dp_cp_group) if layout.is_last_stage else {}
        found[name] = numbers, whole_gradients(parameters, layout)
    return found


def rank_main(rank, size, port, model_dir, reference, spec):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    found = run(model_dir, reference, spec)
    everything = [None] * size
    dist.all_gather_object(everything, found)
    for name, expected in reference["cases"].items() if rank == 0 else ():
        merged = {k: grad for part in everything for k, grad in part[name][1].items()}
        error, worst = gradient_error(expected["grads"], merged)
        numbers = next(part[name][0] for part in reversed(everything) if part[name][0])
        line = {"layout": spec, "case": name, "gradient": error, "worst": worst}
        print("RESULT " + json.dumps(line | {"metrics": {key: numbers[key] for key in expected["metrics"]}}))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # Megatron's leftovers may wait for each other at interpreter exit


def main(processes, model_dir, reference_path, *specs):
    reference = torch.load(reference_path, weights_only=True)
    for spec in map(json.loads, specs):
        arguments = (int(processes), free_port(), model_dir, reference, spec)
        start_processes(rank_main, arguments, int(processes), start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
