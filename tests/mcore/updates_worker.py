"""Several updates of one batch on real Megatron ranks; for test_updates.py.

updates_worker.py PROCESSES MODEL_DIR REFERENCE.pt OUT.pt '{"tp": 2, "packed": 64, "losses": ["gspo"]}' ...  saves of
each layout every rank's {loss: (reports, pushed versions, weights of this stage)}.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core import parallel_state as ps
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.mcore.batch import BatchShape
from megatron_rl_corr.mcore.packing import PackLimits
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.mcore.updates import Updates
from megatron_rl_corr.weight_sync.export import StageExporter

sys.path.insert(0, str(Path(__file__).parent))
from forked_layouts import save_results
from layout_worker import LENGTH, set_up
from updates_reference import BATCH, CLIP, EPOCHS, PARTS, RATE, SEED, WEIGHT, near

ROWS = 2
"""Of a microbatch."""


def config_of(loss):
    low, high = CLIP[loss]
    return RolloutCorrectionConfig(
        loss=loss, clip_ratio_low=low, clip_ratio_high=high, rollout_is="sequence" if loss == "gspo" else "token",
        rollout_is_upper=WEIGHT, **({"clip_ratio_c": None} if loss == "ppo_clip" else {}),
    )


def megatrons(model, optimizer, rows):
    """Megatron's `train_step` on so many rows, or on as many packs as it is told."""

    def train_step(forward_step, iterators, microbatches=rows // ROWS):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators, model=model, num_microbatches=microbatches,
            seq_length=LENGTH, micro_batch_size=ROWS, forward_only=False,
        )
        updated, grad_norm, _ = optimizer.step()
        return {}, int(not updated), False, False, 0, grad_norm, None, 0

    return train_step


def trained(model_dir, samples, spec, loss, max_kl=None, config=None):
    """One batch of all samples: (reports, pushed versions, weights) of this rank."""
    model, parameters, layout, _, batch, _, logprobs = set_up(model_dir, samples, spec)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=RATE, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0), model
    )
    reports, pushed, collected = [], [], []

    def collect(number):
        collected.append(number)
        return replace(batch, version_lags=batch.version_lags + 1)

    limits = PackLimits(spec["packed"], 0.01) if "packed" in spec else None
    corrected = CorrectedStep(
        config=config or config_of(loss), layout=layout, logprobs=logprobs, push=pushed.append, report=reports.append,
        collector=SimpleNamespace(device="cpu", collect=collect, metrics={}),
        shape=BatchShape(16 // PARTS, 4, ROWS, LENGTH, packing=limits, updates=PARTS),
        updates=Updates(PARTS, EPOCHS, max_kl, SEED),
    )  # fmt: skip
    train_step = megatrons(model, optimizer, 16 // PARTS // layout.dp_size)
    for update in range(PARTS * EPOCHS):
        iteration = BATCH * PARTS * EPOCHS + update
        corrected.run(train_step, iteration, model, optimizer, per_token=spec.get("per_token", False))
    exporter = StageExporter(
        parameters, layout.shard, layout.stage_groups, stage=layout.pp_rank, num_stages=layout.pp_size
    )
    weights = {name: tensor.clone() for unit in exporter.units() for name, tensor in unit}
    ps.destroy_model_parallel()
    assert collected == [BATCH]
    return reports, pushed, weights if exporter.sends else {}


def every_loss(model_dir, samples, spec):
    return {loss: trained(model_dir, near(samples), spec, loss) for loss in spec["losses"]}


def main(processes, model_dir, reference_path, out, *specs):
    samples = torch.load(reference_path, weights_only=True)["samples"]
    save_results(every_loss, processes, model_dir, samples, out, specs)


if __name__ == "__main__":
    main(*sys.argv[1:])
