"""Replayed routes on real Megatron ranks: read back from the routers, and what a step does with them.

The routes are those that one process chooses by itself (which "off" tells), changed for some tokens as
another engine would. T tokens of a sample, M layers, k experts a token.
"""

import json
from pathlib import Path

import pytest
import torch

from tests import tensor_files
from tests.megatron_forks import run_megatron
from tests.tiers import in_matrix, matrix

pytestmark = matrix

HERE = Path(__file__).resolve().parent
LAYERS, TOP_K, EXPERTS, SAMPLES, ROWS = 4, 2, 8, 16, 2
REFUSED = ("shift", "layers", "other")
TWO = [
    {"cp": 2, "runs": ["R3", "bypass", "shift"]},
    *in_matrix(
        {"pp": 2, "runs": ["R3", "R2", "layers"]},
        {"tp": 2, "sp": True, "runs": ["R3", "shift"]},
        {"ep": 2, "runs": ["R3", "R2", "other", "off"]},
    ),
]
FOUR = [
    {"tp": 2, "pp": 2, "ep": 2, "sp": True, "runs": ["R3", "recompute", "R2 recompute"]},
    *in_matrix(
        {"cp": 2, "pp": 2, "vpp": 2, "ep": 2, "runs": ["R3", "recompute", "shift"]},
        {"pp": 4, "runs": ["R3"]},
        {"tp": 2, "cp": 2, "ep": 2, "sp": True, "runs": ["R3", "bias"]},
        {"tp": 2, "ep": 2, "etp": 2, "sp": True, "runs": ["R3"]},
        {"ep": 4, "runs": ["R3", "off"]},
    ),
]
PACKED = {
    1: [{"packed": 64, "runs": ["R3", "recompute", "bypass", "R2", "off", "shift", "other"]}],
    2: [
        {"packed": 64, "cp": 2, "runs": ["R3", "R2"]},
        *in_matrix(
            {"packed": 48, "pp": 2, "vpp": 2, "runs": ["recompute"]},
            {"packed": 64, "tp": 2, "sp": True, "runs": ["R2", "R2 updates", "shift"]},
        ),
    ],
    4: [
        *in_matrix(
            {"packed": 64, "tp": 2, "cp": 2, "ep": 2, "sp": True, "runs": ["R3", "R2 recompute", "off"]}
        ),
        *in_matrix({"packed": 64, "tp": 2, "pp": 2, "ep": 2, "sp": True, "runs": ["R3"]}),
    ],
}
"""Sequences packed into microbatches of at most so many tokens."""
ALONE = [
    {
        "runs": [
            "R3",
            "recompute",
            "selective",
            "bias",
            "bypass",
            "R2",
            "R2 updates",
            "R2 recompute",
            "off",
            *REFUSED,
            "bypass shift",
        ]
    }
]


def some_samples():
    """16 responses to 4 prompts, of unlike lengths; their routes come later."""
    generator, samples = torch.Generator().manual_seed(3), []
    for index in range(SAMPLES):
        prompt, output = 4 + index // 4, 10 + index % 8
        ids = torch.randint(0, 80, (prompt + output,), generator=generator)
        samples.append(
            {
                "group": index // 4,
                "prompt": ids[:prompt],
                "output": ids[prompt:],
                "reward": float(index % 3),
                "rollout": torch.full((output,), -4.4),
                "old_shift": torch.zeros(output),
            }
        )
    return samples


