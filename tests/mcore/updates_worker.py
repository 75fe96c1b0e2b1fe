"""Several updates of one batch on real Megatron ranks; for test_updates.py.

updates_worker.py PROCESSES MODEL_DIR REFERENCE.pt OUT.pt '{"tp": 2, "packed": 64, "losses": ["gspo"]}' ...
saves of each layout every rank's {loss: (reports, pushed versions, weights of this stage)}.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core import parallel_state as ps
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.mcore.updates import Updates
from megatron_rl_corr.moe.routes import Routes, make_routes
from megatron_rl_corr.weight_sync.export import StageExporter

sys.path.insert(0, str(Path(__file__).parent))
from forked_layouts import save_results
from layout_worker import LENGTH, limits_of, set_up
from updates_cases import (
    BATCH,
    BYPASS,
    CLIP,
    EPOCHS,
    KEPT,
    OTB,
    RATE,
    REJECTING,
    SAT,
    SAT_TAIL,
    SEED,
    SOFT,
    TRUNCATED,
    WEIGHT,
    near,
    parts_of,
)

ROWS = 2
"""Of a microbatch."""


def config_of(case):
    loss = case.split()[0]
    if loss in SOFT:
        return RolloutCorrectionConfig(loss=loss, rollout_is="token", rollout_is_upper=WEIGHT, **SOFT[loss])
    low, high = CLIP[loss]
    if case == BYPASS:
        return RolloutCorrectionConfig(
            bypass_mode=True, loss=loss, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=None
        )
    rejecting = {OTB: {"advantage": "otb"}, SAT: {"clip_sat_tail": SAT_TAIL}}.get(case, {})
    if case in REJECTING:
        rule = RejectionRule("seq_mean", "ratio", *KEPT)
        rejecting = {"rollout_rs": (rule,), "loss_denominator": REJECTING[case]}
    return RolloutCorrectionConfig(
        loss=loss,
        clip_ratio_low=low,
        clip_ratio_high=high,
        rollout_is="sequence" if loss == "gspo" else "token",
        rollout_is_upper=WEIGHT,
        **({"clip_ratio_c": None} if loss == "ppo_clip" else {}),
        **rejecting,
    )


def megatrons(model, optimizer, leaves=False):
    """Megatron's `train_step`; leaves: to write a checkpoint."""

    def train_step(forward_step, iterators, microbatches):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators,
            model=model,
            num_microbatches=microbatches,
            seq_length=LENGTH,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        if leaves:
            return {}, True, True, True, 17, None, None, 0
        updated, grad_norm, _ = optimizer.step()
        return {}, int(not updated), False, False, 0, grad_norm, None, 0

    return train_step


def trained(
    model_dir,
    samples,
    spec,
    loss,
    *,
    max_kl=None,
    replay="off",
    leaves_in=None,
    ess_step_scale=False,
    made_with=None,
    before_update=lambda optimizer, update: None,
):
    """One batch of all samples: (reports, pushed versions, weights) of this rank; with replay, the
    routers' choices.

    made_with: the optimizer's settings, or those of plain descent. before_update is called before each
    with its number.
    """
    parts = parts_of(loss)
    model, parameters, layout, _, batch, _, logprobs = set_up(model_dir, samples, spec)
    routes, chosen = Routes(), []
    if replay != "off":
        routes = make_routes(replay, model, layout, num_layers=4, min_agreement=-1.0)
        routes.scatter([random_routes(s) for s in samples], batch.cu_seqlens)
        chosen = routers_choices(model)
    plain = {"optimizer": "sgd", "lr": RATE, "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
    optimizer = get_megatron_optimizer(OptimizerConfig(**(made_with or plain)), model)
    reports, pushed, collected = [], [], []

    def collect(number):
        collected.append(number)
        return replace(batch, version_lags=batch.version_lags + 1)

    corrected = CorrectedStep(
        config=config_of(loss),
        layout=layout,
        logprob_settings=logprobs,
        report=reports.append,
        push=lambda version: pushed.append(version) or {},
        routes=routes,
        collector=SimpleNamespace(device="cpu", collect=collect, metrics={}, trajectories=[]),
        shape=BatchShape(16 // parts, 4, ROWS, LENGTH, packing=limits_of(spec), updates_per_batch=parts),
        updates=Updates(parts, EPOCHS, max_kl, SEED, ess_step_scale=ess_step_scale),
    )
    results = []
    for update in range(parts * EPOCHS):
        train_step = megatrons(model, optimizer, leaves=update == leaves_in)
        iteration = BATCH * parts * EPOCHS + update
        before_update(optimizer, update)
        results.append(corrected.run(train_step, iteration, model, optimizer, per_token=False))
    exporter = StageExporter(
        parameters, layout.shard, layout.stage_groups, stage=layout.pp_rank, num_stages=layout.pp_size
    )
    weights = {name: tensor.clone() for unit in exporter.units() for name, tensor in unit}
    ps.destroy_model_parallel()
    assert collected == [BATCH]
    found = reports, pushed, weights if exporter.sends else {}
    if replay != "off":
        return *found, chosen, batch.padding.view(batch.num_sequences, -1)
    if leaves_in is not None:
        return *found, [result[1:5] for result in results], corrected.leaves_after_batch
    return found


def random_routes(sample):
    """[tokens - 1, 4 layers, 2] distinct experts."""
    tokens = len(sample["prompt"]) + len(sample["output"]) - 1
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, 4, 8, generator=generator).argsort(dim=2)[..., :2].to(torch.uint8)


def routers_choices(model):
    """Filled, pass after pass, with (layer, the experts of each token: [L, b, E] bool)."""
    found = []

    def hook(module, inputs, output):
        found.append((module.layer_number, output[1].detach().view(*inputs[0].shape[:2], -1).clone()))

    for chunk in model:
        for router in (m for m in chunk.modules() if isinstance(m, TopKRouter)):
            router.register_forward_hook(hook)
    return found


def every_loss(model_dir, reference, spec):
    samples, few = near(reference["samples"]), near(reference["truncated"]["samples"])
    found = {
        loss: trained(model_dir, few if loss == TRUNCATED else samples, spec, loss) for loss in spec["losses"]
    }
    if spec.get("ends"):
        found["early"] = trained(model_dir, samples, spec, "ppo_clip", max_kl=spec["ends"])
        found["leaving"] = [
            trained(model_dir, samples, spec, "ppo_clip", leaves_in=update) for update in (1, 3)
        ]
    for replay in spec.get("replays", ()):
        found[replay] = trained(model_dir, samples, spec, "ppo_clip", replay=replay)
    if "R3" in spec.get("replays", ()):
        found["bypass R3"] = trained(model_dir, samples, spec, BYPASS, replay="R3")
        found["routes"] = [random_routes(sample) for sample in samples]
    return found


def main(processes, model_dir, reference_path, out, *specs):
    reference = torch.load(reference_path, weights_only=True)
    save_results(every_loss, processes, model_dir, reference, out, specs)


if __name__ == "__main__":
    main(*sys.argv[1:])
