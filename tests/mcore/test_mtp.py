"""DeepSeek-V3's layer that predicts further tokens (MTP), in real Megatron, on one rank and on
TP 2, PP 2, EP 2.

The references are mtp_models.py's layer in float64, and the same model in Megatron without the layer.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl_corr.commands.export.megatron_checkpoint import MegatronCheckpoint, export_checkpoint
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from tests.mcore.hf_reference import make_samples
from tests.mcore.mtp_models import COPIES, LAYER, load_reference, make_mtp_model, mtp_gradients
from tests.megatron_forks import run_megatron
from tests.preloaded import run_preloaded
from tools.cpu import gpu_available

pytestmark = pytest.mark.skipif(gpu_available(), reason="without a GPU only")

WORKER = Path(__file__).with_name("mtp_worker.py")
NEXTN = Path(__file__).with_name("sglang_nextn_worker.py")
FACTOR, MICROBATCHES = 0.3, 4
TOLERANCE = 5e-5
"""float32 against float64, of logits up to 7."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp") / "deepseek_v3"
    folder.mkdir()
    make_mtp_model(folder)
    return folder


@pytest.fixture(scope="module")
def samples():
    generator, found = torch.Generator().manual_seed(5), make_samples(torch.Generator().manual_seed(5))
    for sample in found:
        count = len(sample["output"])
        sample |= {
            "rollout": -4.5 + torch.randn(count, generator=generator),
            "old_shift": torch.zeros(count),
            "reward": float(torch.rand((), generator=generator)),
        }
    return found


@pytest.fixture(scope="module", params=[1, 4])
def found(request, model, samples, tmp_path_factory):
    """Every rank's results, and where the folders are."""
    out = tmp_path_factory.mktemp("out") / "result"
    tokens = torch.load(model / "reference.pt", weights_only=True)["tokens"]
    torch.save({"samples": samples, "tokens": tokens}, f"{out}.in")
    answer = run_megatron(WORKER, request.param, model, f"{out}.in", out)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return [torch.load(f"{out}.{rank}", weights_only=True) for rank in range(request.param)], out


def merged(ranks, name):
    """What all ranks' senders have."""
    tensors = {}
    for rank in ranks:
        assert not tensors.keys() & rank[name].keys(), "a tensor is sent by two stages"
        tensors |= rank[name]
    return tensors


def test_loaded_layer_then_its_logits_are_those_of_the_formula_and_the_policys_those_of_hugging_face(
    found, model
):
    ranks, _ = found
    reference = torch.load(model / "reference.pt", weights_only=True)
    policy, further = next(rank["logits"] for rank in ranks if rank["logits"] is not None)
    assert (policy - reference["logits"]).abs().max() < TOLERANCE
    hf, layer = load_reference(model)
    with torch.no_grad():
        expected = layer(hf, reference["tokens"])
    # The last position has no next token, for which Megatron takes id 0.
    assert (further[:, :-1] - expected).abs().max() < TOLERANCE
    assert expected.abs().max() > 1


def test_exported_weights_then_every_tensor_but_the_copies_is_the_checkpoints_bit_for_bit(found, model):
    sent, checkpoint = merged(found[0], "sent"), load_file(model / "model.safetensors")
    assert sent.keys() == checkpoint.keys() - COPIES.keys()
    assert sum(name.startswith(LAYER) for name in sent) == 42
    for name, tensor in sent.items():
        assert tensor.dtype == checkpoint[name].dtype and torch.equal(tensor, checkpoint[name]), name


@pytest.mark.parametrize("case", ["with", "recomputed"])
def test_step_when_the_layer_is_trained_then_the_policys_gradients_are_those_without_it_bit_for_bit(
    found, case
):
    without, with_layer = merged(found[0], "without"), merged(found[0], case)
    own = {name for name in with_layer if name.startswith(LAYER)}
    assert without.keys() == with_layer.keys() - own and len(own) == 41
    assert [name for name, grad in without.items() if not torch.equal(grad, with_layer[name])] == []
    assert min(float(grad.norm()) for name, grad in without.items() if "experts" not in name) > 0