def worked(processes, model_dir, folder, samples, specs):
    """replay_worker.py's results: by layout, by rank, by run."""
    source, out = folder / f"samples{processes}.pt", folder / f"out{processes}.pt"
    torch.save(samples, source)
    arguments = [processes, model_dir, source, out, *map(json.dumps, specs)]
    run = run_megatron(HERE / "replay_worker.py", *arguments, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    return tensor_files.load(out)


def chosen_alone(rank, samples, *, biased=False):
    """Each sample's [T - 1, M, k] of one process's scoring pass in the run "off": Megatron's own choice."""
    places, found = {}, [torch.zeros(len(s["prompt"]) + len(s["output"]) - 1, LAYERS, TOP_K) for s in samples]
    for layer, training, _, chosen in rank["off bias" if biased else "off"]["passes"]:
        if not training:
            first = places.setdefault(layer, 0)
            places[layer] += ROWS
            for row in range(ROWS):
                routes = found[first + row]
                routes[:, layer] = chosen[: len(routes), row].nonzero()[:, 1].view(-1, TOP_K)
    return [routes.to(torch.uint8) for routes in found]


MISSING, RETRACTED, LOST = 255, 3, slice(4, 11)
"""An id that is none; tokens of a sample whose routes are lost, as after a retraction, the last
of its prompt too.
"""


def known(routes):
    """[T] bool: the tokens of `changed` that have routes."""
    return (routes != MISSING).all(dim=(1, 2))


def changed(routes, index):
    """As another engine would: every seventh token's second expert is another in one layer;
    sample 5 has none.
    """
    routes = routes.clone()
    if index == 5:
        return torch.full_like(routes, MISSING)
    for token in range(index % 7, len(routes), 7):
        layer = token % LAYERS
        taken = routes[token, layer].tolist()
        routes[token, layer, 1] = next(e for e in range(EXPERTS) if e not in taken)
    if index == RETRACTED:
        routes[LOST] = MISSING
    return routes


@pytest.fixture(scope="module")
def samples(tiny_moe_dir, tmp_path_factory):
    """With `routes`, and wrong ones under the names of REFUSED; `own` is Megatron's choice."""
    samples = some_samples()
    [[rank]] = worked(
        1, tiny_moe_dir, tmp_path_factory.mktemp("routes"), samples, [{"runs": ["off", "off bias"]}]
    )
    for index, (sample, own) in enumerate(zip(samples, chosen_alone(rank, samples), strict=True)):
        sample |= {"own": own, "routes": changed(own, index)}
        # One sample of the third prompt is wrong in each way; all others are right.
        wrong = dict.fromkeys(REFUSED, own)
        if index == 9:
            other = torch.rand(len(own), LAYERS, EXPERTS, generator=torch.Generator().manual_seed(1))
            wrong = {
                "shift": own.roll(1, 0),
                "layers": own[:, [3, 2, 1, 0]],
                "other": other.topk(TOP_K).indices.to(torch.uint8),
            }
        sample |= wrong
    return samples


@pytest.fixture(scope="module")
def results(tiny_moe_dir, tmp_path_factory, samples):
    """(layout, run) -> the ranks' results."""
    folder, found = tmp_path_factory.mktemp("replay"), {}
    for processes, specs in ((1, ALONE), (2, TWO), (4, FOUR)):
        specs = specs + PACKED[processes]
        for spec, ranks in zip(specs, worked(processes, tiny_moe_dir, folder, samples, specs), strict=True):
            layout = json.dumps({name: value for name, value in spec.items() if name != "runs"})
            found |= {(layout, run): [rank[run] for rank in ranks] for run in spec["runs"]}
    return found


def cases(*runs, specs=ALONE + TWO + FOUR):
    return [
        (json.dumps({name: value for name, value in spec.items() if name != "runs"}), run)
        for spec in specs
        for run in spec["runs"]
        if run in runs
    ]


def packed_cases(*runs):
    return cases(*runs, specs=[spec for specs in PACKED.values() for spec in specs])


def assert_replayed(rank, samples, name):
    """Every pass of every router took the routes under `name` where there are some; how many
    passes there were.
    """
    (dp, dp_size), count = rank["dp"], {}
    share = len(samples) // dp_size
    for layer, training, grad, chosen in rank["passes"]:
        kind = (layer, training, grad)
        first = dp * share + count.setdefault(kind, 0)
        count[kind] += ROWS
        for row in range(ROWS):
            routes = samples[first + row][name]
            here = rank["positions"] < len(routes)
            wanted = routes[rank["positions"][here], layer].long()
            told = wanted[:, 0] != wanted[:, 1]
            used = chosen[here, row][told]
            expected = torch.zeros_like(used).scatter(1, wanted[told], True)
            assert torch.equal(used, expected), (kind, first + row)
            assert (chosen[:, row].sum(dim=1) == TOP_K).all()
    assert all(rows == share for rows in count.values())
    return count


@pytest.mark.parametrize(("layout", "run"), cases("R3", "recompute", "selective", "bias", "bypass"))
def test_r3_when_read_back_from_the_routers_then_the_servers_experts_in_every_pass(
    results, samples, layout, run
):
    for rank in results[layout, run]:
        passes = assert_replayed(rank, samples, "routes")
        layers = {layer for layer, _, _ in passes}
        assert layers == set(rank["layers"])
        grads = {False, True} if run in ("recompute", "selective") else {True}
        expected = {(layer, True, grad) for layer in layers for grad in grads}
        expected |= set() if run == "bypass" else {(layer, False, False) for layer in layers}
        assert passes.keys() == expected


@pytest.mark.parametrize(("layout", "run"), cases("R2", "R2 recompute"))
def test_r2_when_read_back_from_the_routers_then_the_scoring_pass_is_natural_and_training_repeats_it(
    results, samples, layout, run
):
    for rank in results[layout, run]:
        passes = assert_replayed(rank, samples, "own")
        assert {training for _, training, _ in passes} == {False, True}


@pytest.mark.parametrize(
    ("layout", "run"),
    [c for c in cases("R3", "recompute", "bias", "bypass", "R2", "R2 recompute") if c[0] != "{}"]
    + packed_cases("R3", "recompute", "bypass", "R2", "R2 updates", "R2 recompute"),
)
def test_replayed_step_in_every_layout_then_gradients_and_metrics_are_those_of_one_process(
    results, layout, run
):
    ranks, [alone] = results[layout, run], results["{}", run]
    found = {name: gradient for rank in ranks for name, gradient in rank["gradients"].items()}
    assert found.keys() == alone["gradients"].keys() and len(found) == 135
    for name, gradient in alone["gradients"].items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < 1e-5, (name, error)
    [numbers] = [rank["metrics"] for rank in ranks if rank["metrics"] is not None]
    names = {
        name for name in alone["metrics"] if name.startswith(("router_replay/", "rollout_corr/log_ratio_abs"))
    }
    assert len(names) > 5
    for name in names:
        assert numbers[name] == pytest.approx(alone["metrics"][name], rel=1e-4, abs=1e-6, nan_ok=True), name


def test_recomputation_when_routes_are_replayed_then_gradients_are_those_without_it(results):
    [plain], [r2] = results["{}", "R3"], results["{}", "R2"]
    for other, reference in (("recompute", plain), ("selective", plain), ("R2 recompute", r2)):
        [found] = results["{}", other]
        for name, gradient in reference["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-5, atol=1e-7)


def test_routes_when_they_differ_from_megatrons_choice_then_gradients_do_too(results):
    [r3], [r2] = results["{}", "R3"], results["{}", "R2"]
    name = "model.layers.0.mlp.gate.weight"
    assert (r3["gradients"][name] - r2["gradients"][name]).norm() > 1e-3 * r2["gradients"][name].norm()
    assert r3["gradients"][name].norm() > 0


def test_tokens_without_routes_when_one_sample_has_none_then_they_go_where_megatron_chooses(results, samples):
    [rank] = results["{}", "R3"]
    for layer in range(LAYERS):
        chosen = [pas[3] for pas in rank["passes"] if pas[:2] == (layer, False)]
        own = samples[5]["own"][:, layer].long()  # row 1 of microbatch 2
        used = chosen[2][: len(own), 1]
        assert torch.equal(used, torch.zeros_like(used).scatter(1, own, True))


def test_tokens_without_routes_when_in_the_middle_of_a_sample_then_they_go_where_megatron_chooses(
    results, samples
):
    [rank], own, lost = results["{}", "R3"], samples[RETRACTED]["own"], ~known(samples[RETRACTED]["routes"])
    assert lost.tolist() == [LOST.start <= at < LOST.stop for at in range(len(own))] and lost.sum() == 7
    for layer in range(LAYERS):
        used = [pas[3] for pas in rank["passes"] if pas[:2] == (layer, False)][1][: len(own), 1]
        natural = torch.zeros_like(used).scatter(1, own[:, layer].long(), True)
        # What comes into later layers has changed with the routes of tokens before; few choices do.
        assert (used == natural).all(dim=1)[lost].sum() >= (7 if layer == 0 else 5)
        assert used[lost].sum() == 7 * TOP_K


@pytest.mark.parametrize(("layout", "run"), cases("R3"))
def test_routes_when_scattered_then_each_rank_holds_its_own_layers_and_tokens(results, layout, run):
    ranks = results[layout, run]
    for rank in ranks:
        tokens = 16 // rank["dp"][1] * 24 // json.loads(layout).get("cp", 1)
        assert rank["held"] == (tokens + 1, len(rank["layers"]), TOP_K)  # and a row without routes
    spec = json.loads(layout)
    assert all(len(rank["layers"]) == LAYERS // spec.get("pp", 1) for rank in ranks)
    apart = spec.get("cp", 1) * (spec.get("tp", 1) if spec.get("sp") else 1)
    assert all(len(rank["positions"]) == 24 // apart for rank in ranks)


def test_disagreement_when_routes_were_changed_by_hand_then_each_layers_share_of_tokens(results, samples):
    [rank] = results["{}", "R3"]
    # In the first layer nothing has changed what comes in, so Megatron's choice is `own` there.
    told = [(s["own"][known(s["routes"]), 0], s["routes"][known(s["routes"]), 0]) for s in samples]
    differs = sum(int((own != routes).any(dim=1).sum()) for own, routes in told)
    total = sum(len(own) for own, _ in told)
    assert differs > 5 and total == sum(len(s["own"]) for i, s in enumerate(samples) if i != 5) - 7
    assert rank["metrics"]["router_replay/disagreement/layer_000"] == pytest.approx(differs / total)
    assert rank["metrics"]["router_replay/overlap/layer_000"] == pytest.approx(1 - differs / total / TOP_K)


@pytest.mark.parametrize(("layout", "run"), cases(*REFUSED, "bypass shift"))
def test_routes_when_those_of_other_tokens_layers_or_weights_then_refused_by_name_and_nothing_trains(
    results, layout, run
):
    ranks = results[layout, run]
    assert all(rank["refused"] and rank["updates"] == 0 for rank in ranks)
    [said] = {rank["refused"] for rank in ranks} - {"by another rank"}
    dp_size = ranks[0]["dp"][1]
    place = 9 - 8 if dp_size == 2 else 9
    replica = 1 if dp_size == 2 else 0
    assert f"sample {place}, which is of prompt {place // 4}, of replica {replica} in step 1" in said
    assert ("rule shift" if "shift" in run else "rule agreement") in said
    assert all(
        (layer, True) not in {p[:2] for p in rank["passes"]}
        for rank in ranks
        for layer in range(LAYERS)
        if not run.startswith("bypass")
    )


@pytest.mark.parametrize(("layout", "run"), packed_cases("shift", "other"))
def test_routes_of_packs_when_those_of_other_tokens_or_weights_then_refused_by_the_samples_prompt(
    results, layout, run
):
    ranks = results[layout, run]
    assert all(rank["refused"] and rank["updates"] == 0 for rank in ranks)
    [said] = {rank["refused"] for rank in ranks} - {"by another rank"}
    assert "which is of prompt 2, of replica 0" in said
    assert ("rule shift" if run == "shift" else "rule agreement") in said


def naive_table(rank, samples):
    """[M, E, 4] token by token: from what the hooks saw of the scoring pass, and the
    correction's own values.
    """
    table, places = torch.zeros(LAYERS, EXPERTS, 4, dtype=torch.float64), [0] * LAYERS
    values = rank["tables"]["values"]
    for layer, training, _, chosen in rank["passes"]:
        if training:
            continue
        first, places[layer] = places[layer], places[layer] + ROWS
        for row in range(ROWS):
            sample = samples[first + row]
            for at in range(len(sample["prompt"]) - 1, len(sample["own"])):
                assert values["valid"][first + row, at]
                d, w = (float(values[name][first + row, at]) for name in ("difference", "weights"))
                for expert in chosen[at, row].nonzero().flatten().tolist():
                    rejected = float(not values["mask"][first + row, at])
                    table[layer, expert] += torch.tensor([1.0, abs(d), w, rejected], dtype=torch.float64)
    return table


@pytest.mark.parametrize("run", ["R3", "off"])
def test_expert_table_of_one_process_then_that_of_a_loop_over_tokens(results, samples, run):
    [rank] = results["{}", run]
    expected = naive_table(rank, samples)
    assert expected[..., 0].sum() == sum(len(s["output"]) for s in samples) * LAYERS * TOP_K
    assert 0 < expected[..., 3].sum() < expected[..., 0].sum()
    torch.testing.assert_close(rank["tables"]["table"], expected, rtol=1e-6, atol=1e-9)
    step, told = rank["tables"]["written"]
    assert step == 1
    tokens = expected[..., 0]
    torch.testing.assert_close(
        told["weight_mean"], expected[..., 2] / tokens, rtol=1e-6, atol=0, equal_nan=True
    )
    assert rank["metrics"]["experts/load_max"] == pytest.approx((tokens.amax(1) / tokens.mean(1)).max())


@pytest.mark.parametrize(
    ("layout", "run"), [c for c in cases("R3", "off") if c[0] != "{}"] + packed_cases("R3", "off")
)
def test_expert_table_in_every_layout_then_that_of_one_process_on_every_rank(results, layout, run):
    [alone], ranks = results["{}", run], results[layout, run]
    for rank in ranks:
        table = rank["tables"]["table"]
        assert torch.equal(table[..., 0], alone["tables"]["table"][..., 0])
        assert torch.equal(table[..., 3], alone["tables"]["table"][..., 3])
        torch.testing.assert_close(table, alone["tables"]["table"], rtol=1e-5, atol=1e-6)
    assert ["written" in rank["tables"] for rank in ranks] == [False] * (len(ranks) - 1) + [True]


def test_rejection_by_routing_when_one_expert_of_eight_differs_then_those_tokens_are_dropped(
    results, samples
):
    """The rule keeps up to a tenth. That every layout drops the same, the experts' tables
    tell, which count it.
    """
    [rank] = results["{}", "R3"]
    values = rank["tables"]["values"]
    assert rank["metrics"]["rollout_corr/rejected_fraction/token_routing"] > 0.05
    # In the first layer Megatron's choice is `own`; a token that was changed there is rejected,
    # whatever the others.
    for index, sample in enumerate(samples):
        told = known(sample["routes"])
        for at in range(len(sample["prompt"]) - 1, len(sample["own"])):
            if told[at] and set(sample["own"][at, 0].tolist()) != set(sample["routes"][at, 0].tolist()):
                assert not values["mask"][index, at]


def dense_layers(*what, start):
    """What dense_layers_worker.py says in lines that begin so."""
    run = run_megatron(HERE / "dense_layers_worker.py", *what)
    assert run.returncode == 0, run.stderr[-3000:]
    return [
        json.loads(line.removeprefix(start)) for line in run.stdout.splitlines() if line.startswith(start)
    ]


def test_layers_when_some_are_dense_and_others_mtp_then_only_sparse_layers_are_replayed():
    [found] = dense_layers(start="RESULT ")
    assert found["layers"] == found["shape"] == [1, 3]
    ours = {name: same for name, same in found["same"].items() if not name.startswith("mtp.")}
    assert ours == {f"decoder.layers.{layer}.mlp.router": [layer == 1, layer == 3] for layer in (1, 3)}
    [predicted] = [same for name, same in found["same"].items() if name.startswith("mtp.")]
    assert predicted == [False, False]


def test_stage_when_all_its_layers_are_dense_then_the_other_stage_replays_and_both_have_the_expert_table():
    stages = sorted(dense_layers("stages", start="STAGE "), key=lambda stage: len(stage["R3"]["layers"]))
    assert [stage["R3"]["layers"] for stage in stages] == [[], [2, 3]]
    routes = torch.tensor(stages[1]["routes"]).transpose(0, 2).flatten(1)  # [M, tokens x k]
    counts = torch.stack([layer.bincount(minlength=EXPERTS) for layer in routes]).double()
    for stage in stages:
        replayed, watched = torch.tensor(stage["R3"]["table"]), torch.tensor(stage["off"]["table"])
        assert (
            torch.equal(replayed[2:, :, 0].double(), counts)
            and not replayed[:2].any()
            and not watched[:2].any()
        )
        assert torch.equal(replayed[2:, :, 1].double(), counts)  # a log-ratio of 1 of each token
        assert watched[2:, :, 0].sum(dim=1).tolist() == [32, 32]
        assert stage["R3"]["apart"] == stages[0]["R3"]["apart"] and stage["off"]["apart"] is None
    assert not stages[0]["R3"]["metrics"] and "router_replay/overlap/layer_002" in stages[1]["R3"]["metrics"]
