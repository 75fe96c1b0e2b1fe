"""Real servers of the trainer's own weights that compute otherwise: the ledger of a run says how."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mcore.launched import launch, write_data
from tests.preloaded import PreloadedServer
from tests.tiers import in_matrix, long, matrix
from tools.cpu import environment, gpu_available, sglang_arguments, vllm_arguments

pytestmark = matrix

SCRIPT = Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"
RUN = [
    *["--global-batch-size", 16, "--train-iters", 1, "--save-interval", 100],
    *["--moe-grouped-gemm", "--moe-permute-fusion", "--rollout-probe-push", "off"],
    *["--rollout-ledger-interval", 1, "--rollout-ledger-share", 1, "--rollout-max-first-step-kl", 100],
]
PARALLEL = [
    *["--tensor-model-parallel-size", 2, "--sequence-parallel", "--pipeline-model-parallel-size", 2],
    *["--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1],
]
LAYOUTS = {
    "parallel": ([*PARALLEL, "--router-replay", "compare"], 4),
    **dict(in_matrix(("alone", ([], 1)), ("replicas", (["--router-replay", "R3"], 2)))),
}
"""Flags, and processes, of each run against a server."""
EPSILON, FLAT = {"rms_norm_eps": 1e-5}, {"norm_topk_prob": False}


def positions(base=1e4, **scaling):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base} | scaling}


def stretched(factor):
    return positions(rope_type="linear", factor=factor)


BASE = positions(1e6)


FAULTS = {
    # name: (what the server's configuration has otherwise, what is found, by its share)
    "base_and_epsilon": (BASE | EPSILON, ["norm_epsilon/1e-05", "rotary_base/1e+06"]),
}
IN_MATRIX = {
    "none": ({}, []),
    "epsilon": (EPSILON, ["norm_epsilon/1e-05"]),
    "not_normalised": (FLAT, ["expert_weights/not_normalised"]),
    "base": (BASE, ["rotary_base/1e+06"]),
    "small_base": (positions(5e5), ["rotary_base/500000"]),
    "large_base": (positions(1e7), ["rotary_base/1e+07"]),
    "stretched": (stretched(2.0), ["rotary_stretch/2"]),
    "stretched_by_four": (stretched(4.0), ["rotary_stretch/4"]),
    "base_not_normalised": (BASE | FLAT, ["expert_weights/not_normalised", "rotary_base/1e+06"]),
    "epsilon_not_normalised": (EPSILON | FLAT, ["expert_weights/not_normalised", "norm_epsilon/1e-05"]),
    "epsilon_stretched": (EPSILON | stretched(2.0), ["norm_epsilon/1e-05", "rotary_stretch/2"]),
}
NAMES = [*FAULTS, *in_matrix(*IN_MATRIX)]


@contextmanager
def server_of(model, folder, otherwise, engine="sglang"):
    flag = {"sglang": "--json-model-override-args", "vllm": "--hf-overrides"}[engine]
    more = [flag, json.dumps(otherwise)] if otherwise else []
    routed = {"sglang": ["--random-seed", "2", "--enable-return-routed-experts"], "vllm": []}[engine]
    own = {"sglang": sglang_arguments, "vllm": vllm_arguments}[engine]()
    with PreloadedServer(
        model,
        engine=engine,
        dtype="float32",
        log_path=folder / "server.log",
        extra_arguments=[*own, *routed, *more],
        environment=environment(engine),
    ) as server:
        yield server.url


def causes_of(out):
    """(name -> share, the line of the verdict) of the run's one step."""
    [step] = map(json.loads, (out / "log/metrics.jsonl").read_text().splitlines())
    found = {
        name.removeprefix("ledger/as/").removesuffix("/share"): value
        for name, value in step.items()
        if name.startswith("ledger/as/") and name.endswith("/share")
    }
    return found, step


@pytest.mark.parametrize("name", NAMES)
def test_server_that_computes_otherwise_then_the_ledger_names_it(name, tiny_moe_dir, tmp_path):
    otherwise, wanted = (FAULTS | IN_MATRIX)[name]
    write_data(tmp_path)
    with server_of(tiny_moe_dir, tmp_path, otherwise) as url:
        for layout, (flags, processes) in LAYOUTS.items():
            done = launch(tmp_path, layout, tiny_moe_dir, url, SCRIPT, *RUN, *flags, processes=processes)
            assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            found, step = causes_of(tmp_path / layout)
            line = next(one for one in done.stdout.splitlines() if "[rollout] ledger of step" in one)
            print(layout, line)
            assert sorted(found) == wanted, line
            if wanted:
                assert sum(found.values()) > 0.99, line
                assert "is as if servers had" in line
            else:
                assert step["ledger/mean_abs"] < 1e-5 and "nothing is blamed" in line


@long
@pytest.mark.parametrize("name", ["epsilon", "base", "not_normalised"])
def test_vllm_that_computes_otherwise_then_the_ledger_names_it(name, tiny_moe_dir, tmp_path):
    if gpu_available():
        pytest.skip("make setup-vllm installs vLLM without a GPU only")
    otherwise, wanted = (FAULTS | IN_MATRIX)[name]
    write_data(tmp_path)
    with server_of(tiny_moe_dir, tmp_path, otherwise, "vllm") as url:
        done = launch(tmp_path, "run", tiny_moe_dir, url, SCRIPT, *RUN, processes=1)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    found, step = causes_of(tmp_path / "run")
    assert list(found) == wanted and sum(found.values()) > 0.99
    assert step["ledger/rest/share"] == pytest.approx(1, abs=0.01)
