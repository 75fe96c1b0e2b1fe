"""Several updates of a batch on real Megatron: metrics, gradient norms and weights against plain
descent in float64.
"""

import json
from pathlib import Path

import pytest
import torch

from tests import tensor_files
from tests.mcore.updates_cases import (
    BATCH,
    BYPASS,
    EPOCHS,
    OTB,
    REJECTING,
    SAT,
    SOFT,
    TRUNCATED,
    WHOLE,
    parts_of,
    sample_part,
)
from tests.megatron_forks import run_megatron
from tests.preloaded import run_preloaded
from tests.tiers import in_matrix, matrix

pytestmark = matrix

HERE = Path(__file__).resolve().parent
ALL = ["ppo_clip", "gspo", "cispo", "dppo_tv", "dppo_kl", "sapo", "dro", BYPASS, TRUNCATED, WHOLE]
LAYOUTS = {
    1: [
        {
            "losses": ["ppo_clip", "ppo_clip kept", *in_matrix(*REJECTING, *ALL[1:])],
            "ends": 0.02,
            "replays": ["R2", "R3"],
        },
        {"packed": 64, "losses": [BYPASS, "gspo", OTB, *in_matrix(*ALL, SAT)]},
    ],
    2: [
        {"cp": 2, "losses": ["gspo", SAT, *in_matrix("sapo", "gspo kept", OTB)]},
        *in_matrix(
            {"ep": 2, "losses": ["ppo_clip", "ppo_clip kept", OTB, SAT]},
            {"pp": 2, "vpp": 2, "packed": 64, "losses": [BYPASS]},
            {"pp": 2, "vpp": 2, "losses": ["ppo_clip", TRUNCATED]},
        ),
    ],
    4: [
        {
            "tp": 2,
            "pp": 2,
            "ep": 2,
            "sp": True,
            "packed": 64,
            "losses": ["ppo_clip", OTB, *in_matrix("gspo", SAT)],
            "ends": 0.02,
        },
        *in_matrix({"tp": 2, "pp": 2, "ep": 2, "sp": True, "losses": ["gspo", "cispo", "dro"]}),
    ],
}
RUNS = [
    (size, at, loss)
    for size, layouts in LAYOUTS.items()
    for at, one in enumerate(layouts)
    for loss in dict.fromkeys(one["losses"])
]


def replicas_of(processes, at):
    """Data-parallel replicas of a layout."""
    return 2 if LAYOUTS[processes][at].get("ep") == processes else 1


@pytest.fixture(scope="module")
def reference(tiny_moe_dir, hf_reference):
    return hf_reference(tiny_moe_dir)


@pytest.fixture(scope="module")
def expected(tiny_moe_dir, reference, tmp_path_factory):
    """What updates_reference.py saved."""
    out = tmp_path_factory.mktemp("updates") / "expected.pt"
    cases = {(loss, replicas_of(size, at)) for size, at, loss in RUNS} | {("ppo_clip", 1)}
    words = [json.dumps(case) for case in sorted(cases)]
    made = run_preloaded([HERE / "updates_reference.py", tiny_moe_dir, reference, out, *words])
    assert made.returncode == 0, made.stderr
    return tensor_files.load(out)


@pytest.fixture(scope="module")
def results(tiny_moe_dir, reference, tmp_path_factory):
    """Processes -> what updates_worker.py saved."""
    folder = tmp_path_factory.mktemp("updates")

    def of(processes):
        out = folder / f"{processes}.pt"
        layouts = map(json.dumps, LAYOUTS[processes])
        run = run_megatron(HERE / "updates_worker.py", processes, tiny_moe_dir, reference, out, *layouts)
        assert run.returncode == 0, run.stderr[-3000:]
        return tensor_files.load(out)

    return {processes: of(processes) for processes in LAYOUTS}


