"""SGLang's own loaders make of changes what they make of everything, in every architecture."""

import json
from pathlib import Path

import pytest

from megatron_rl_corr.models.architectures import unusual_weights
from megatron_rl_corr.models.names import ARCHITECTURES
from tests.preloaded import run_preloaded
from tests.weight_sync.fp8_models import MODELS, make_model
from tools.cpu import gpu_available

WORKER = Path(__file__).with_name("changes_loader_worker.py")
OF_TWO_RANKS = ["qwen3", "qwen2_moe", "deepseek_v3"]
"""Every kind of layer, cut in two."""

pytestmark = pytest.mark.skipif(
    gpu_available(), reason="tools.cpu lets SGLang's models load without a GPU only"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for kind, shape in MODELS.items():
        make_model(root / kind, kind, **shape)
    return root


def found_of(kinds, ranks, folders):
    """Kind -> what the worker found of each rank."""
    run = run_preloaded([WORKER, ranks, *(folders / kind for kind in kinds)], engine="sglang", timeout=600)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found = [json.loads(line[7:]) for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == ranks * len(kinds)
    return {kind: found[i * ranks : (i + 1) * ranks] for i, kind in enumerate(kinds)}


@pytest.fixture(scope="module")
def of_one(folders):
    return found_of([*MODELS], 1, folders)


@pytest.fixture(scope="module")
def of_two(folders):
    return found_of(OF_TWO_RANKS, 2, folders)


def test_models_of_this_test_then_every_architecture():
    refused = {kind for kind in ARCHITECTURES if unusual_weights({"model_type": kind}) is not None}
    assert set(MODELS) == set(ARCHITECTURES) - refused


@pytest.mark.parametrize("kind", MODELS)
def test_changes_when_loaded_then_every_parameter_is_that_of_a_push_of_everything(of_one, kind):
    assert_same(of_one[kind])


@pytest.mark.parametrize("kind", OF_TWO_RANKS)
def test_changes_when_the_server_has_two_ranks_then_each_has_its_part(of_two, kind):
    assert_same(of_two[kind])


def assert_same(ranks):
    for found in ranks:
        assert found["wrong"] == [] and found["parameters"] > 10 and found["buckets"] > 1
