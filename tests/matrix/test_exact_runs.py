"""Runs that expect every log-prob to be the server's own number: real SGLang and real Megatron in their
batch-invariant modes agree in every bit, and a planted fault ends the run by its first token.
"""

import json
import shutil
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from megatron_rl_corr.features.exact.certificate import NAME, read_certificate
from tests.faults.door import Door
from tests.features.test_ledger_causes_runs import EPSILON
from tests.features.test_ledger_places_runs import Spoiled, stale
from tests.mcore.launched import launch, write_data
from tests.mcore.tiny_models import VOCAB, make_model
from tests.preloaded import PreloadedServer
from tests.tiers import in_matrix, long
from tools.cpu import environment, gpu_available, sglang_arguments

pytestmark = pytest.mark.skipif(gpu_available(), reason="without a GPU only")
SCRIPT = Path(__file__).resolve().parent / "pretrain_any.py"
INVARIANT = ["--enable-deterministic-inference"]
RUN = [
    *["--global-batch-size", 16, "--train-iters", 2, "--save-interval", 100],
    *["--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB],
]
UNPROBED = ["--rollout-probe-push", "off"]
EXACT = ["--rollout-batch-invariant", "--rollout-expect-exact", 0]
LAYOUTS = {
    # name: (flags, processes)
    "dp2": ([], 2),
    "updates": (["--rollout-updates-per-batch", 2, "--global-batch-size", 8], 1),
    **dict(
        in_matrix(
            ("pp2", (["--pipeline-model-parallel-size", 2], 2)),
            ("rows", (["--rollout-pad-sequences"], 1)),
            ("turns", (["--rollout-environment", "FOLDER/turns.py:Turns", "--rollout-max-turns", 3], 2)),
            ("cooler", (["--rollout-temperature", 0.7], 1)),
        )
    ),
}
TURNS = """
from megatron_rl_corr.rollout.environment import Environment

class Turns(Environment):
    stop_token_ids = tuple(range(0, 80, 3))

    def __init__(self, prompt):
        pass

    def step(self, output_ids, finish_reason):
        return [7, 11]
"""
DISK = ["--rollout-weight-transport", "disk", "--rollout-verify-push", "off"]
LEDGER = ["--rollout-ledger-interval", 1, "--rollout-ledger-share", 1]


def nudged(now, before):
    """The next number in the place of one weight of layer 1."""
    name = "model.layers.1.mlp.down_proj.weight"
    changed = now[name].clone()
    largest = changed.abs().argmax()
    flat = changed.view(-1)
    flat[largest] = torch.nextafter(flat[largest], torch.tensor(torch.inf))
    return now | {name: changed}


@pytest.fixture(scope="module")
def dense_dir(tiny_moe_dir, tmp_path_factory):
    from transformers import AutoTokenizer

    model = tmp_path_factory.mktemp("dense")
    make_model("qwen3 tied", model, spread=0.15)
    for file in tiny_moe_dir.glob("*token*"):
        shutil.copy(file, model)
    AutoTokenizer.from_pretrained(model).save_pretrained(model)
    return model


@pytest.fixture(scope="module")
def server(dense_dir, tmp_path_factory):
    """server(name): the address of a real server, of which each is started once."""
    kinds = {
        "invariant": INVARIANT,
        "plain": [],
        "epsilon": [*INVARIANT, "--json-model-override-args", json.dumps(EPSILON)],
    }
    with ExitStack() as opened:
        started = {}

        def url(name):
            if name not in started:
                one = PreloadedServer(
                    dense_dir,
                    dtype="float32",
                    log_path=tmp_path_factory.mktemp(name) / "server.log",
                    extra_arguments=[*sglang_arguments(), "--random-seed", "0", *kinds[name]],
                    environment=environment("sglang"),
                )
                started[name] = opened.enter_context(one)
            return started[name].url

        yield url


def run(folder, name, model, url, *flags, processes=1):
    write_data(folder)
    served = [] if url is None else UNPROBED
    return launch(folder, name, model, url, SCRIPT, *RUN, *served, *flags, processes=processes)


def certificate(folder, name):
    return read_certificate(folder / name / "log" / NAME)


def steps(folder, name):
    return [json.loads(one) for one in (folder / name / "log/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_in_a_layout_then_every_log_prob_is_the_servers(server, dense_dir, tmp_path, layout):
    flags, processes = LAYOUTS[layout]
    (tmp_path / "turns.py").write_text(TURNS)
    flags = [str(flag).replace("FOLDER", str(tmp_path)) for flag in flags]
    url = server("invariant")
    done = run(tmp_path, layout, dense_dir, url, *EXACT, *flags, processes=processes)
    assert done.returncode == 0, done.stderr[-4000:]
    measured = [one for one in steps(tmp_path, layout) if "exact/tokens" in one]
    assert len(measured) == (1 if layout == "updates" else 2)
    for one in measured:
        assert one["exact/tokens"] > 50
        assert one["exact/tokens_apart"] == one["exact/ulps_max"] == one["exact/log_ratio_max"] == 0
        assert layout != "turns" or one["rollout_corr/by_turn/later/tokens"] > 20
        assert one["rollout_corr/log_ratio_abs_max"] == 0 and one["rollout_corr/exact_fraction"] == 1
    found = certificate(tmp_path, layout)
    assert found["held"] and found["tokens"] == sum(one["exact/tokens"] for one in measured)
    [part] = found["parts"]
    assert part["modes"]["batch_invariant_mode"] and part["modes"]["attention_backend"] == "flash"
    [told] = part["servers"]
    assert told["batch_invariant"] and told["url"] == url and told["number_type"] == "float32"
    assert (part["first_weights"], part["last_weights"]) == (0, len(measured) - 1)


FAULTS = {
    # name: (server, changed tensors, step that ends, words of the ledger)
    "epsilon": ("epsilon", None, 1, "as if servers had an epsilon of 1e-05 in the norms"),
    "nudged": ("invariant", nudged, 2, "% is rest"),
    "stale": ("invariant", stale(""), 2, "as if servers had the weights of the version before"),
}


PP2 = ["--pipeline-model-parallel-size", 2]  # the rank that knows the server is not the one with log-probs


@pytest.mark.parametrize("fault", ["nudged", "stale", *in_matrix("epsilon", "stale_pp2")])
def test_fault_then_the_run_ends_with_its_first_token(server, dense_dir, tmp_path, fault):
    kind, changed, step, words = FAULTS[fault.removesuffix("_pp2")]
    stages = 2 if fault.endswith("_pp2") else 1
    flags = [*EXACT, *LEDGER, "--rollout-max-first-step-kl", 100]
    if changed is not None:
        flags += [*DISK, "--rollout-weight-dir", tmp_path / "weights"]
    spoiling = Spoiled(tmp_path / "spoiled", changed or (lambda now, before: now))
    with closing(Door(server(kind), spoiling)) as door:
        flags += PP2 if stages == 2 else []
        done = run(tmp_path, fault, dense_dir, door.url, *flags, processes=stages)
        found = certificate(tmp_path, fault)
        token = found["token"]
        assert done.returncode == 1
        assert f"--rollout-expect-exact 0: in step {step} " in done.stderr
        assert words in done.stderr
        assert not found["held"] and found["ended_in_step"] == step
        assert token["server"] == door.url and token["weight_version"].endswith(str(step - 1))
    assert token["log_p_train"] != token["log_q_server"] and token["ulps"] > 0
    assert 0 <= token["token"] < 8 and 0 <= token["sample"] < 16 and token["replica"] == 0
    assert (
        f"(id {token['token_id']}, position {token['position']}) of sample {token['sample']}" in done.stderr
    )
    log = tmp_path / fault / "log/metrics.jsonl"
    assert len(log.read_text().splitlines() if log.exists() else []) == step - 1  # nothing of it was trained


def test_server_without_its_mode_then_refused_with_the_remedy(server, dense_dir, tmp_path):
    done = run(tmp_path, "plain", dense_dir, server("plain"), *EXACT)
    assert done.returncode == 1
    assert "--rollout-batch-invariant" in done.stderr and "--enable-deterministic-inference" in done.stderr
    assert not (tmp_path / "plain/log" / NAME).exists()


def test_megatron_without_kernels_for_it_then_each_flag_is_refused(server, dense_dir, tmp_path):
    wrong = ["--context-parallel-size", 2, "--attention-backend", "unfused", "--fp8-format", "hybrid"]
    done = run(tmp_path, "wrong", dense_dir, server("invariant"), *EXACT, *wrong, processes=2)
    assert done.returncode != 0
    for flag in ("--context-parallel-size 2", "--attention-backend unfused", "--fp8-format hybrid"):
        assert f"{flag} with --rollout-batch-invariant" in done.stderr


def test_run_without_the_modes_then_a_tolerance_holds_and_none_does_not(server, dense_dir, tmp_path):
    done = run(tmp_path, "wide", dense_dir, server("plain"), "--rollout-expect-exact", 64)
    assert done.returncode == 0, done.stderr[-4000:]
    found = certificate(tmp_path, "wide")
    assert found["held"] and 0 < found["ulps_max"] <= 64
    done = run(tmp_path, "narrow", dense_dir, server("plain"), "--rollout-expect-exact", 0)
    assert done.returncode == 1 and not certificate(tmp_path, "narrow")["held"]


@long
def test_run_that_goes_on_then_its_certificate_has_both_starts(server, dense_dir, tmp_path):
    model, url = dense_dir, server("invariant")
    saving = [*EXACT, "--save-interval", 1, "--rollout-save-trajectories", tmp_path / "samples"]
    done = run(tmp_path, "run", model, url, *saving, "--exit-interval", 1)
    assert done.returncode == 0, done.stderr[-4000:]
    done = run(tmp_path, "run", model, url, *saving, "--load", tmp_path / "run/checkpoints")
    assert done.returncode == 0, done.stderr[-4000:]
    found = certificate(tmp_path, "run")
    assert [(one["first_step"], one["last_step"]) for one in found["parts"]] == [(1, 1), (2, 2)]
    assert found["held"] and found["tokens"] == sum(one["exact/tokens"] for one in steps(tmp_path, "run"))
    replay = [*EXACT, "--rollout-replay", tmp_path / "samples"]
    # In the same layout: another one's updates round otherwise.
    done = run(tmp_path, "replay", model, None, *replay)
    assert done.returncode == 0, done.stderr[-4000:]
    again = certificate(tmp_path, "replay")
    assert again["held"] and again["tokens"] == found["tokens"]
    assert again["parts"][0]["servers"].startswith("none")
