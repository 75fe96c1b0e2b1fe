"""Two steps of Adam that replay routes, with and without measuring what replay removes; for
test_router_replay_effect.py.

router_replay_effect_worker.py PROCESSES MODEL_DIR SAMPLES.pt OUT.pt '{"tp": 2, "sp": true}' ...  saves,
for each layout, a list of the ranks' results.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core import parallel_state as ps
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.features.router_replay_effect.feature import ReplayEffectFeature
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
from megatron_rl_corr.mcore.forward import compute_log_probs
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.moe.replay import ReplayedRouters
from megatron_rl_corr.moe.routes import ReplayedRoutes, Routes

sys.path.insert(0, str(Path(__file__).parent))
import layout_worker
from forked_layouts import save_results
from layout_worker import LENGTH, limits_of, packs_of, set_up
from padding_worker import without_bias
from rejection_worker import snapshot
from replay_worker import RECOMPUTE, ROWS, samples_of

layout_worker.local_parameters = without_bias

TRACES = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "hidden_dropout": 0.1,
}
"""What an additional pass might disturb: token counts of the balancing bias, losses that are
logged, random numbers.
"""


def prepared(model_dir, samples, spec):
    """As `set_up`, and the routes of the batch."""
    settings = TRACES | (RECOMPUTE if spec.get("recompute") else {})
    model, parameters, layout, _, batch, _, logprobs = set_up(model_dir, samples, spec, **settings)
    routes = ReplayedRoutes(ReplayedRouters("R3", model, layout, num_layers=4), layout, min_agreement=-1.0)
    trained = samples_of(batch, samples, layout, packed="packed" in spec)
    boundaries = (
        batch.cu_seqlens.tolist() if "packed" in spec else range(0, LENGTH * len(trained) + 1, LENGTH)
    )
    routes.scatter([samples[n]["routes"] for n in trained] if layout.is_data_leader else None, boundaries)
    return model, parameters, layout, batch, logprobs, routes


def two_steps(model_dir, samples, spec, every):
    """Weights, moments and biases, random state and reports behind two steps."""
    model, parameters, layout, batch, logprobs, routes = prepared(model_dir, samples, spec)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1), model)
    reports = []
    options = SimpleNamespace(router_replay_effect_every=every)
    features = [] if every is None else [ReplayEffectFeature(options)]
    step = CorrectedStep(
        config=RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=2.0),
        layout=layout,
        logprob_settings=logprobs,
        push=lambda version: {},
        report=reports.append,
        routes=routes,
        features=features,
        collector=SimpleNamespace(device="cpu", collect=lambda step: batch, metrics={}, trajectories=[]),
        shape=BatchShape(
            global_batch_size=len(samples),
            group_size=4,
            micro_batch_size=ROWS,
            seq_length=LENGTH,
            packing=limits_of(spec),
        ),
    )

    def train_step(forward_step, iterators, microbatches):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators,
            model=model,
            seq_length=LENGTH,
            num_microbatches=microbatches,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        return {}, 0, False, False, 0, grad_norm, None, 0

    for iteration in range(2):
        step.run(train_step, iteration, model, optimizer, per_token=False)
    logged = [value["values"].clone() for value in get_moe_layer_wise_logging_tracker().values()]
    for value in get_moe_layer_wise_logging_tracker().values():
        value["values"].zero_()
    counts = [b for chunk in model for name, b in chunk.named_buffers() if name.endswith("tokens_per_expert")]
    state = [*snapshot(model, parameters, optimizer), *logged, *counts, torch.get_rng_state()]
    state += list(get_cuda_rng_tracker().get_states().values())
    ps.destroy_model_parallel()
    return [value.clone() for value in state], reports


def naive_parts(model_dir, samples, spec):
    """D of the tokens that are measured, from passes over the whole batch: with replay, without;
    on the last stage.
    """
    model, _, layout, batch, logprobs, routes = prepared(model_dir, samples, spec)
    packs = packs_of(batch, layout, spec, batch.num_sequences // ROWS)
    with routes.replaying():
        replayed = compute_log_probs(model, packs, logprobs, routes=routes)
    chosen = compute_log_probs(model, packs, logprobs, routes=Routes())
    count = spec["pp"] if "vpp" in spec else 1
    measured = torch.zeros(batch.num_tokens, dtype=torch.bool)
    measured[[place for pack in packs.samples[:count] for place in batch.host_places_of(pack)]] = True
    found = None
    if replayed is not None:
        measured &= batch.loss_mask
        found = [(logp - batch.rollout_logprobs)[measured].tolist() for logp, _ in (replayed, chosen)]
    counted = layout.tp_group.rank() == 0
    ps.destroy_model_parallel()
    return found if counted else None


def results(model_dir, samples, spec):
    return {
        "naive": naive_parts(model_dir, samples, spec),
        **{every: two_steps(model_dir, samples, spec, every) for every in (None, 1, 2)},
    }


def main(processes, model_dir, samples_path, out, *specs):
    save_results(results, processes, model_dir, torch.load(samples_path, weights_only=True), out, specs)


if __name__ == "__main__":
    main(*sys.argv[1:])
