"""Steps of which much or all is rejected, on real Megatron ranks; saves gradients and weights for test_rejection.py.

rejection_worker.py PROCESSES MODEL_DIR REFERENCE.pt OUT.pt '{"ep": 2}' ...  saves a list with, for each layout, what
`everything_of` returns.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core import parallel_state as ps
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl_corr.config import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.mcore.scoring import score
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.parallel.reduce import all_gather_metrics

sys.path.insert(0, str(Path(__file__).parent))
from forked_layouts import save_results
from layout_worker import LENGTH, set_up, step, whole_gradients

KEEP_NEAR = RolloutCorrectionConfig(rollout_rs=(RejectionRule("seq_mean", "ratio", 0.8, 1.25),))
BYPASS = replace(KEEP_NEAR, bypass_mode=True, loss="reinforce", loss_aggregation="token-mean")
MICROBATCHES = 4
ROWS = {"one microbatch": range(4), "one rank": range(8, 16), "all": range(16)}
"""Which of the 16 samples are rejected."""


def far(samples, rows):
    """The samples, with the given rows' rollout log-probs so far off that the rule drops them."""
    return [s | {"rollout": s["rollout"] - 3.0} if i in rows else s for i, s in enumerate(samples)]


def gradients(model_dir, samples, spec, **settings):
    """Whole gradients (this rank's share) and metrics of one step."""
    model, parameters, layout, config, batch, shift, logprobs = set_up(model_dir, samples, spec, **settings)
    scored = score(model, batch, logprobs, micro_batch_size=2, seq_length=LENGTH)
    scored = None if scored is None else (scored[0] + shift, scored[1])
    metrics = step(model, layout, KEEP_NEAR, batch, scored, logprobs, MICROBATCHES, config)
    numbers = all_gather_metrics(metrics, layout.dp_cp_group) if layout.is_last_stage else {}
    ours = whole_gradients(parameters, layout)
    ps.destroy_model_parallel()
    return ours, numbers


def auxiliary(model_dir, samples, spec):
    """Gradients of MoE's auxiliary losses alone (equal rewards: no advantage), by how many rows are rejected."""
    equal = [s | {"reward": 1.0} for s in samples]
    losses = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
    return {
        (rows, per_token): gradients(
            model_dir, far(equal, ROWS.get(rows, ())), spec | {"per_token": per_token}, **losses
        )
        for rows in ("none", "one rank") for per_token in (False, True)
    }  # fmt: skip


def skipped(model_dir, samples, spec, config):
    """An ordinary step, then one of which all is rejected: weights and moments after each, and what was reported."""
    model, parameters, layout, _, batch, _, logprobs = set_up(model_dir, samples, spec)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1), model)
    batches, reports = [batch, replace(batch, rollout_logprobs=batch.rollout_logprobs - 3.0)], []
    corrected = CorrectedStep(
        config=config, layout=layout, logprobs=logprobs, push=lambda version: None, report=reports.append,
        collector=SimpleNamespace(device="cpu", collect=lambda step: batches[step], metrics={}), close=lambda: None,
        micro_batch_size=2, global_batch_size=16, seq_length=LENGTH, group_size=4,
    )  # fmt: skip

    def train_step(forward_step, iterators):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators, model=model,
            num_microbatches=len(batch.tokens) // 2, seq_length=LENGTH, micro_batch_size=2, forward_only=False,
        )
        updated, grad_norm, _ = optimizer.step()
        return {}, int(not updated), False, False, 0, grad_norm, None, 0

    states = [snapshot(parameters, optimizer)]
    for iteration in range(2):
        corrected.run(train_step, iteration, model, optimizer, per_token=False)
        states.append(snapshot(parameters, optimizer))
    ps.destroy_model_parallel()
    return states, reports


def snapshot(parameters, optimizer):
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [state for part in parts for state in part.optimizer.state.values()]
    moments = [value for state in states for value in state.values() if torch.is_tensor(value)]
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in [p.tensor for p in parameters] + moments])


def everything_of(model_dir, samples, spec):
    parts = {rows: gradients(model_dir, far(samples, which), spec) for rows, which in ROWS.items()}
    return {"gradients": parts, "auxiliary": auxiliary(model_dir, samples, spec),
            "skipped": {c.bypass_mode: skipped(model_dir, samples, spec, c) for c in (KEEP_NEAR, BYPASS)}}  # fmt: skip


def main(processes, model_dir, reference_path, out, *specs):
    samples = torch.load(reference_path, weights_only=True)["samples"]
    save_results(everything_of, processes, model_dir, samples, out, specs)


if __name__ == "__main__":
    main(*sys.argv[1:])
