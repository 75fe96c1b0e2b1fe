"""Several updates of one batch, packed and in padded rows from the same weights in one run.

packed_updates_worker.py PROCESSES MODEL_DIR REFERENCE.pt OUT.pt '{"packed": 24, "parts": 3, "cases":
[...]}' ...  saves of each layout what every rank found: (kind, case) -> its updates and weights.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.mcore import loss as loss_module
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.mcore.updates import Updates
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.weight_sync.export import StageExporter

sys.path.insert(0, str(Path(__file__).parent))
import layout_worker
from forked_layouts import save_results
from layout_worker import DEALT, GROUP_SIZE, LENGTH, limits_of, replica_batch, set_up, whole_gradients
from packed_worker import labelled, latent_config, latent_model, replaying
from updates_cases import BATCH, BYPASS_KEPT, PACKED_RATE, SEED, WEIGHT, near
from updates_worker import ROWS, config_of, megatrons

SAMPLES = 24
"""Of a batch."""


BYPASS = RolloutCorrectionConfig(
    bypass_mode=True,
    loss="reinforce",
    advantage="grpo",
    loss_aggregation="token-mean",
    rollout_is="token",
    rollout_is_upper=WEIGHT,
    rollout_rs=(RejectionRule("seq_mean", "ratio", *BYPASS_KEPT),),
)


def both_batches(samples, layout, packed):
    """("rows", its batch) and ("packed", its), of the same samples in the same order."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (layout.dp_rank, list(DEALT) if layout.is_data_leader else None))
    orders = dict(one for one in every if one[1] is not None)
    dealt = [samples[number] for replica in sorted(orders) for number in orders[replica]]
    rows, _ = replica_batch(dealt, layout)
    if layout.dp_size > 1:
        share = len(samples) // layout.dp_size
        ids = rows.group_ids + dealt[layout.dp_rank * share]["group"]  # not this replica's own numbers
        # The samples that a replica has after dealing, so that updates take those of the packed run.
        rows = replace(rows, group_ids=ids, parted_groups=SAMPLES // GROUP_SIZE)
    return ("rows", rows), ("packed", packed)


class TrainedLogprobs:
    """In the place of the loss's `label_logprobs`: keeps what each training pass computes."""

    def __init__(self, batch, layout):
        self.batch, self.layout = batch, layout
        self.original = loss_module.label_logprobs
        self.begin()

    def begin(self):
        """A new update: its samples' log-probs, NaN for the others."""
        self.values = torch.full((self.batch.num_tokens + 1,), torch.nan)

    def __call__(self, output, micro, settings, **arguments):
        logprobs, entropy = self.original(output, micro, settings, **arguments)
        self.values[micro.places.t().reshape(-1)] = logprobs.detach()
        return logprobs, entropy

    def by_sample(self):
        """{labels: [1, sampled tokens]} of the update's samples, on the last stage."""
        found = labelled(self.batch, (self.values[:-1],), self.layout) if self.layout.is_last_stage else {}
        return {labels: values for labels, values in found.items() if not values.isnan().any()}


def trained(model, parameters, layout, batch, settings, optimizer, spec, case, kind, routes):
    """[(log-probs, metrics, gradients) of each update], on this rank."""
    parts, epochs = spec["parts"], spec.get("epochs", 1)
    reports = []
    train_step = megatrons(model, optimizer)
    corrected = CorrectedStep(
        config=BYPASS if case == "bypass" else config_of(case),
        layout=layout,
        logprob_settings=settings,
        routes=routes,
        push=lambda version: {},
        report=reports.append,
        collector=SimpleNamespace(device="cpu", collect=lambda _: batch, metrics={}, trajectories=[]),
        shape=BatchShape(
            SAMPLES // parts,
            GROUP_SIZE,
            ROWS,
            LENGTH,
            packing=limits_of(spec) if kind == "packed" else None,
            updates_per_batch=parts,
        ),
        updates=Updates(parts, epochs, None, SEED),
    )
    trainable = [one for one in parameters if one.tensor.requires_grad]  # routers' biases are buffers
    seen = loss_module.label_logprobs = TrainedLogprobs(batch, layout)
    found = []
    try:
        for update in range(parts * epochs):
            seen.begin()
            iteration, per_token = BATCH * parts * epochs + update, spec.get("per_token", False)
            corrected.run(train_step, iteration, model, optimizer, per_token=per_token)
            report = reports[-1] if reports else {}
            found.append((seen.by_sample(), report, whole_gradients(trainable, layout)))
    finally:
        loss_module.label_logprobs = seen.original
    return found


def run(model_dir, samples, spec):
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": "0"}
    if "latent" in spec:
        layout_worker.transformer_config, layout_worker.build = latent_config, latent_model
    samples = near(samples)
    model, parameters, layout, config, packed, _, settings = set_up(model_dir, samples, spec)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=PACKED_RATE, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0),
        model,
    )
    first, found = [one.tensor.detach().clone() for one in parameters], {}
    for kind, batch in both_batches(samples, layout, packed):
        routes = replaying(model, batch, layout, config.num_layers) if spec.get("replay") else Routes()
        for case in spec["cases"]:
            for one, values in zip(parameters, first, strict=True):
                one.tensor.data.copy_(values)
            updates = trained(model, parameters, layout, batch, settings, optimizer, spec, case, kind, routes)
            exporter = StageExporter(
                parameters, layout.shard, layout.stage_groups, stage=layout.pp_rank, num_stages=layout.pp_size
            )
            weights = {name: tensor.clone() for unit in exporter.units() for name, tensor in unit}
            found[kind, case] = updates, weights if exporter.sends else {}
    return found


def main(processes, model_dir, reference_path, out, *specs):
    samples = torch.load(reference_path, weights_only=True)["many"]
    save_results(run, processes, model_dir, samples, out, specs)


if __name__ == "__main__":
    main(*sys.argv[1:])
