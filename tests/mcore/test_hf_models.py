"""Every supported architecture: a Hugging Face checkpoint in real Megatron has its logits, and is
exported bit for bit.

Megatron's command line comes from config.json alone (weight_sync/model_flags.py).
"""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl_corr.commands.export.megatron_checkpoint import MegatronCheckpoint, export_checkpoint
from megatron_rl_corr.models.architectures import TEXT_OF, num_experts
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.names import ARCHITECTURES
from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams
from megatron_rl_corr.weight_sync.rounding import ROUNDINGS, is_rounded
from tests.mcore.tiny_models import MODELS, VOCAB, make_model
from tests.megatron_forks import run_megatron
from tests.preloaded import PreloadedServer, run_preloaded
from tools.cpu import environment, gpu_available, sglang_arguments

pytestmark = pytest.mark.skipif(gpu_available(), reason="without a GPU only")

WORKER = Path(__file__).with_name("hf_models_worker.py")
LOADER = Path(__file__).with_name("sglang_loader_worker.py")
with_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
TIED = "qwen2 tied"
TOLERANCE = 5e-5
"""float32 against float32, of logits up to 7; measured 1.3e-5 on one rank."""


def of_text(tensors: dict) -> dict:
    """Without those of the part for images, which is neither trained nor sent."""
    return {name: tensor for name, tensor in tensors.items() if ".visual." not in name}


def results(*arguments, worker=WORKER, engine="megatron") -> list[dict]:
    """What the worker says of each model."""
    if engine == "megatron":
        answer = run_megatron(worker, *arguments)
    else:
        answer = run_preloaded([worker, *arguments], engine=engine)
    assert answer.returncode == 0, answer.stderr[-3000:]
    lines = [
        line.removeprefix("RESULT ") for line in answer.stdout.splitlines() if line.startswith("RESULT ")
    ]
    return [json.loads(line) for line in lines]


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
    """Number of processes, and each model's worst differences of its logits: by itself, and with
    routes replayed.
    """
    found = results(request.param, *models)
    return request.param, {one["model"]: (one["worst"], one["replayed"]) for one in found}


def test_models_of_this_test_then_every_architecture_of_the_table_and_tied_embeddings():
    assert {name.split()[0] for name in MODELS} == set(ARCHITECTURES)


def test_loaded_checkpoint_when_on_one_rank_and_on_tp2_pp2_ep2_then_logits_are_those_of_hugging_face(
    differences, models
):
    _, found = differences
    assert set(found) == {folder.name for folder in models}
    assert {name: worst for name, (worst, _) in found.items() if not worst < TOLERANCE} == {}


def test_routes_of_hugging_face_when_replayed_on_one_rank_and_on_tp2_pp2_ep2_then_the_same_logits(
    differences,
):
    _, found = differences
    replayed = {name: worst for name, (_, worst) in found.items() if worst is not None}
    assert replayed.keys() == {name.replace(" ", "_") for name, shape in MODELS.items() if num_experts(shape)}
    assert {name: worst for name, worst in replayed.items() if not worst < TOLERANCE} == {}


def test_exported_weights_when_on_one_rank_or_tp2_pp2_ep2_then_the_checkpoints_bit_for_bit(
    differences, models
):
    processes, _ = differences
    for folder in models:
        exported = {}
        for stage in range(1 if processes == 1 else 2):
            part = load_file(folder / f"sent/export-{processes}-{stage}.safetensors")
            assert not exported.keys() & part.keys(), "a tensor is sent by two stages"
            exported |= part
        checkpoint = of_text(load_file(folder / "model.safetensors"))
        assert exported.keys() == checkpoint.keys(), folder.name
        assert "lm_head.weight" not in exported or "tied" not in folder.name
        for name, tensor in checkpoint.items():
            assert exported[name].dtype == tensor.dtype and torch.equal(exported[name], tensor), (
                folder.name,
                name,
            )


def test_gradients_when_on_one_rank_and_on_tp2_pp2_ep2_then_those_of_hugging_face_in_float64(
    differences, models
):
    processes, _ = differences
    for folder in models:
        found = {}
        for stage in range(1 if processes == 1 else 2):
            found |= load_file(folder / f"sent/gradients-{processes}-{stage}.safetensors")
        expected = of_text(load_file(folder / "gradients/model.safetensors"))
        # a balancing bias has none
        expected = {name: one for name, one in expected.items() if not name.endswith("correction_bias")}
        assert found.keys() == expected.keys(), folder.name
        for name, gradient in expected.items():
            error = (found[name].double() - gradient).norm()
            assert error < 2e-5 * gradient.norm() + 1e-6, (folder.name, name, error / gradient.norm())


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rounded_weights_when_on_one_rank_and_on_tp2_pp2_ep2_then_every_tensor_is_rounded_as_a_whole(
    differences, models, rounding
):
    processes, _ = differences
    for folder in models:
        sent = {}
        for stage in range(1 if processes == 1 else 2):
            sent |= load_file(folder / f"sent/{rounding}-{processes}-{stage}.safetensors")
        checkpoint = of_text(load_file(folder / "model.safetensors"))
        assert sent.keys() == checkpoint.keys()
        changed = 0
        for name, tensor in checkpoint.items():
            expected = ROUNDINGS[rounding](tensor) if is_rounded(name, tensor) else tensor
            assert torch.equal(sent[name], expected), (folder.name, name)
            changed += not torch.equal(sent[name], tensor)
        assert changed > 10


