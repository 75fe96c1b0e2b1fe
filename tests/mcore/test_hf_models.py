"""Every supported architecture: a Hugging Face checkpoint in real Megatron has its logits, and is exported bit for bit.

Megatron's command line comes from config.json alone (weight_sync/model_flags.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl_corr.cpu import environment, gpu_available
from megatron_rl_corr.weight_sync.names import ARCHITECTURES
from tests.mcore.tiny_models import MODELS, make_model

pytestmark = pytest.mark.skipif(gpu_available(), reason="without a GPU only")

WORKER = Path(__file__).with_name("hf_models_worker.py")
TOLERANCE = 5e-5
"""float32 against float32, of logits up to 6; measured 1.3e-5."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder for each of MODELS, with reference.pt beside the checkpoint."""
    root = tmp_path_factory.mktemp("models")
    folders = [root / name.replace(" ", "_") for name in MODELS]
    for name, folder in zip(MODELS, folders, strict=True):
        folder.mkdir()
        make_model(name, folder)
    return folders


@pytest.fixture(scope="module", params=[1, 4])
def differences(request, models):
    """Number of processes, and each model's worst difference of its logits."""
    command = [sys.executable, "-W", "ignore", WORKER, str(request.param), *models]
    answer = subprocess.run(command, env=environment("megatron"), capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr[-3000:]
    lines = [line.removeprefix("RESULT ") for line in answer.stdout.splitlines() if line.startswith("RESULT ")]
    return request.param, {found["model"]: found["worst"] for found in map(json.loads, lines)}


def test_models_of_this_test_then_every_architecture_of_the_table_and_tied_embeddings():
    assert {name.split()[0] for name in MODELS} == set(ARCHITECTURES)


def test_loaded_checkpoint_when_on_one_rank_and_on_tp2_pp2_ep2_then_logits_are_those_of_hugging_face(
    differences, models
):
    _, found = differences
    assert set(found) == {folder.name for folder in models}
    assert {name: worst for name, worst in found.items() if not worst < TOLERANCE} == {}


def test_exported_weights_when_on_one_rank_and_on_tp2_pp2_ep2_then_every_tensor_is_the_checkpoints_bit_for_bit(
    differences, models
):
    processes, _ = differences
    for folder in models:
        exported = {}
        for stage in range(1 if processes == 1 else 2):
            part = load_file(folder / f"export-{processes}-{stage}.safetensors")
            assert not exported.keys() & part.keys(), "a tensor is sent by two stages"
            exported |= part
        checkpoint = load_file(folder / "model.safetensors")
        assert exported.keys() == checkpoint.keys(), folder.name
        assert "lm_head.weight" not in exported or "tied" not in folder.name
        for name, tensor in checkpoint.items():
            assert exported[name].dtype == tensor.dtype and torch.equal(exported[name], tensor), (folder.name, name)