@pytest.mark.parametrize(("processes", "at", "loss"), RUNS, ids=str)
def test_updates_of_a_batch_when_the_policy_moves_then_they_are_those_of_plain_descent(
    results, expected, processes, at, loss
):
    ranks = results[processes][at]
    replicas = replicas_of(processes, at)
    wanted = expected[loss, replicas]
    reports, count = ranks[-1][loss][0], parts_of(loss) * EPOCHS
    assert [report["update"] for report in reports] == [*range(1, count + 1)]
    assert [report["step"] for report in reports] == [
        BATCH * count + update for update in range(1, count + 1)
    ]
    assert [report["weight_version"] for report in reports] == [3] * (count - 1) + [4]
    assert [report["weight_lag_updates"] for report in reports] == [count + update for update in range(count)]
    # The whole batch's, in the last update's line.
    assert [report["tokens_per_s"] for report in reports if "tokens_per_s" in report] == [
        pytest.approx(
            reports[0]["response_length/mean"] * 16 / sum(report["time/step_s"] for report in reports)
        )
    ] and "tokens_per_s" in reports[-1]
    for update, (report, step) in enumerate(zip(reports, wanted["steps"], strict=True)):
        assert report["grad_norm"] == pytest.approx(step["grad_norm"], rel=2e-5)
        assert report["loss/policy"] == pytest.approx(step["policy"], rel=2e-5, abs=1e-6)
        clipped = report.get("loss/clip_fraction", 0.0)
        assert clipped == pytest.approx(step["clip_fraction"], abs=1e-9)
        assert ("loss/clip_fraction" in report) == (loss not in SOFT)
        assert report["loss/old_new_k3_kl"] == pytest.approx(step["old_new_k3_kl"], rel=2e-4, abs=1e-9)
        if loss == OTB:  # of the samples of this update alone
            power, count = step["power"], report["variance_proxy/sequences"]
            assert count == 16 / parts_of(loss)
            assert report["variance_proxy/proxy2_total_power"] == pytest.approx(power, rel=2e-5)
            signal = report["variance_proxy/proxy1_signal_strength"]
            assert signal == pytest.approx(step["grad_norm"] ** 2, rel=4e-5)
            # This small model's gradient is longer in its weights than in its logits.
            noise = max(power - signal, 0.0) / (count - 1)
            assert report["variance_proxy/proxy3_pure_noise"] == pytest.approx(noise, rel=4e-5)
        assert ("variance_proxy/sequences" in report) == (loss == OTB)
        for name in ("sat_tail_fraction", "sat_clip_fraction"):
            assert report.get(f"loss/{name}") == (
                pytest.approx(step[name], abs=1e-9) if loss == SAT else None
            )
        # What is the batch's is reported once.
        assert ("reward/mean" in report) == (update == 0)
        if loss == BYPASS:  # pi_rollout is another policy from the first update on
            assert clipped > 0 and "rollout_corr/k3_kl" in report
            continue
        assert (report["loss/old_new_k3_kl"] > 1e-6) == (update > 0) >= (clipped > 0)
        assert ("rollout_corr/weight_mean" in report) == (update == 0)
    assert loss in SOFT or any(report["loss/clip_fraction"] > 0 for report in reports)
    # In the order of two replicas no ratio falls between the two bounds.
    assert loss != SAT or replicas == 2 or any(report["loss/sat_clip_fraction"] > 0 for report in reports)
    assert all(rank[loss][1] == [4] for rank in ranks), "weights are pushed once, after the last update"
    weights = {name: tensor for rank in ranks for name, tensor in rank[loss][2].items()}
    assert weights.keys() == wanted["weights"].keys()
    for name, tensor in wanted["weights"].items():
        assert (weights[name].double() - tensor).norm() < 1e-6 * tensor.norm(), name


def test_batch_when_the_policy_is_too_far_from_pi_old_then_its_last_updates_are_left_out(results, expected):
    for processes, at in ((1, 0), (4, 0)):
        ranks = results[processes][at]
        reports, pushed, _ = ranks[-1]["early"]
        kl = [step["old_new_k3_kl"] for step in expected["ppo_clip", 1]["steps"]]
        assert kl[1] > LAYOUTS[processes][at]["ends"]
        assert (
            [report["left_out"] for report in reports]
            == [0, 1, 1, 1]
            == [report["skipped"] for report in reports]
        )
        # The update that is not made has measured; those behind it were not begun.
        assert (
            reports[1]["loss/old_new_k3_kl"] == pytest.approx(kl[1], rel=2e-4)
            and "grad_norm" not in reports[1]
        )
        assert not [name for report in reports[2:] for name in report if name.startswith("loss/")]
        assert [report["weight_version"] for report in reports] == [3, 3, 3, 4] and pushed == [4]
        whole = {name: tensor for rank in ranks for name, tensor in rank["ppo_clip"][2].items()}
        assert any(
            (tensor != whole[name]).any() for rank in ranks for name, tensor in rank["early"][2].items()
        )


