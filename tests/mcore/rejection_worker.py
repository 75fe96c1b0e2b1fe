"""Steps of which much or all is rejected, or that must not be taken, on real Megatron ranks; for
test_rejection.py.

rejection_worker.py PROCESSES MODEL_DIR REFERENCE.pt OUT.pt '{"ep": 2}' ...  saves a list with, for each
layout, what `everything_of` returns.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core import parallel_state as ps
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
from megatron_rl_corr.mcore.first_step import FirstStep
from megatron_rl_corr.mcore.forward import compute_log_probs
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.reduce.collectives import all_reduce_metrics
from megatron_rl_corr.reduce.failure import PeerFailure, StartupError

sys.path.insert(0, str(Path(__file__).parent))
import layout_worker
from forked_layouts import save_results
from layout_worker import LENGTH, set_up, step, whole_gradients
from padding_worker import without_bias

layout_worker.local_parameters = without_bias

KEEP_NEAR = RolloutCorrectionConfig(rollout_rs=(RejectionRule("seq_mean", "ratio", 0.8, 1.25),))
WIDE = RolloutCorrectionConfig(rollout_rs=(RejectionRule("seq_mean", "ratio", 0.4, 2.5),))
BYPASS = replace(WIDE, bypass_mode=True, loss="reinforce", loss_aggregation="token-mean")
MICROBATCHES = 4
MICRO_BATCH_SIZE = 4
"""Rows of a microbatch, where the number of microbatches follows from it."""
ROWS = {"one microbatch": range(4), "one rank": range(8, 16), "all": range(16)}
"""Which of the 16 samples are rejected."""


def far(samples, rows):
    """The samples, with the given rows' rollout log-probs so far off that the rule drops them."""
    return [s | {"rollout": s["rollout"] - 3.0} if i in rows else s for i, s in enumerate(samples)]


def gradients(model_dir, samples, spec, **settings):
    """Whole gradients (this rank's share) and metrics of one step."""
    model, parameters, layout, config, batch, shift, logprobs = set_up(model_dir, samples, spec, **settings)
    packs = Packs.of_rows(batch, batch.num_sequences // MICROBATCHES, LENGTH)
    scored = compute_log_probs(model, packs, logprobs, routes=Routes())
    scored = None if scored is None else (scored[0] + shift, scored[1])
    metrics = step(model, layout, KEEP_NEAR, packs, scored, logprobs, config)
    numbers = all_reduce_metrics(metrics, layout.dp_cp_group) if layout.is_last_stage else {}
    ours = whole_gradients(parameters, layout)
    ps.destroy_model_parallel()
    return ours, numbers


def auxiliary(model_dir, samples, spec):
    """Gradients of MoE's auxiliary losses alone (equal rewards: no advantage), by how many
    rows are rejected.
    """
    equal = [s | {"reward": 1.0} for s in samples]
    losses = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_z_loss_coeff": 0.1,
    }
    return {
        (rows, per_token): gradients(
            model_dir, far(equal, ROWS.get(rows, ())), spec | {"per_token": per_token}, **losses
        )
        for rows in ("none", "one rank")
        for per_token in (False, True)
    }


def corrected_step(config, layout, logprobs, collect, reports, **others):
    """A CorrectedStep on what collect(iteration) gives; what it reports and pushes goes to `reports`."""
    return CorrectedStep(
        config=config,
        layout=layout,
        logprob_settings=logprobs,
        push=lambda version: reports.append({"pushed": version}) or {},
        report=reports.append,
        collector=SimpleNamespace(device="cpu", collect=collect, metrics={}, trajectories=[]),
        shape=BatchShape(
            global_batch_size=16, group_size=4, micro_batch_size=MICRO_BATCH_SIZE, seq_length=LENGTH
        ),
        **others,
    )


def megatrons(model, optimizer, leaving):
    """Megatron's `train_step`: the gradient, and an update unless the rerun state machine
    leaves before it.
    """

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
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )
        if leaving():
            return {}, True, True, True, 17, None, None, 0
        updated, grad_norm, _ = optimizer.step()
        return {}, int(not updated), False, False, 0, grad_norm, None, 0

    return train_step


def two_steps(model_dir, samples, spec, case):
    """An ordinary step, then one without update: the state after each, and what was pushed and reported."""
    config, change = SKIPPED[case]
    model, parameters, layout, _, batch, _, logprobs = set_up(model_dir, samples, spec, **BALANCED)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1), model)
    batches, reports = [batch, change(batch)], []
    corrected = corrected_step(config, layout, logprobs, lambda step: batches[step], reports)
    states = [snapshot(model, parameters, optimizer)]
    for iteration in range(2):
        leaving = case == "leaving" and iteration == 1
        train_step = megatrons(model, optimizer, lambda leaving=leaving: leaving)
        result = corrected.run(train_step, iteration, model, optimizer, per_token=False)
        states.append(snapshot(model, parameters, optimizer))
    ps.destroy_model_parallel()
    return states, reports, result[3]


def snapshot(model, parameters, optimizer):
    """(weights, Adam's moments, the routers' balancing biases), each in one vector."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [state for part in parts for state in part.optimizer.state.values()]
    moments = [value for state in states for value in state.values() if torch.is_tensor(value)]
    biases = [b for chunk in model for name, b in chunk.named_buffers() if name.endswith("expert_bias")]
    return [
        torch.cat([torch.zeros(0)] + [tensor.detach().double().reshape(-1).clone() for tensor in tensors])
        for tensors in ([p.tensor for p in parameters], moments, biases)
    ]


BALANCED = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 1e-3,
}
"""The last stage's backward pass moves a bias, before the optimizer's step."""
WEIGHTS = RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=2.0)


def with_servers(batch, change):
    """The batch with change(log-probs) for the servers' own; on stages that have none, as it is."""
    if batch.rollout_logprobs is None:
        return batch
    return replace(batch, rollout_logprobs=change(batch.rollout_logprobs))


