"""Episodes of several sequences on real Megatron ranks against Hugging Face in float64."""

import json
from pathlib import Path

import pytest
import torch

from megatron_rl_corr.rollout.sample_file import read_batch, read_trajectories
from tests import tensor_files
from tests.mcore.branches_cases import BRANCHES, CASES, REJECTED
from tests.megatron_forks import run_megatron
from tests.preloaded import run_preloaded
from tests.tiers import in_matrix, long, matrix

pytestmark = matrix
HERE = Path(__file__).resolve().parent
LOGPROBS, GRADIENT, METRIC = 1e-5, 2e-5, 2e-5
"""Absolute, relative, relative."""
EPISODES, SEQUENCES = 16, 24
LAYOUTS = {
    1: [{"packed": 24}],
    2: [
        *in_matrix({"packed": 24}),
        {"packed": 24, "cp": 2, "cases": ["episodes", "sums of sequences", "own", "unscored"]},
        *in_matrix({"packed": 24, "pp": 2, "cases": ["sequences", "norm"]}),
        # A microbatch a sequence, so that the replica of fewer sequences has some of none.
        {"packed": 1, "replay": True, "cases": ["episodes", "unscored"]},
        {"packed": 48, "tp": 2, "ep": 2, "sp": True, "replay": True, "cases": ["episodes", "tokens"]},
        # Behind an odd number of sequences interleaved stages get a microbatch of none.
        {"packed": 1, "pp": 2, "vpp": 2, "cases": ["episodes", "unscored"]},
    ],
    4: [
        {"packed": 24, "cp": 2, "replay": True, "cases": ["episodes", "sequences", "sums", "own"]},
        # The replica of fewer sequences has whole groups of microbatches of none.
        *in_matrix({"packed": 1, "pp": 2, "vpp": 2, "cases": ["episodes", "sums of sequences"]}),
    ],
}


@pytest.fixture(scope="module")
def routed_samples(tiny_moe_dir, hf_reference, tmp_path_factory):
    path = tmp_path_factory.mktemp("branches") / "samples.pt"
    reference(tiny_moe_dir, hf_reference(tiny_moe_dir), "samples", path)
    return path


def reference(*words):
    made = run_preloaded([HERE / "branches_reference.py", *words])
    assert made.returncode == 0, made.stderr[-3000:]


def joined(ranks):
    """All ranks' updates as one: [(log-probs by labels, metrics, gradients)]."""
    return [
        tuple(
            {name: value for one in parts for name, value in one.items()}
            for parts in zip(*update, strict=True)
        )
        for update in zip(*(updates for updates, _ in ranks), strict=True)
    ]


