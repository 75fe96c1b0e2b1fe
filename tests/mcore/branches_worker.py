"""A batch of episodes of several sequences, collected, dealt out and trained on real Megatron ranks.

branches_worker.py PROCESSES MODEL_DIR SAMPLES.pt OUT.pt '{"packed": 24, "cp": 2, "replay": true}' ...
saves of each layout what every rank found: case -> its updates, metrics and what the replica was dealt. With
"folder" the samples of each case are saved there, and "replay of CASE" is what their files train. "single":
each sample is one sequence, and "no agent CASE" knows of no episodes.
"""

import concurrent.futures
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory, VersionSpan
from megatron_rl_corr.features.samples.feature import SavedSamplesFeature
from megatron_rl_corr.mcore import loss as loss_module
from megatron_rl_corr.mcore.batch.collect_metrics import COUNTED, count_samples
from megatron_rl_corr.mcore.batch.collector import BatchCollector
from megatron_rl_corr.mcore.batch.replay_collector import ReplayCollector
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.mcore.updates import Updates
from megatron_rl_corr.moe.routes import Routes
from megatron_rl_corr.rollout.groups import Group, Taken

sys.path.insert(0, str(Path(__file__).parent))
from branches_cases import (
    BATCH,
    BRANCHES,
    CASES,
    KEPT,
    RATE,
    SCALE_LENGTH,
    SEED,
    SINGLE,
    WEIGHT,
    branched,
)
from forked_layouts import save_results
from layout_cases import OWN
from layout_worker import GROUP_SIZE, LENGTH, limits_of, set_up, whole_gradients
from packed_updates_worker import TrainedLogprobs
from updates_worker import megatrons


def config_of(case):
    aggregation, denominator, advantage, _ = CASES[case]
    rules = {} if case == "unscored" else {"rollout_rs": (RejectionRule("seq_mean", "ratio", *KEPT),)}
    return RolloutCorrectionConfig(
        loss="ppo_clip",
        clip_ratio_c=None,
        advantage=f"{OWN}:leave_best_out" if advantage == "own" else advantage,
        loss_aggregation=aggregation,
        loss_denominator=denominator,
        loss_scale_length=SCALE_LENGTH if aggregation.endswith("norm") else None,
        rollout_is="token",
        rollout_is_upper=WEIGHT,
        **rules,
    )


class Given(BatchCollector):
    """Takes groups that are there, as a collector of servers would have them."""

    def __init__(self, samples, layout, shape, routes, agent_branches):
        how = {"num_turns": None, "truncated_samples": "train", "routes": routes}
        super().__init__(layout, shape, SamplingParams(16), agent_branches=agent_branches, **how)
        own = range(layout.dp_rank * self._groups, (layout.dp_rank + 1) * self._groups)
        self._taken = Taken(
            [group_of(number, samples, routes) for number in own], ready=0, running=0, dropped=0
        )

    def _submit_take(self, number):
        taken = concurrent.futures.Future()
        taken.set_result(self._taken)
        return taken

    def _has_arrived(self, taking, batch, since):
        return True

    def _count(self, taken, version):
        shape = self._routes.server_shape
        own = count_samples(taken, version, None if shape is None else shape.experts)
        own["ended"] = own["samples"]
        return [float(own.get(name, 0)) for name in COUNTED]

    def _origin(self, group):
        return None

    def cursor_of_all_replicas(self, batches, *, with_last):
        return None

    def close(self):
        pass

    def _share_failures(self):
        pass


def group_of(number, samples, routes):
    mine = [s for s in samples if s["group"] == number]
    trajectories = [
        Trajectory(
            prompt_index=0,
            sample_index=s["sample"],
            prompt_ids=s["prompt"],
            output_ids=s["output"],
            rollout_logprobs=s["rollout"].float(),
            finish_reason="stop",
            weight_versions=(VersionSpan(str(BATCH), 0, len(s["output"])),),
            cached_tokens=0,
            server="http://none",
            routed_experts=None if routes.server_shape is None else s["routes"][:-1].to(torch.uint8),
            branch=s["branch"],
        )
        for s in mine
    ]
    return Group(number, trajectories, [s["reward"] for s in mine])


def replayed(model, layout, layers):
    """R3, which refuses tokens whose experts are not those that the model itself would choose."""
    from megatron_rl_corr.moe.replay import ReplayedRouters  # Megatron before 0.16 has no replay
    from megatron_rl_corr.moe.routes import ReplayedRoutes

    return ReplayedRoutes(ReplayedRouters("R3", model, layout, num_layers=layers), layout, min_agreement=0.9)


