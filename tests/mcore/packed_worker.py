"""The same samples packed and in padded rows, on the same weights in one run: log-probs, gradients and
metrics of both.

packed_worker.py PROCESSES MODEL_DIR REFERENCE.pt '{"tp": 2, "sp": true, "packed": 64, "runs": ["token"]}'
...  prints a line of JSON for each run: how far the two are from each other, and each from the reference.
"replay": routes drawn at random are replayed, which the reference does not know. "truncated", "odd",
"masked": the samples that hf_reference.py saves by that name.
"""

import json
import math
import os
import sys

import layout_worker
import numpy as np
import torch
import torch.distributed as dist
from layout_cases import CONFIGS
from layout_worker import gradient_error, limits_of, packs_of, replica_batch, set_up, step, whole_gradients

from megatron_rl_corr.engines.routes import no_routes
from megatron_rl_corr.mcore.batch.packing import first_fit
from megatron_rl_corr.mcore.forward import compute_log_probs
from megatron_rl_corr.models.megatron_flags import add_missing_flags, model_flags
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.reduce.collectives import all_reduce_metrics

ROWS = 4
"""Microbatches of padded rows."""
FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}


def latent_config(hf, spec, **settings):
    """A model with latent attention, from its flags."""
    import hf_models_worker  # which needs megatron.training
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    layout = [word for name, flag in FLAGS.items() for word in (flag, str(spec.get(name, 1)))]
    layout += ["--sequence-parallel"] if spec.get("sp") else []
    layout += ["--calculate-per-token-loss"] if spec.get("per_token") else []
    layout += ["--moe-router-bias-update-rate", "0"]  # each run must start from the same model
    sys.argv = [
        "worker",
        *model_flags(hf),
        *hf_models_worker.TE,
        hf_models_worker.NO_FUSED_ROPE,
        *hf_models_worker.RUN,
        *layout,
        "--global-batch-size",
        "4",
    ]
    args = parse_args(add_missing_flags)
    validate_args(args)
    args.padded_vocab_size, args.variable_seq_lengths = layout_worker.PADDED_VOCAB, True
    config = core_transformer_config_from_args(args)
    config.from_arguments = args
    return config


def latent_model(hf, config, spec):
    from hf_models_worker import build

    return [build(config.from_arguments, config).train()]


def run(model_dir, reference, spec):
    if "latent" in spec:
        layout_worker.transformer_config, layout_worker.build = latent_config, latent_model
    samples = reference["samples"]
    model, parameters, layout, config, packed, packed_shift, settings = set_up(model_dir, samples, spec)
    trained = [one for one in parameters if one.tensor.requires_grad]  # routers' biases are buffers
    rows, rows_shift = replica_batch(samples, layout)
    limits = limits_of(spec)
    found = {"needed": len(first_fit(np.diff(packed.cu_seqlens).tolist(), limits.max_tokens))}
    for kind, batch, shift in (("rows", rows, rows_shift), ("packed", packed, packed_shift)):
        packs = packs_of(batch, layout, spec if kind == "packed" else {}, ROWS)
        routes = replaying(model, batch, layout, config.num_layers) if spec.get("replay") else Routes()
        routes.begin_batch(
            batch.seq_ids, batch.positions, samples=batch.num_sequences, compare_in_training=False
        )
        with routes.scoring():
            scored = compute_log_probs(
                model,
                packs,
                settings,
                routes=routes,
                with_collision=any(CONFIGS[case].advantage_by_token for case in spec["runs"]),
            )
        agreement = routes.measure_agreement(1, str)
        by_sample = {} if scored is None else labelled(batch, scored, layout)
        for case in spec["runs"]:
            once = case.startswith("once")
            shifted = scored if scored is None or once else (scored[0] + shift, *scored[1:])
            with routes.training():
                metrics = step(
                    model,
                    layout,
                    CONFIGS[case],
                    packs,
                    shifted,
                    settings,
                    config,
                    updates=1 if once else 2,
                    in_loss=once and not CONFIGS[case].advantage_by_token,
                    routes=routes,
                )
            numbers = {}
            if layout.is_last_stage:
                numbers = all_reduce_metrics(metrics | agreement, layout.dp_cp_group)
            found[kind, case] = by_sample, numbers, whole_gradients(trained, layout)
    return found


