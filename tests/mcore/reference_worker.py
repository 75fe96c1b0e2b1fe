"""Steps with KL penalties against a reference policy that takes the live weights' place, in several layouts.

reference_worker.py PROCESSES MODEL_DIR OTHER_DIR HF.pt '{"tp": 2, "sp": true}' ...  prints a line of JSON
for each layout and case of hf_kl.py: the gradients' worst error, the metrics, and what the exchange of
weights left behind.
"""

import json
import os
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from layout_worker import gradient_error, packs_of, set_up, step, whole_gradients
from torch.multiprocessing import start_processes

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.mcore.forward import BatchForward, compute_log_probs
from megatron_rl_corr.mcore.reference.checkpoint import FOLDER, saved_with
from megatron_rl_corr.mcore.reference.policy import LocalReference, ReferenceWeights
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.reduce.collectives import all_reduce_metrics
from megatron_rl_corr.weight_sync.export import StageExporter
from tools.local_server import free_port

BASE = RolloutCorrectionConfig(
    loss="reinforce", rollout_is="token", rollout_is_upper=1.02, kl_loss_coef=0.3, advantage="grpo"
)
CONFIGS = {
    "k1, squared": {"kl_loss_type": "k1", "sampler_kl_coef": 0.2},
    "k2, sampler k3": {"kl_loss_type": "k2", "sampler_kl_coef": 0.2, "sampler_kl_type": "k3"},
    "k3, reward k1": {"kl_reward_coef": 0.05},
    "k3+": {"kl_loss_type": "k3+"},
    "unbiased, reward k3": {"kl_loss_type": "unbiased", "kl_reward_coef": 0.05, "kl_reward_type": "k3"},
}
MICROBATCHES = 4


class Ungathered(BatchForward):
    """Without Megatron's optimizer, whose gathers tests/matrix/test_reference.py has."""

    def gathered(self):
        return nullcontext()


def bytes_of(parameters):
    return [parameter.tensor.detach().clone() for parameter in parameters]


def same(before, parameters):
    return all(torch.equal(was, now.tensor) for was, now in zip(before, parameters, strict=True))


def saved_and_loaded(weights, parameters, layout, model_dir, other_dir):
    """Whether a reset reference is saved as the model that it is, bit for bit, and is the same
    when it is loaded.

    What any layout saves is so what any other one loads: each loads `other_dir` alike.
    """
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    exporter = StageExporter(
        weights.on_device(),
        layout.shard,
        layout.stage_groups,
        stage=layout.pp_rank,
        num_stages=layout.pp_size,
    )
    reference = LocalReference(weights, reset_every=2, reset_after=2, exporter=exporter)
    again = ReferenceWeights(parameters)
    with saved_with(3, reference, SimpleNamespace(save=folder[0]), model_dir):
        saved, other = HFCheckpoint(Path(folder[0]) / f".{FOLDER}-3"), HFCheckpoint(other_dir)
        again.load(saved, layout.shard)
        whole = set(saved.names) == set(other.names) and all(
            torch.equal(saved.tensor(name), other.tensor(name)) for name in other.names
        )
        dist.barrier()
    kept = [(weights.parameter(i), again.parameter(i)) for i in range(len(weights))]
    # Rows that pad the vocabulary are no part of a Hugging Face model, and of no log-prob.
    words = {"embedding.word_embeddings.weight", "output_layer.weight"}
    return (
        whole
        and all(torch.equal(a.tensor, b.tensor) for a, b in kept if a.local_name not in words)
        and all(torch.equal(a.tensor[:16], b.tensor[:16]) for a, b in kept if a.local_name in words)
    )


def attention_maxima(chunk):
    """A module that keeps maxima over every pass, as Transformer Engine's attention does for --qk-clip."""

    def keep(module, *_):
        module.current_max_attn_logits, module.seen = torch.ones(1), True

    chunk.current_max_attn_logits, chunk.seen = None, False
    chunk.register_forward_hook(keep)
    return chunk


def run(model_dir, other_dir, samples, cases, spec):
    """(what the exchange left, then case -> (metrics, gradients)) of this rank."""
    model, parameters, layout, config, batch, shift, settings = set_up(model_dir, samples, spec)
    packs = packs_of(batch, layout, spec, MICROBATCHES)
    forward = Ungathered(model, None, packs, settings)
    scored = compute_log_probs(model, packs, settings, routes=Routes())
    before, places = bytes_of(parameters), [parameter.tensor.data_ptr() for parameter in parameters]
    weights, kept = ReferenceWeights(parameters), attention_maxima(model[0])
    start = LocalReference(weights).log_probs(forward)
    left = {"start": start is None or torch.equal(start, scored[0])}
    left["maxima"] = kept.current_max_attn_logits is None and kept.seen
    weights.load(HFCheckpoint(other_dir), layout.shard)
    ref = LocalReference(weights).log_probs(forward)
    left["other"] = ref is None or not torch.equal(ref, scored[0])
    left["bytes"] = same(before, parameters)
    left["places"] = places == [parameter.tensor.data_ptr() for parameter in parameters]
    try:
        with weights.in_place():
            left["inside"] = not same(before, parameters)
            raise KeyError
    except KeyError:
        left["after_failure"] = same(before, parameters) and not weights.are_in_place
    again = LocalReference(weights).log_probs(forward)
    left["again"] = again is None or torch.equal(again, ref)
    left["saved"] = saved_and_loaded(weights, parameters, layout, model_dir, other_dir)
    weights.take()
    taken = LocalReference(weights).log_probs(forward)
    left["taken"] = taken is None or torch.equal(taken, scored[0])
    found = {}
    for name in cases:
        kl = replace(BASE, **CONFIGS[name])
        shifted = None if scored is None else (scored[0] + shift, scored[1])
        metrics = step(
            model,
            layout,
            kl,
            packs,
            shifted,
            settings,
            config,
            reference=ref,
        )
        numbers = all_reduce_metrics(metrics, layout.dp_cp_group) if layout.is_last_stage else {}
        found[name] = numbers, whole_gradients(parameters, layout)
    return left, found


def rank_main(rank, size, port, model_dir, other_dir, reference, spec):
    torch.set_num_threads(1)
    reference = reference["truncated"] if spec.get("truncated") else reference
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    left, found = run(model_dir, other_dir, reference["samples"], reference["cases"], spec)
    everything = [None] * size
    dist.all_gather_object(everything, (left, found))
    if rank == 0:
        for name, expected in reference["cases"].items():
            merged = {k: grad for _, part in everything for k, grad in part[name][1].items()}
            error, worst = gradient_error(expected["grads"], merged)
            numbers = next(part[name][0] for _, part in reversed(everything) if part[name][0])
            print(
                "RESULT "
                + json.dumps(
                    {
                        "layout": spec,
                        "case": name,
                        "gradient": error,
                        "worst": worst,
                        "metrics": {key: numbers[key] for key in expected["metrics"]},
                        "left": [one for one, _ in everything],
                    }
                ),
                flush=True,
            )
    dist.barrier()
    os._exit(0)  # Megatron's leftovers may wait for each other at interpreter exit


def main(processes, model_dir, other_dir, reference_path, *specs):
    reference = torch.load(reference_path, weights_only=True)
    for spec in map(json.loads, specs):
        arguments = (int(processes), free_port(), model_dir, other_dir, reference, spec)
        start_processes(rank_main, arguments, int(processes), start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