def test_step_when_the_layers_loss_is_not_detached_then_it_moves_the_policy_which_is_why_it_is_refused(found):
    without, attached = merged(found[0], "without"), merged(found[0], "attached")
    moved = {name for name, grad in without.items() if (attached[name] - grad).norm() > 0.01 * grad.norm()}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.o_proj.weight"} <= moved


@pytest.mark.parametrize("case", ["with", "recomputed"])
def test_step_then_the_layers_gradients_are_those_of_its_cross_entropy_over_sampled_tokens(
    found, model, samples, case
):
    with_layer = merged(found[0], case)
    rows = [(torch.cat([s["prompt"], s["output"]]), len(s["prompt"])) for s in samples]
    padded = 96 if len(found[0]) == 1 else 128  # to a multiple of 32 x tp
    expected = mtp_gradients(model, rows, [len(rows) // MICROBATCHES] * MICROBATCHES, FACTOR, padded)
    errors = {
        name: float((with_layer[name].double() - grad).norm() / grad.norm().clamp(min=1e-6))
        for name, grad in expected.items()
    }
    assert {name: error for name, error in errors.items() if not error < 2e-5} == {}  # measured 5e-6
    assert sum(float(grad.norm()) > 0 for grad in expected.values()) > 30


def exported(out, source, tmp_path):
    """The folders that --rollout-save-hf and megatron-rl-corr export make."""
    checkpoint = MegatronCheckpoint(Path(f"{out}.megatron"))
    export_checkpoint(checkpoint, source, tmp_path / "exported", lambda written, whole: None)
    for folder in (HFCheckpoint(f"{out}.hf"), HFCheckpoint(tmp_path / "exported")):
        folder.check_files()
        assert set(folder.names) == set(source.names) and folder.config == source.config
        yield folder


def test_folders_of_trained_weights_then_the_layer_and_its_copies_are_trained_too(found, model, tmp_path):
    source = HFCheckpoint(model)
    for folder in exported(found[1], source, tmp_path):
        for name in source.names:
            assert torch.equal(folder.tensor(name), source.tensor(name) + 1), name


def test_folders_when_the_layer_was_not_in_megatron_then_it_is_the_checkpoints_unchanged(
    found, model, tmp_path
):
    source = HFCheckpoint(model)
    for folder in exported(f"{found[1]}.without", source, tmp_path):
        for name in source.names:
            added = 0 if name.startswith(LAYER) else 1
            assert torch.equal(folder.tensor(name), source.tensor(name) + added), name


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
@pytest.mark.parametrize("found", [1], indirect=True)
def test_push_when_a_server_drafts_with_the_layer_then_sglangs_draft_model_has_all_of_it(
    found, model, tmp_path
):
    ranks, _ = found
    sent = ranks[0]["sent"]
    save_file({name: tensor.contiguous() for name, tensor in sent.items()}, tmp_path / "sent.safetensors")
    (tmp_path / "sent.safetensors.units").write_text(json.dumps(ranks[0]["units"]))
    answer = run_preloaded([NEXTN, model, tmp_path / "sent.safetensors"], engine="sglang")
    assert answer.returncode == 0, answer.stderr[-3000:]
    [line] = [line for line in answer.stdout.splitlines() if line.startswith("RESULT ")]
    told = json.loads(line.removeprefix("RESULT "))
    assert told["draft"]["kind"] == "DeepseekV3ForCausalLMNextN" and len(told["draft"]["held"]) == 22
    # These two are the model's own tensors in a server, as its loader says; the model itself drops the layer.
    assert told["draft"]["wrong"] == ["lm_head.weight", "model.embed_tokens.weight"]
    assert told["target"]["wrong"] == [] and not [name for name in told["target"]["held"] if LAYER in name]