def test_megatron_checkpoint_when_exported_then_every_tensor_is_the_hugging_face_ones_bit_for_bit(
    differences, models, tmp_path
):
    processes, _ = differences
    for folder in models:
        source, out = HFCheckpoint(folder), tmp_path / folder.name
        checkpoint = MegatronCheckpoint(folder / f"megatron-{processes}")
        export_checkpoint(checkpoint, source, out, lambda written, whole: None)
        found = HFCheckpoint(out)
        assert set(found.names) == set(source.names), folder.name
        # transformers promises a layer that predicts further tokens, and saves none.
        promised = {"num_nextn_predict_layers": 0} if folder.name == "deepseek_v3" else {}
        assert found.config == source.config | promised
        for name in source.names:
            assert torch.equal(found.tensor(name), source.tensor(name)), (folder.name, name)


@pytest.fixture(scope="module")
def loaded(differences, models):
    """What SGLang's own models make of the exported weights, by the model's name."""
    folders = [folder for folder in models if folder.name != NOT_MADE]
    return {found["model"]: found for found in results(*folders, worker=LOADER, engine="sglang")}


NOT_MADE = "glm_moe_dsa"
"""SGLang 0.5.23 makes no indexer of a model without rotary scaling on a CPU."""
SERVED = [name.replace(" ", "_") for name in MODELS if name not in ("qwen2_moe", NOT_MADE)]
OF_LATENT = ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2")
LATENT = [f"model.layers.{layer}.self_attn.fused_qkv_a_proj_with_mqa.weight" for layer in range(4)]


@with_sglang
@pytest.mark.parametrize("differences", [4], indirect=True)
@pytest.mark.parametrize("name", SERVED)
def test_push_when_every_bucket_is_smaller_than_a_layer_then_sglangs_loader_makes_what_it_loads_itself(
    name, loaded
):
    found = loaded[name]
    assert found["units"] == {"wrong": [], "proven": found["units"]["held"], "held": found["units"]["held"]}
    assert found["whole"] is None
    # Nothing else keeps a part of a parameter between two requests, in any family.
    assert found["singly"]["wrong"] == (LATENT if name in OF_LATENT else [])


@with_sglang
@pytest.mark.parametrize("differences", [4], indirect=True)
def test_push_when_latent_down_projections_come_in_two_requests_then_the_checksums_tell(loaded):
    assert (
        "4 of 55 weights that were compared are not those that were sent: " + LATENT[0]
        in (loaded["deepseek_v3"]["singly"]["proven"])
    )


@with_sglang
@pytest.mark.parametrize("differences", [4], indirect=True)
@pytest.mark.parametrize("name", SERVED)
def test_push_when_a_tensor_is_missing_on_either_side_then_it_ends_with_its_name(name, loaded):
    found = loaded[name]
    [left_out] = found["left out"]
    assert (
        f"nothing was sent for 1 of the checkpoint's {found['tensors']} tensors: {left_out};"
        in found["incomplete"]
    )
    assert "weights, which keep the values that it loaded: model.layers.0.extra.weight." in found["more"]
    norm = "model.language_model.norm.weight" if name in TEXT_OF else "model.norm.weight"
    assert f"weights were sent that it does not have: {norm}." in found["less"]


@with_sglang
@pytest.mark.parametrize("differences", [4], indirect=True)
def test_push_when_sglang_makes_experts_of_dense_layers_then_the_push_ends_with_their_names(loaded):
    """SGLang 0.5.23 does not read decoder_sparse_step: it drops what is sent for a dense layer, and
    invents experts.
    """
    found = loaded["qwen2_moe"]
    assert "model.layers.0.mlp.experts.w13_weight" in found["units"]["wrong"]
    assert (
        "nothing was sent for 12 of its 47 weights, which keep the values that it loaded: " in found["whole"]
    )


@pytest.fixture(scope="module")
def tied_server(models, tiny_moe_dir, tmp_path_factory):
    """A real SGLang server of another Qwen2 with tied embeddings, and the folder of the one
    that it is to get.
    """
    folder = tmp_path_factory.mktemp("other")
    make_model(TIED, folder, seed=1)
    for file in tiny_moe_dir.glob("*token*"):
        shutil.copy(file, folder)
    server = PreloadedServer(
        folder,
        dtype="float32",
        log_path=tmp_path_factory.mktemp("sglang") / "server.log",
        extra_arguments=[*sglang_arguments(), "--random-seed", "0"],
        environment=environment("sglang"),
    )
    with server:
        yield server.url, models[list(MODELS).index(TIED)]


@with_sglang
def test_push_from_two_stages_when_embeddings_are_tied_then_the_server_samples_as_the_hugging_face_model(
    tied_server,
):
    from transformers import AutoModelForCausalLM

    url, folder = tied_server
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    greedy, prompt = SamplingParams(12, temperature=0, ignore_eos=True), [3, 1, 4, 1, 5]
    with LoopThread() as loop:
        client = RolloutClient([url], vocab_size=VOCAB, timeout_s=60)
        [before] = loop.call(client.generate([prompt], greedy))
        assert results("push", url, folder) == [{"model": folder.name, "worst": None, "replayed": None}]
        [after] = loop.call(client.generate([prompt], greedy))
        loop.call(client.close())
    assert after.oldest_version == "1" and before.output_ids.tolist() != after.output_ids.tolist()
    ids = torch.cat([after.prompt_ids, after.output_ids])
    with torch.no_grad():
        expected = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1], -1)
    assert expected.argmax(-1).tolist() == after.output_ids.tolist()
    torch.testing.assert_close(after.rollout_logprobs, expected.max(-1).values, atol=TOLERANCE, rtol=0)