def files_of(folder, case, parts, model_dir):
    """Options of a run that saves its samples, and of one that trains on them."""
    known = {
        "hf_checkpoint": str(model_dir),
        "group_size": GROUP_SIZE,
        "max_new_tokens": 16,
        "updates_per_batch": parts,
        "updates_of_batch": parts,
        "save_routed_experts": True,
        "save_trajectories": str(Path(folder) / case),
        "max_turns": None,
        "truncated_samples": "train",
    }
    left_out = ("updates_of_batch", "save_routed_experts", "save_trajectories")
    given = {name: value for name, value in known.items() if name not in left_out}
    return SimpleNamespace(most_turns=None, **known), RunConfig(replay=str(Path(folder) / case), **given)


def trained(model, parameters, layout, samples, settings, optimizer, spec, name, routes, model_dir):
    """([(log-probs, metrics, gradients) of each update], what the replica was dealt)."""
    case = name.removeprefix("replay of ").removeprefix("no agent ")
    parts, episodes = 1 if case == "unscored" else 2, len({(s["group"], s["sample"]) for s in samples})
    shape = BatchShape(
        episodes // parts, GROUP_SIZE, 2, LENGTH, packing=limits_of(spec), updates_per_batch=parts
    )
    agent_branches = None if name.startswith("no agent") else CASES[case][3]
    collector, reports, features = Given(samples, layout, shape, routes, agent_branches), [], []
    if "folder" in spec:
        saving, replaying = files_of(spec["folder"], case, parts, model_dir)
    if name.startswith("replay of"):
        batches = {"batches": (BATCH, BATCH + 1), "iteration": BATCH * parts, "vocab_size": 80}
        collector = ReplayCollector(replaying, layout, shape, **batches, routes=routes)
    elif "folder" in spec:
        features = [SavedSamplesFeature(saving)]
        features[0].open(
            SimpleNamespace(settings=SimpleNamespace(layout=layout), collector=collector, shape=shape)
        )
    train_step = megatrons(model, optimizer)
    corrected = CorrectedStep(
        config=config_of(case),
        layout=layout,
        logprob_settings=settings,
        routes=routes,
        push=lambda version: {},
        report=reports.append,
        collector=collector,
        shape=shape,
        updates=Updates(parts, 1, None, SEED),
        features=features,
    )
    trainable = [one for one in parameters if one.tensor.requires_grad]
    original, collect, seen, batches = loss_module.label_logprobs, collector.collect, None, []

    def collected(number):
        nonlocal seen
        batches.append(collect(number))
        seen = loss_module.label_logprobs = TrainedLogprobs(batches[0], layout)
        seen.original = original
        return batches[0]

    collector.collect, found = collected, []
    try:
        for update in range(parts):
            if seen is not None:
                seen.begin()
            corrected.run(train_step, BATCH * parts + update, model, optimizer, per_token=False)
            found.append(
                (seen.by_sample(), reports[-1] if reports else {}, whole_gradients(trainable, layout))
            )
    finally:
        loss_module.label_logprobs = original
        collector.close()
        for feature in features:
            feature.close()
    batch = batches[0]
    of = None if batch.episodes is None else batch.episodes.tolist()
    return found, (batch.num_sequences, batch.num_episodes, of, len(collector.trajectories))


def run(model_dir, samples, spec):
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": "0"}
    model, parameters, layout, config, _, _, settings = set_up(model_dir, samples, spec)
    samples = branched(samples, SINGLE if spec.get("single") else BRANCHES)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=RATE, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0), model
    )
    first, found = [one.tensor.detach().clone() for one in parameters], {}
    cases = list(spec.get("cases", CASES))
    further = {"folder": "replay of", "single": "no agent"}
    names = [f"{words} {case}" for key, words in further.items() if key in spec for case in cases]
    for name in [*cases, *names]:
        routes = replayed(model, layout, config.num_layers) if spec.get("replay") else Routes()
        for one, values in zip(parameters, first, strict=True):
            one.tensor.data.copy_(values)
        optimizer.reload_model_params()
        arguments = model, parameters, layout, samples, settings, optimizer, spec, name, routes
        found[name] = trained(*arguments, model_dir)
    return found


def main(processes, model_dir, samples, out, *specs):
    save_results(run, processes, model_dir, torch.load(samples, weights_only=True), out, specs)


if __name__ == "__main__":
    main(*sys.argv[1:])
