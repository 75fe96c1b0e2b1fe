"""SGLang's own loaders make of pushed FP8 weights what they make of an FP8 checkpoint, in
every architecture.
"""

import json
from pathlib import Path

import pytest

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.models.architectures import unusual_weights
from megatron_rl_corr.models.names import ARCHITECTURES
from tests.preloaded import run_preloaded
from tests.tiers import long, matrix
from tests.weight_sync.fp8_models import CONFIG, MODELS, make_fp8, make_model
from tools.cpu import gpu_available

WORKER = Path(__file__).with_name("fp8_loader_worker.py")
UE8M0 = {"scale_fmt": "ue8m0"}
SPARED = {
    "qwen3": {"modules_to_not_convert": ["lm_head", "mlp.down_proj", "model.layers.1.self_attn"]},
    # One expert's module spares all of a layer.
    "qwen3_moe": UE8M0
    | {"ignored_layers": ["model.layers.1.mlp.experts.2.gate_proj", "layers.0.self_attn.o_proj"]},
    "qwen2_moe": {"modules_to_not_convert": ["mlp.shared_expert", "model.layers.0.mlp.gate"]},
    "deepseek_v3": UE8M0
    | {
        "modules_to_not_convert": [
            f"model.layers.1.self_attn.{m}" for m in ("q_a_proj", "kv_a_proj_with_mqa")
        ]
    },
}
CASES = [*MODELS, *(f"{kind} spared" for kind in SPARED)]
OF_TWO_RANKS = ["qwen3", "qwen2_moe", "qwen3_moe spared", "deepseek_v3", "deepseek_v3 spared"]
"""Every kind of layer, cut in two."""
SERVED = load_engine("sglang").limits.fp8_models

pytestmark = [
    matrix,
    pytest.mark.skipif(gpu_available(), reason="tools.cpu replaces SGLang's FP8 kernels only without a GPU"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By case, the folder in float32 and the one in FP8."""
    root, made = tmp_path_factory.mktemp("fp8_models"), {}
    for kind, shape in MODELS.items():
        make_model(root / f"{kind}-plain", kind, **shape)
        for case in (kind, f"{kind} spared"):
            if case in CASES:
                config = CONFIG | (SPARED[kind] if case != kind else {})
                made[case] = root / f"{kind}-plain", root / case.replace(" ", "_")
                make_fp8(*made[case], config)
    return made


def found_of(cases, ranks, folders):
    """What the worker found of each case, with so many tensor-parallel ranks of the server."""
    paths = [path for case in cases for path in folders[case]]
    run = run_preloaded([WORKER, ranks, *paths], engine="sglang", timeout=600)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found = [
        json.loads(line.split(" ", 1)[1]) for line in run.stdout.splitlines() if line.startswith("RESULT ")
    ]
    return dict(zip(cases, found, strict=True))


@pytest.fixture(scope="module")
def pushed(folders):
    return found_of(CASES, 1, folders)


@pytest.fixture(scope="module")
def pushed_to_two(folders):
    return found_of(OF_TWO_RANKS, 2, folders)


def test_models_of_this_test_then_every_architecture():
    refused = {kind for kind in ARCHITECTURES if unusual_weights({"model_type": kind}) is not None}
    assert set(MODELS) == set(ARCHITECTURES) - refused == {*SERVED, "llama"}


@pytest.mark.parametrize("case", [case for case in CASES if case != "llama"])
def test_push_when_in_fp8_then_the_loader_has_what_it_reads_from_a_checkpoint_and_all_is_verified(
    pushed, case
):
    assert_loaded(pushed[case])


@long
@pytest.mark.parametrize("case", OF_TWO_RANKS)
def test_push_when_the_server_has_two_ranks_then_each_has_its_part_of_values_and_scales(pushed_to_two, case):
    assert_loaded(pushed_to_two[case])


def assert_loaded(found):
    assert found["wrong"] == [] and found["unused"] == []
    assert found["sent"] == found["in_fp8"] and len(found["sent"]) >= 4
    assert found["proven"] == found["held"] > 10 and found["coverage"] is None


def test_spared_modules_when_named_then_fewer_weights_are_in_fp8_at_both_sides(pushed):
    for kind in SPARED:
        assert set(pushed[f"{kind} spared"]["in_fp8"]) < set(pushed[kind]["in_fp8"])
    assert not any("layers.1.mlp.experts" in name for name in pushed["qwen3_moe spared"]["in_fp8"])
    assert not any("shared_expert." in name for name in pushed["qwen2_moe spared"]["in_fp8"])


def test_push_when_the_model_is_a_llama_then_sglangs_loader_leaves_all_scales_as_they_were(pushed):
    """0.5.23 looks for them as weight_scale, of its own checkpoints too; `fp8_models` leaves
    such a server out.
    """
    assert pushed["llama"]["wrong"] == pushed["llama"]["in_fp8"]