@pytest.mark.parametrize(("processes", "at"), [(1, 0), (4, 0)])
def test_batch_when_megatron_would_save_and_leave_within_it_then_its_end_is_reached_first(
    results, processes, at
):
    for rank in results[processes][at]:
        for leaves_in, (reports, pushed, _, codes, leaves) in zip((1, 3), rank["leaving"], strict=True):
            # (skipped, to save, to leave, exit code) of every update.
            assert codes == [(0, False, False, 0)] * leaves_in + [(1, False, False, 17)] * (4 - leaves_in)
            assert leaves and pushed == [4] and len(reports) in (0, 4)


@pytest.mark.parametrize("kind", ["R2", "R3"])
def test_routes_when_a_batch_makes_several_updates_then_they_are_replayed_in_each(results, kind):
    [rank] = results[1][0]
    *_, chosen, padding = rank[kind]
    layers, rows = 4, 2
    first = chosen[: layers * 16 // rows]
    # The experts of each sample's tokens in the pass for old log-probs: sample -> [layers, L, E].
    scored = {}
    for at in range(0, len(first), layers):
        for row in range(rows):
            scored[at // layers * rows + row] = torch.stack(
                [ids[:, row] for _, ids in first[at : at + layers]]
            )
    order = [sample for update in range(4) for sample in sample_part(update, 1)]
    passes = chosen[len(first) :]
    assert len(passes) == layers * len(order) // rows
    for at, sample in enumerate(order):
        found = passes[at // rows * layers : (at // rows + 1) * layers]
        assert [layer for layer, _ in found] == [1, 2, 3, 4]
        real = ~padding[sample]
        for layer, (_, ids) in enumerate(found):
            assert torch.equal(ids[:, at % rows][real], scored[sample][layer][real]), (at, layer)


def test_servers_routes_when_bypass_mode_makes_several_updates_then_each_replays_and_compares_its_own_samples(
    results,
):
    [rank] = results[1][0]
    reports, _, _, chosen, padding = rank["bypass R3"]
    routes, layers, rows = rank["routes"], 4, 2
    assert len(chosen) == layers * 4 * 8 // rows, "there is no pass for old log-probs"
    for update, report in enumerate(reports):
        tokens = 0
        for at, sample in enumerate(sample_part(update, 1)):
            passed = (update * 8 + at) // rows * layers
            real = ~padding[sample]
            for layer, (number, ids) in enumerate(chosen[passed : passed + layers]):
                assert number == layer + 1
                given = torch.nn.functional.one_hot(routes[sample][:, layer].long(), 8).sum(1).bool()
                assert torch.equal(ids[:, at % rows][real], given[: int(real.sum())])
            tokens += int(real.sum()) * layers
        assert 0 < report["router_replay/disagreement"] <= 1
        # Shares of this update's tokens alone: their denominator is not the batch's.
        assert report["router_replay/disagreement"] * tokens == pytest.approx(
            round(report["router_replay/disagreement"] * tokens), abs=1e-6
        )


ORDERS = """
import json
from megatron_rl_corr.mcore.updates import Updates
def orders(parts, epochs, batch, replica):
    updates = Updates(parts, epochs, seed=5)
    drawn = [updates.samples(batch, update, 16, replica) for update in range(updates.count)]
    return [None if samples is None else samples.tolist() for samples in drawn]
places = ((0, 0), (0, 0), (1, 0), (0, 1))
print(json.dumps([[orders(*parts, *at) for at in places] for parts in ((1, 3), (4, 1), (2, 3))]))
"""


def test_samples_of_updates_then_each_epoch_has_all_of_them_once_in_an_order_of_its_own(tmp_path):
    script = tmp_path / "orders.py"
    script.write_text(ORDERS)
    whole, *found = json.loads(run_megatron(script).stdout.splitlines()[-1])
    assert whole == [[None] * 3] * 4
    for (parts, epochs), (first, same, other_batch, other_replica) in zip(
        ((4, 1), (2, 3)), found, strict=True
    ):
        assert first == same != other_batch and first != other_replica
        orders = [sum(first[epoch * parts : (epoch + 1) * parts], []) for epoch in range(epochs)]
        assert all(sorted(order) == list(range(16)) for order in orders)
        assert len({tuple(order) for order in orders}) == epochs