def labelled(batch, scored, layout):
    """{the sample's labels: [K, sampled tokens] of the K values a token} of this replica's samples."""
    values = torch.stack([x.float() for x in (batch.labels, batch.loss_mask)] + list(scored))
    ids, mask, *values = batch.whole_rows(values, layout.cp_group)
    found = {}
    for row, sampled in enumerate(mask.bool()):
        if not sampled.any():
            continue  # a sample without a response
        labels = ids[row, : int(sampled.nonzero().max()) + 1].int().tolist()
        found[tuple(labels)] = torch.stack([value[row][sampled] for value in values])
    return found


def replaying(model, batch, layout, layers):
    """Replays experts that are drawn at random for each token of each sample, whatever the layout."""
    from megatron_rl_corr.moe.replay import ReplayedRouters  # Megatron before 0.16 has no replay
    from megatron_rl_corr.moe.routes import ReplayedRoutes

    routers = ReplayedRouters("R3", model, layout, num_layers=layers)
    routes, shape = ReplayedRoutes(routers, layout, min_agreement=-1.0), routers.shape
    values = torch.zeros(2, batch.num_tokens)
    if layout.is_last_stage:
        values = torch.stack([x.float() for x in (batch.tokens, batch.loss_mask)])
    # Other stages are not sent what only the loss needs.
    dist.broadcast(values, dist.get_process_group_ranks(layout.pp_group)[-1], group=layout.pp_group)
    ids, mask = batch.whole_rows(values, layout.cp_group)
    drawn = []
    for row, sampled in enumerate(mask.bool()):
        tokens = ids[row, : int(sampled.nonzero().max()) + 1 if sampled.any() else 0].long()
        seed = int((tokens * torch.arange(1, len(tokens) + 1)).sum())
        scores = torch.rand(len(tokens), layers, shape.experts, generator=torch.Generator().manual_seed(seed))
        drawn.append(scores.topk(shape.top_k).indices[:, list(routers.layers)].to(shape.dtype))
    routes.given = no_routes(shape, len(batch.seq_ids) + 1)[:, : len(routers.layers)]
    for place, (row, at) in enumerate(zip(batch.seq_ids.tolist(), batch.positions.tolist(), strict=True)):
        if at < len(drawn[row]):
            routes.given[place] = drawn[row][at]
    return routes


def compared(everything, case, reference):
    """How far packed is from rows, and each from the reference; what all ranks found of one case."""
    logprobs, numbers, gradients = (
        {
            kind: {name: value for rank in everything for name, value in rank[kind, case][part].items()}
            for kind in ("rows", "packed")
        }
        for part in range(3)
    )
    assert logprobs["rows"].keys() == logprobs["packed"].keys() and len(logprobs["rows"]) > 8
    apart = max(
        float((value - logprobs["packed"][name]).abs().max()) for name, value in logprobs["rows"].items()
    )
    named = {tuple(torch.cat([s["prompt"], s["output"]])[1:].tolist()): s for s in reference["samples"]}
    from_reference, expected = {}, reference["cases"][case]["grads"]
    for kind, found in logprobs.items():
        far = max(float((value[0] - named[name]["now"]).abs().max()) for name, value in found.items())
        from_reference[kind] = far, *gradient_error(expected, gradients[kind])
    return {
        "case": case,
        "logprobs": apart,
        "gradient": gradient_error(gradients["rows"], gradients["packed"]),
        "reference": from_reference,
        "metrics": [numbers["rows"], numbers["packed"]],
        "parameters": len(expected),
        "size": math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients["rows"].values())),
        "needed": sorted({rank["needed"] for rank in everything}),
    }


def rank_main(rank, size, port, model_dir, reference, spec):
    torch.set_num_threads(1)
    reference = next(
        (reference[kind] for kind in ("truncated", "odd", "masked") if spec.get(kind)), reference
    )
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    found, everything = run(model_dir, reference, spec), [None] * size
    dist.all_gather_object(everything, found)
    if rank == 0:
        for case in spec["runs"]:
            print(
                "RESULT " + json.dumps({"layout": spec} | compared(everything, case, reference)), flush=True
            )
    dist.barrier()
    os._exit(0)  # Megatron's leftovers may wait for each other at interpreter exit


if __name__ == "__main__":
    layout_worker.main(*sys.argv[1:], of_rank=rank_main)