def nothing_left(batch):
    return with_servers(batch, lambda logprobs: logprobs - 3.0)


def equal_rewards(batch):
    return replace(batch, rewards=torch.full_like(batch.rewards, 0.3))


SKIPPED = {
    "rejected": (WIDE, nothing_left),
    "rejected in the loss": (BYPASS, nothing_left),
    "no log-probs": (
        WEIGHTS,
        lambda batch: with_servers(batch, lambda logprobs: logprobs * torch.nan),
    ),
    "equal rewards": (WEIGHTS, equal_rewards),
    "equal rewards, scored": (WIDE, equal_rewards),
    "leaving": (WEIGHTS, lambda batch: batch),
}
"""Why the second step makes no update: its configuration, and its batch of the first one's."""


def first_steps(model_dir, samples, spec):
    """Of each planted fault, and config: the error, the updates and the pushes of the first
    step after a start.
    """
    exact = [s | {"rollout": s["now"]} for s in samples]
    model, parameters, layout, _, batch, _, logprobs = set_up(model_dir, exact, spec)
    layers = [m for chunk in model for m in chunk.modules() if hasattr(m, "hidden_dropout")]
    found = {}
    for fault in (
        "dropout",
        "shift",
        "checkpoint",
        "nan",
        "no own token",
        "other tokens are old",
        "few tokens are absurd",
        "all are cut",
        "shift of cut ones",
        "right",
    ):
        given = batch
        if "cut" in fault:  # as --rollout-truncated-samples mask leaves them
            given = replace(batch, in_loss=torch.zeros_like(batch.version_lags, dtype=torch.bool))
        if fault.startswith("shift"):
            # The log-prob of the token before, wherever this rank has it.
            given = with_servers(given, lambda logprobs: logprobs.roll(1).where(batch.loss_mask, 0.0))
        elif fault == "no own token":
            given = replace(batch, version_lags=batch.version_lags + 1)
        elif fault == "nan":
            given = with_servers(batch, lambda logprobs: logprobs * torch.nan)
        elif fault == "other tokens are old":
            lags = (torch.arange(batch.num_sequences) % 2).float()
            given = with_servers(
                replace(batch, version_lags=lags), partial(older_are_worse, batch=batch, lags=lags)
            )
        elif fault == "few tokens are absurd":
            given = with_servers(batch, partial(few_are_absurd, mask=batch.loss_mask))
        kept = [p.tensor.detach().clone() for p in parameters]
        if fault == "checkpoint":
            for p in parameters:
                p.tensor.data.mul_(1.2)
        for layer in layers:
            layer.hidden_dropout = 0.1 if fault == "dropout" else 0.0
        for name, config in (("scored", KEEP_NEAR), ("in the loss", WEIGHTS)):
            found[fault, name] = first_step(config, model, layout, logprobs, given)
        for p, before in zip(parameters, kept, strict=True):
            p.tensor.data.copy_(before)
    ps.destroy_model_parallel()
    return found


def older_are_worse(logprobs, *, batch, lags):
    return logprobs - batch.loss_mask * 0.5 * batch.spread(lags)


def few_are_absurd(logprobs, *, mask):
    few = mask & (mask.cumsum(0) % 40 == 20)
    assert few.any() or mask.sum() < 20
    return torch.where(few, -1e30, logprobs)


def first_step(config, model, layout, logprobs, batch):
    """(error, updates, versions that were pushed) of step 6 as the first one after a start."""
    reports, updates, error = [], [], None
    optimizer = SimpleNamespace(zero_grad=lambda: None, step=lambda: updates.append(1) or (True, 1.0, 0))
    corrected = corrected_step(
        config, layout, logprobs, lambda step: batch, reports, first_step=FirstStep(5, 1e-4)
    )
    try:
        corrected.run(megatrons(model, optimizer, lambda: False), 5, model, optimizer, per_token=False)
    except (StartupError, PeerFailure) as failure:
        error = str(failure) if isinstance(failure, StartupError) else "another rank"
    return error, len(updates), [report["pushed"] for report in reports if "pushed" in report]


def dropped_out(model_dir, samples, spec):
    """Metrics of a step with dropout in training mode, which the scoring pass does not have;
    on the last rank.
    """
    model, _, layout, _, batch, _, logprobs = set_up(model_dir, samples, spec, hidden_dropout=0.1)
    reports, optimizer = [], SimpleNamespace(zero_grad=lambda: None, step=lambda: (True, 1.0, 0))
    corrected = corrected_step(WIDE, layout, logprobs, lambda step: batch, reports)
    corrected.run(megatrons(model, optimizer, lambda: False), 0, model, optimizer, per_token=False)
    ps.destroy_model_parallel()
    return reports[-1]


def everything_of(model_dir, samples, spec):
    parts = {rows: gradients(model_dir, far(samples, which), spec) for rows, which in ROWS.items()}
    return {
        "gradients": parts,
        "auxiliary": auxiliary(model_dir, samples, spec),
        "skipped": {case: two_steps(model_dir, samples, spec, case) for case in SKIPPED},
        "first": first_steps(model_dir, samples, spec),
        "dropout": dropped_out(model_dir, samples, spec),
    }


def main(processes, model_dir, reference_path, out, *specs):
    samples = torch.load(reference_path, weights_only=True)["samples"]
    save_results(everything_of, processes, model_dir, samples, out, specs)


if __name__ == "__main__":
    main(*sys.argv[1:])
