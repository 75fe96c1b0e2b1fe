"""Steps that replay routes, on real Megatron ranks; saves what test_router_replay.py looks at.

replay_worker.py PROCESSES MODEL_DIR SAMPLES.pt OUT.pt '{"tp": 2, "sp": true, "runs": ["R3", "recompute"]}'
...  saves, for each layout, a list of the ranks' results by run.
"""

import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.mcore import step as step_module
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.mcore.updates import Updates
from megatron_rl_corr.moe import routes as routes_module
from megatron_rl_corr.moe.replay import ReplayedRouters
from megatron_rl_corr.moe.routes import ReplayedRoutes, Routes
from megatron_rl_corr.reduce.context import zigzag_positions
from megatron_rl_corr.reduce.failure import PeerFailure, StartupError

sys.path.insert(0, str(Path(__file__).parent))
from forked_layouts import save_results
from layout_worker import DEALT, LENGTH, limits_of, set_up, whole_gradients

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
}
"""With a bias for the choice alone, as auxiliary-loss-free balancing has it; the checkpoint has none."""
BYPASS = RolloutCorrectionConfig(bypass_mode=True, loss="reinforce", loss_aggregation="token-mean")
WATCHED = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_is_upper=1.05,
    rollout_rs=(RejectionRule("token", "ratio", 0.85, 1.15), RejectionRule("token", "routing", upper=0.1)),
)
NO_ROUTES = replace(WATCHED, rollout_rs=WATCHED.rollout_rs[:1])
"""For runs in which nobody tells Megatron's choice from another."""
RUNS = {
    "R3": {"watch": True},
    "recompute": {"settings": RECOMPUTE},
    "selective": {
        "settings": {
            "recompute_granularity": "selective",
            "recompute_modules": ["moe"],
        }
    },
    "bias": {"settings": BIASED},
    "bypass": {"config": BYPASS},
    "R2": {"kind": "R2", "config": NO_ROUTES},
    "off": {"kind": "off", "watch": True, "config": NO_ROUTES},
    "off bias": {"kind": "off", "settings": BIASED, "config": NO_ROUTES},
    "R2 updates": {"kind": "R2", "config": NO_ROUTES, "parts": 2},
    "R2 recompute": {"kind": "R2", "settings": RECOMPUTE, "config": NO_ROUTES},
    "shift": {"routes": "shift"},
    "layers": {"routes": "layers"},
    "other": {"routes": "other"},
    "bypass shift": {"config": BYPASS, "routes": "shift"},
}
ROWS = 2
"""Of a microbatch."""


def one_run(
    model_dir,
    samples,
    spec,
    *,
    kind="R3",
    config=WATCHED,
    settings=None,
    routes="routes",
    watch=False,
    parts=1,
):
    """What is replayed, read back by hooks on the routers, of one step; its gradients and
    metrics, or its refusal.

    parts: updates of the batch; before the last one the routers' weights change their sign.
    """
    model, parameters, layout, _, batch, _, logprobs = set_up(model_dir, samples, spec, **(settings or {}))
    for chunk in model:
        for router in (m for m in chunk.modules() if isinstance(m, TopKRouter) and settings == BIASED):
            router.expert_bias = torch.linspace(-0.2, 0.2, 8)
    passes, reports, updates, tables = record(model), [], [], {}
    routed = Routes()
    if kind != "off" or watch:
        replayed = ReplayedRouters(kind, model, layout, num_layers=4, watch=watch)
        minimum = 0.25 if routes != "routes" else -1.0
        routed = ReplayedRoutes(
            replayed, layout, min_agreement=minimum, log=KeptLog(tables) if watch else None
        )
    trained = samples_of(batch, samples, layout, packed="packed" in spec)
    boundaries, rows = batch.cu_seqlens.tolist(), 1 if "packed" in spec else batch.num_sequences
    own = [samples[number].get(routes) for number in trained]
    routed.scatter(own if layout.is_data_leader else None, boundaries)
    given = routed.given if kind == "R3" else None
    corrected = CorrectedStep(
        config=config,
        layout=layout,
        logprob_settings=logprobs,
        push=lambda version: {},
        report=reports.append,
        routes=routed,
        collector=SimpleNamespace(device="cpu", collect=lambda step: batch, metrics={}, trajectories=[]),
        shape=BatchShape(
            global_batch_size=len(samples) // parts,
            group_size=4,
            micro_batch_size=ROWS,
            seq_length=LENGTH,
            packing=limits_of(spec),
            updates_per_batch=parts,
        ),
        updates=Updates(parts),
    )
    optimizer = SimpleNamespace(step=lambda: updates.append(1) or (True, 1.0, 0))

    def train_step(forward_step, iterators, microbatches):
        for chunk in model:
            chunk.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators,
            model=model,
            seq_length=LENGTH,
            num_microbatches=microbatches,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        optimizer.step()
        return {}, 0, False, False, 0, 1.0, None, 0

    refused = None
    try:
        with (
            keeping(
                step_module, "make_loss_inputs", lambda inputs: tables.update(values=values_of(inputs, rows))
            ),
            keeping(routes_module, "expert_table", lambda table: tables.update(table=table)),
        ):
            for update in range(parts):
                for router in (
                    m for chunk in model for m in chunk.modules() if isinstance(m, TopKRouter) and update
                ):
                    router.weight.data.neg_()
                corrected.run(train_step, update, model, optimizer, per_token=False)
    except (StartupError, PeerFailure) as error:
        refused = str(error) if isinstance(error, StartupError) else "by another rank"
    result = {
        "refused": refused,
        "updates": len(updates),
        "passes": passes,
        "dp": (layout.dp_rank, layout.dp_size),
        "positions": None if "packed" in spec else row_positions(layout),
        "trained": trained,
        "gradients": {} if refused else whole_gradients(parameters, layout),
        "metrics": (reports or [None])[0],
        "held": None if given is None else tuple(given.shape),
        "layers": None if type(routed) is Routes else replayed.layers,
        "tables": tables,
    }
    ps.destroy_model_parallel()
    return result


def samples_of(batch, samples, layout, packed):
    """The numbers of this replica's samples: of packed ones, on the leader, in the order in which
    they were dealt.
    """
    if packed:
        return list(DEALT) if layout.is_data_leader else [0] * batch.num_sequences
    share = len(samples) // layout.dp_size
    return list(range(layout.dp_rank * share, (layout.dp_rank + 1) * share))


def row_positions(layout):
    """Where the tokens of a row stand that this rank's routers see."""
    positions = zigzag_positions(layout.cp_group.rank(), layout.cp_size, (0, LENGTH))
    tp = layout.tp_group
    return positions.chunk(tp.size())[tp.rank()] if layout.sequence_parallel else positions


@contextmanager
def keeping(module, name, keep):
    """Within, keep(result) sees what the module's function returns."""
    original = getattr(module, name)

    def function(*args, **settings):
        result = original(*args, **settings)
        keep(result)
        return result

    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


def values_of(inputs, rows):
    """What the step's correction gave, in so many rows; 1 for packed samples."""
    correction = inputs.correction
    return {
        "difference": (inputs.old_logprobs - inputs.rollout_logprobs).view(rows, -1),
        "valid": correction.valid.view(rows, -1),
        "mask": correction.mask.view(rows, -1),
        "weights": correction.weights.view(rows, -1),
    }


class KeptLog:
    """Keeps what would be written."""

    def __init__(self, kept):
        self.kept = kept

    def write(self, step, layers, tables):
        self.kept["written"] = (step, tables)


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