@pytest.mark.parametrize("processes", LAYOUTS)
def test_step_when_episodes_have_several_sequences_then_that_of_hugging_face(
    processes, tiny_moe_dir, routed_samples, tmp_path
):
    specs, out = LAYOUTS[processes], tmp_path / "found"
    run = run_megatron(
        HERE / "branches_worker.py",
        processes,
        tiny_moe_dir,
        routed_samples,
        out,
        *map(json.dumps, specs),
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = tensor_files.load(out)
    numbers = {labels: at for at, labels in enumerate(labels_of(routed_samples))}
    runs, orders = [], {}
    for spec, ranks in zip(specs, found, strict=True):
        check_dealt(spec, processes, ranks)
        for case in spec.get("cases", CASES):
            updates = joined([rank[case] for rank in ranks])
            taken = [sorted(numbers[labels] for labels in logprobs) for logprobs, _, _ in updates]
            name = f"R3 {case}" if "replay" in spec else case
            of_case = orders.setdefault(name, [])
            if taken not in of_case:
                of_case.append(taken)
            runs.append((spec, case, updates, (name, of_case.index(taken))))
    made = tmp_path / "made.pt"
    reference(tiny_moe_dir, routed_samples, "updates", made, json.dumps(orders))
    worked = torch.load(made)
    for spec, case, updates, order in runs:
        expected, kept = worked["made"][order]
        check(spec, case, updates, expected, worked["labels"], worked["samples"])
        if case != "unscored":
            assert not any(kept[name] for name in REJECTED) and sum(kept.values()) > SEQUENCES / 2


@pytest.mark.parametrize("layout", [{"packed": 24, "cp": 2}, *in_matrix({"packed": 24})])
def test_replay_when_samples_have_several_sequences_then_every_bit_of_the_run(
    layout, tiny_moe_dir, routed_samples, tmp_path
):
    spec = layout | {"replay": True, "cases": ["episodes", "sequences"], "folder": str(tmp_path / "saved")}
    words = tiny_moe_dir, routed_samples, tmp_path / "found", json.dumps(spec)
    run = run_megatron(HERE / "branches_worker.py", 2, *words, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    [ranks] = tensor_files.load(tmp_path / "found")
    for case in spec["cases"]:
        check_equal(ranks, case, f"replay of {case}")
        files = sorted((tmp_path / "saved" / case).iterdir())
        rows = [sample.trajectory for path in files for sample in read_trajectories(path)]
        assert len(rows) == SEQUENCES and sorted(row.branch for row in rows)[-8:] == [1, 1, 1, 1, 2, 2, 3, 4]
        assert {read_batch(path).agent_branches for path in files} == {CASES[case][3]}


@long
@pytest.mark.parametrize("layout", [*in_matrix({"packed": 24}), {"packed": 48, "tp": 2, "ep": 2, "sp": True}])
def test_step_when_each_sample_has_one_sequence_then_every_bit_of_a_run_without_agents(
    layout, tiny_moe_dir, routed_samples, tmp_path
):
    spec = layout | {"single": True}
    words = tiny_moe_dir, routed_samples, tmp_path / "found", json.dumps(spec)
    run = run_megatron(HERE / "branches_worker.py", 2, *words, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    [ranks] = tensor_files.load(tmp_path / "found")
    for case in CASES:
        check_equal(ranks, case, f"no agent {case}")
        for rank in ranks:
            sequences, episodes, of, _ = rank[case][1]
            assert of == list(range(episodes)) and rank[f"no agent {case}"][1][:3] == (
                sequences,
                episodes,
                None,
            )


def check_equal(ranks, *names):
    for one, other in zip(*(joined([rank[name] for rank in ranks]) for name in names), strict=True):
        for first, second in zip((one[0], one[2]), (other[0], other[2]), strict=True):
            assert first.keys() == second.keys() and len(first) > 5
            assert all(torch.equal(values, second[name]) for name, values in first.items())
        assert numbers_of(one[1]) == numbers_of(other[1]) and len(one[1]) > 15


def numbers_of(report):
    """Without times; NaN is not equal to itself."""
    return {name: str(value) for name, value in report.items() if "time" not in name and "per_s" not in name}


def labels_of(path):
    samples = torch.load(path, weights_only=True)
    return [tuple(torch.cat([one["prompt"], one["output"]])[1:].tolist()) for one in samples]


def check_dealt(spec, processes, ranks):
    """Whole episodes on each replica, as many on each, of other numbers of sequences."""
    replicas = processes // (spec.get("cp", 1) * spec.get("pp", 1) * spec.get("tp", 1))
    case = spec.get("cases", list(CASES))[0]
    sizes = [rank[case][1] for rank in ranks]
    assert {episodes for _, episodes, _, _ in sizes} == {EPISODES // replicas}
    leaders = [one for one in sizes if one[3]]
    assert len(leaders) == replicas and sum(sequences for sequences, *_ in leaders) == SEQUENCES
    assert replicas == 1 or len({sequences for sequences, *_ in leaders}) > 1, "as many on each"
    assert sorted(size for one in leaders for size in map(one[2].count, set(one[2]))) == sorted(
        sum(BRANCHES, ())
    )


def check(spec, case, updates, expected, labels, samples):
    where = {name: value for name, value in spec.items() if name != "cases"}, case
    parts = 1 if case == "unscored" else 2
    assert len(updates) == len(expected) == parts
    episodes = []
    for (logprobs, numbers, gradients), (by_number, metrics, grads) in zip(updates, expected, strict=True):
        assert {labels[number] for number in by_number} == logprobs.keys()
        for number, row in by_number.items():
            assert float((logprobs[labels[number]][0] - row).abs().max()) < LOGPROBS, where
        far = max(
            (float((gradients[name].double() - grad).norm() / grad.norm().clamp(min=1e-6)), name)
            for name, grad in grads.items()
        )
        assert far[0] < GRADIENT, (where, far)
        assert sum(float(grad.square().sum()) for grad in grads.values()) > 1e-4, where
        for name, value in metrics.items():
            assert numbers[name] == pytest.approx(value, rel=METRIC, abs=METRIC), (where, name)
        if "replay" in spec:
            assert numbers.get("router_replay/agreement", 1.0) > 0.999, where
        whole = [tuple(samples[number].values())[:2] for number in by_number]
        episodes.append(set(whole))
    assert all(len(own) == EPISODES // parts for own in episodes) and len(set().union(*episodes)) == EPISODES
