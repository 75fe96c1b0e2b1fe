"""Steps that replay routes, on real Megatron ranks; saves what test_router_replay.py looks at.

replay_worker.py PROCESSES MODEL_DIR SAMPLES.pt OUT.pt '{"tp": 2, "sp": true, "runs": ["R3", "recompute"]}' ...  saves,
for each layout, a list of the ranks' results by run.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.engines.sglang.routed_experts import pack
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.moe.replay import Replay
from megatron_rl_corr.moe.scatter import local_positions, scatter_routes
from megatron_rl_corr.moe.statistics import ExpertStatistics
from megatron_rl_corr.parallel.failure import PeerFailure, StartupError

sys.path.insert(0, str(Path(__file__).parent))
from forked_layouts import save_results
from layout_worker import LENGTH, set_up, whole_gradients

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BIASED = {
    "moe_router_score_function": "sigmoid", "moe_router_num_groups": 4, "moe_router_group_topk": 2,
}
"""With a bias for the choice alone, as auxiliary-loss-free balancing has it; the checkpoint has none."""
BYPASS = RolloutCorrectionConfig(bypass_mode=True, loss="reinforce", loss_aggregation="token-mean")
WATCHED = RolloutCorrectionConfig(
    rollout_is="token", rollout_is_upper=1.05,
    rollout_rs=(RejectionRule("token", "ratio", 0.85, 1.15), RejectionRule("token", "routing", upper=0.1)),
)
NO_ROUTES = replace(WATCHED, rollout_rs=WATCHED.rollout_rs[:1])
"""For runs in which nobody tells Megatron's choice from another."""
RUNS = {
    "R3": {"watch": True}, "recompute": {"settings": RECOMPUTE}, "selective": {"settings": {
        "recompute_granularity": "selective", "recompute_modules": ["moe"],
    }},
    "bias": {"settings": BIASED}, "bypass": {"config": BYPASS}, "R2": {"kind": "R2", "config": NO_ROUTES},
    "off": {"kind": "off", "watch": True, "config": NO_ROUTES},
    "off bias": {"kind": "off", "settings": BIASED, "config": NO_ROUTES},
    "R2 recompute": {"kind": "R2", "settings": RECOMPUTE, "config": NO_ROUTES},
    "shift": {"routes": "shift"}, "layers": {"routes": "layers"}, "other": {"routes": "other"},
    "bypass shift": {"config": BYPASS, "routes": "shift"},
}  # fmt: skip
ROWS = 2
"""Of a microbatch."""


def one_run(model_dir, samples, spec, *, kind="R3", config=WATCHED, settings=None, routes="routes", watch=False):
    """What is replayed, read back by hooks on the routers, of one step; its gradients and metrics, or its refusal."""
    model, parameters, layout, _, batch, _, logprobs = set_up(model_dir, samples, spec, **(settings or {}))
    for chunk in model:
        for router in (m for m in chunk.modules() if isinstance(m, TopKRouter) and settings == BIASED):
            router.expert_bias = torch.linspace(-0.2, 0.2, 8)
    replay, sp = None, spec.get("sp", False)
    if kind != "off" or watch:
        replay = Replay(kind, model, layout, num_layers=4, watch=watch)
    if kind == "R3":
        share = len(samples) // layout.dp_size
        own = [s[routes] for s in samples[layout.dp_rank * share : (layout.dp_rank + 1) * share]]
        packed = pack(own, LENGTH, replay.shape) if layout.is_data_leader else None
        batch = replace(batch, routes=scatter_routes(
            packed, share, LENGTH, shape=replay.shape, stage_layers=replay.stage_layers, layout=layout,
            sequence_parallel=sp,
        ))
    passes, reports, updates, tables = record(model), [], [], []
    corrected = CorrectedStep(
        config=config, layout=layout, logprobs=logprobs, push=lambda version: None,
        report=reports.append, close=lambda: None, micro_batch_size=ROWS, global_batch_size=len(samples),
        collector=SimpleNamespace(device="cpu", collect=lambda step: batch, metrics={}), seq_length=LENGTH,
        group_size=4, replay=replay, min_agreement=0.25 if routes != "routes" else -1.0, sequence_parallel=sp,
        experts=Kept(replay, layout, tables) if watch else None,
    )  # fmt: skip
    optimizer = SimpleNamespace(step=lambda: updates.append(1) or (True, 1.0, 0))

    def train_step(forward_step, iterators):
        for chunk in model:
            chunk.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators, model=model,
            num_microbatches=len(batch.tokens) // ROWS, seq_length=LENGTH, micro_batch_size=ROWS, forward_only=False,
        )
        optimizer.step()
        return {}, 0, False, False, 0, 1.0, None, 0

    refused = None
    try:
        corrected.run(train_step, 0, model, optimizer, per_token=False)
    except (StartupError, PeerFailure) as error:
        refused = str(error) if isinstance(error, StartupError) else "by another rank"
    tp = (layout.tp_group.rank(), layout.tp_group.size()) if sp else (0, 1)
    result = {
        "refused": refused, "updates": len(updates), "passes": passes, "dp": (layout.dp_rank, layout.dp_size),
        "positions": local_positions(LENGTH, (layout.cp_group.rank(), layout.cp_size), tp),
        "gradients": {} if refused else whole_gradients(parameters, layout), "metrics": (reports or [None])[-1],
        "held": None if batch.routes is None else tuple(batch.routes.shape), "layers": replay and replay.layers,
        "tables": tables,
    }  # fmt: skip
    ps.destroy_model_parallel()
    return result


class Kept(ExpertStatistics):
    """Keeps the table of each step, what its values were made of, and what is told."""

    def __init__(self, replay, layout, kept):
        super().__init__(replay, layout, lambda step, means: kept.append((step, means)))
        object.__setattr__(self, "kept", kept)

    def all_gather(self, batch, targets):
        table = super().all_gather(batch, targets)
        self.kept.append(table)
        if targets is not None:
            correction = targets.correction
            self.kept.append({
                "difference": (targets.old_logprobs - batch.rollout_logprobs.reshape(-1)).view_as(batch.tokens),
                "valid": correction.valid.view_as(batch.tokens), "mask": correction.mask.view_as(batch.tokens),
                "weights": correction.weights.view_as(batch.tokens),
            })
        return table


def record(model):
    """Filled by what each router then does: (layer, in training mode, with gradients, [t, b, E] bool)."""
    passes = []

    def hook(module, inputs, output):
        chosen = output[1].detach().view(*inputs[0].shape[:2], -1)
        passes.append((module.layer_number - 1, module.training, torch.is_grad_enabled(), chosen.clone()))

    for chunk in model:
        for router in (m for m in chunk.modules() if isinstance(m, TopKRouter)):
            router.register_forward_hook(hook)
    return passes


def every_run(model_dir, samples, spec):
    return {run: one_run(model_dir, samples, spec, **RUNS[run]) for run in spec["runs"]}


def main(processes, model_dir, samples_path, out, *specs):
    save_results(every_run, processes, model_dir, torch.load(samples_path, weights_only=True), out, specs)


if __name__ == "__main__":
    main(*sys.argv[1:])
