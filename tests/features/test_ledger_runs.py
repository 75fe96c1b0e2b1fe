"""Ledgers of real runs: each token's terms add up to its D, and a planted fault is blamed by its name."""

import json
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import pytest

from tests.faults.door import Door
from tests.matrix.replaying_server import ReplayingServer
from tests.mcore.launched import launch, replayed
from tests.preloaded import PreloadedServer
from tests.tiers import in_matrix, long, matrix
from tools.cpu import environment, sglang_arguments

pytestmark = matrix

SCRIPT = Path(__file__).resolve().parent / "ledger_pretrain.py"
RUN = [
    *["--global-batch-size", 16, "--train-iters", 2, "--save-interval", 100],
    *["--moe-grouped-gemm", "--moe-permute-fusion", "--rollout-probe-push", "off"],
]
MEASURED = ["--rollout-ledger-interval", 1, "--rollout-ledger-share", 1]
FAULTY = ["--rollout-max-first-step-kl", 100]
INT4 = ["--rollout-push-rounding", "int4_group", *FAULTY]
TP2_EP2 = [
    *["--tensor-model-parallel-size", 2, "--sequence-parallel"],
    *["--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1],
]
PP2, CP2 = ["--pipeline-model-parallel-size", 2], ["--context-parallel-size", 2]
RUNS = {
    # name: (flags, processes, what is blamed from the second batch on, variables)
    "lag": (["--rollout-max-lag", 1], 1, ["staleness"], {}),
    "rounded": (INT4, 1, ["rounding"], {}),
    "own_experts": (
        ["--router-replay", "compare", *TP2_EP2, *FAULTY],
        2,
        ["routing"],
        {"OTHER_EXPERTS": "0.5"},
    ),
    "hot": (FAULTY, 1, ["decode"], {}),
    "narrow": ([], 1, [], {}),
    "clean_replayed_pp2": (["--router-replay", "R3", *PP2], 2, [], {}),
}
IN_MATRIX = {
    "rounded_tp2_ep2": ([*INT4, *TP2_EP2], 2, ["rounding"], {}),
    "lag_tp2_ep2": (["--rollout-max-lag", 1, *TP2_EP2], 2, ["staleness"], {}),
    "lag_pp2": (["--rollout-max-lag", 2, *PP2], 2, ["staleness"], {}),
    "rounded_dp2": (INT4, 2, ["rounding"], {}),
    "rounded_pp2": ([*INT4, *PP2], 2, ["rounding"], {}),
    "rounded_cp2": ([*INT4, *CP2], 2, ["rounding"], {}),
    "half": (["--bf16"], 1, [], {}),
    "half_served": ([], 1, [], {}),
    "clean": (["--router-replay", "compare"], 1, [], {}),
    "clean_cp2": (["--router-replay", "compare", *CP2], 2, [], {}),
}
NAMES = [*RUNS, *in_matrix(*IN_MATRIX)]
TERMS = ("staleness", "routing", "head", "rounding", "rest", "decode")


def heated(path, body):
    """Requests for samples at another temperature than the run's."""
    if path != "/generate":
        return body
    asked = json.loads(body)
    if asked["sampling_params"]["temperature"] == 1.0:
        asked["sampling_params"]["temperature"] = 0.8
    return json.dumps(asked).encode()


def narrowed(path, body):
    """Requests for samples with a top-p of which the run does not know."""
    if path != "/generate":
        return body
    asked = json.loads(body)
    asked["sampling_params"]["top_p"] = 0.5
    return json.dumps(asked).encode()


def half_server(model, folder):
    arguments = [*sglang_arguments(), "--random-seed", "0"]
    return PreloadedServer(
        model,
        dtype="bfloat16",
        log_path=folder / "half_server.log",
        extra_arguments=arguments,
        environment=environment("sglang"),
    )


@pytest.fixture(scope="module")
def runs(keeping_server, tiny_moe_dir, tmp_path_factory):
    """runs(name): (its output, its steps, of each rank what the ledger found of each batch's tokens)."""
    folder = tmp_path_factory.mktemp("ledgers")
    with (
        replayed(keeping_server, tiny_moe_dir, folder),
        closing(Door(keeping_server.url, heated)) as hot,
        closing(Door(keeping_server.url, narrowed)) as narrow,
        ExitStack() as opened,
        ReplayingServer(keeping_server.url) as door,  # of runs with rounded weights alone
    ):

        @cache
        def run(name):
            flags, processes, _, variables = (RUNS | IN_MATRIX)[name.removesuffix("_without")]
            flags = [*flags, *([] if name.endswith("_without") else MEASURED)]
            door.replay()
            out = folder / name
            out.mkdir()
            urls = {"hot": hot.url, "narrow": narrow.url, "rounded": door.url}
            url = urls.get(name.split("_")[0], keeping_server.url)
            if name == "half_served":
                url = opened.enter_context(half_server(tiny_moe_dir, folder)).url
            given = {"processes": processes, "LEDGER": str(out), **variables}
            done = launch(folder, name, tiny_moe_dir, url, SCRIPT, *RUN, *flags, **given)
            assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            lines = (out / "log/metrics.jsonl").read_text().splitlines()
            ranks = [json.loads(path.read_text()) for path in sorted(out.glob("?.json"))]
            return done.stdout, list(map(json.loads, lines)), ranks

        yield run


@pytest.mark.parametrize("name", NAMES)
def test_terms_of_each_token_then_they_add_up_to_its_log_ratio(runs, name):
    _, steps, ranks = runs(name)
    counted = 0
    for batches in ranks:
        assert len(batches) == len(steps) == 2
        for found in batches:
            terms = [found[term] for term in TERMS if term in found]
            for at, d in enumerate(found["d"]):
                if found["valid"][at]:
                    assert abs(sum(term[at] for term in terms) - d) < 1e-6
                    counted += 1
    assert counted > 100


@pytest.mark.parametrize("name", NAMES)
def test_shares_and_means_then_they_add_up_to_one_and_to_the_mean(runs, name):
    _, steps, _ = runs(name)
    for step in steps:
        known = [term for term in TERMS if f"ledger/{term}/share" in step]
        assert {"rest", "decode"} <= set(known)
        assert sum(step[f"ledger/{term}/share"] for term in known) == pytest.approx(1, abs=1e-9)
        total = sum(step[f"ledger/{term}/mean"] for term in known)
        assert total == pytest.approx(step["ledger/mean"], abs=1e-9)
        assert step["ledger/mean_abs"] == pytest.approx(step["rollout_corr/log_ratio_abs_mean"], abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_planted_fault_then_its_term_alone_is_blamed(runs, name):
    (out, steps, _), blamed = runs(name), (RUNS | IN_MATRIX)[name][2]
    lines = [line for line in out.splitlines() if "[rollout] ledger of step" in line]
    assert len(lines) == 2
    if not blamed:
        noise = "0.015" if name.startswith("half") else "1e-05"
        assert all(f"no more than rounding (mean |D| up to {noise})" in line for line in lines), lines
        return
    [term], last = blamed, steps[-1]
    assert last[f"ledger/{term}/share"] == pytest.approx(1, abs=1e-3), lines
    assert last["ledger/mean_abs"] > 1e-2 and "mismatch: 100 % " in lines[-1]
    # What is left is the arithmetic of float32.
    others = [other for other in TERMS if other != term and f"ledger/{other}/mean_abs" in last]
    assert all(last[f"ledger/{other}/mean_abs"] < 1e-5 for other in others), last


def test_run_that_is_measured_then_it_trains_and_samples_as_one_that_is_not(runs):
    measured, plain = runs("rounded")[1], runs("rounded_without")[1]
    chance = ("time/", "tokens_per_s", "ledger/")
    for one, other in zip(measured, plain, strict=True):
        left = [{n: x for n, x in step.items() if not n.startswith(chance)} for step in (one, other)]
        assert left[0] == left[1] and left[0]["grad_norm"] > 0


def test_server_at_another_temperature_then_it_is_said(runs):
    out, steps, _ = runs("hot")
    assert steps[-1]["ledger/decode/as_temperature"] == pytest.approx(0.8, abs=0.03)
    assert steps[-1]["ledger/decode/as_temperature_share"] > 0.9
    assert "looks like a sampling temperature of about 0.8, not 1" in out


@pytest.mark.parametrize("name", NAMES)
def test_server_with_an_unknown_top_p_then_it_is_said_and_of_no_other_run(runs, name):
    out, _, _ = runs(name)
    said = [line for line in out.splitlines() if "sampled tokens are" in line]
    assert len(said) == (2 if name == "narrow" else 0), said
    assert all("sampled tokens are more probable than their log-probs have it" in line for line in said)


@long
def test_number_types_then_their_terms_are_those_of_a_side_in_16_bits(runs):
    half, served = (runs(name)[1] for name in ("half", "half_served"))
    for step in half:
        assert 1e-4 < step["ledger/head/mean_abs"] < step["ledger/mean_abs"] < 1.5e-2
        assert "ledger/rounding/share" not in step
    for step in served:
        assert 1e-4 < step["ledger/rounding/mean_abs"] < 1.5e-2 and "ledger/head/share" not in step


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("rounded_")])
def test_ledger_in_other_layouts_then_that_of_one_process(runs, name):
    alone, parted = (runs(one)[1][0] for one in ("rounded", name))
    for number in ("tokens", "mean", "mean_abs", "rounding/mean", "rounding/mean_abs", "rounding/share"):
        assert parted[f"ledger/{number}"] == pytest.approx(alone[f"ledger/{number}"], rel=1e-4), number
