"""Pushes to a real SGLang server of an FP8 checkpoint, which multiplies without a GPU by what its
weights stand for.
"""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_rl_corr.engines.errors import IncompletePush
from megatron_rl_corr.models.block_fp8 import dequantise_blockwise
from megatron_rl_corr.models.hf_folder import copy_model_files
from megatron_rl_corr.models.quantization import SCALE, BlockFP8
from megatron_rl_corr.rollout import RolloutProtocolError
from megatron_rl_corr.weight_sync.quantization import find_quantization
from tests.hf_truth import assert_is_truth
from tests.preloaded import PreloadedServer
from tests.weight_sync.fp8_models import CONFIG, SPARED, make_fp8, make_model, quantised
from tests.weight_sync.pushing import Pushing
from tools.cpu import environment, gpu_available, sglang_arguments

TRANSPORTS = ("distributed", "tensor", "disk")
SERVED = CONFIG | {"scale_fmt": "ue8m0", "modules_to_not_convert": SPARED}
FP8 = BlockFP8.from_config({"quantization_config": SERVED})

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(gpu_available(), reason="a GPU's kernels quantise activations too"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(of the trainer, in float32; of the server, in FP8)."""
    folder = tmp_path_factory.mktemp("fp8")
    make_model(folder / "plain")
    make_fp8(folder / "plain", folder / "fp8", SERVED)
    return folder / "plain", folder / "fp8"


@pytest.fixture(scope="module")
def server(folders):
    made = PreloadedServer(
        folders[1],
        dtype="float32",
        log_path=folders[1] / "server.log",
        environment=environment("sglang"),
        extra_arguments=[*sglang_arguments(), "--random-seed", "0", "--skip-tokenizer-init"],
    )
    with made:
        yield made


@pytest.fixture
def make(server, folders, tmp_path):
    """make(kind): a trainer's rank that sends what the server has told of."""
    trainers = []

    def made(kind, quantization=FP8):
        trainers.append(
            Pushing([server.url], kind, folders[0], tmp_path / "pushed", quantization=quantization)
        )
        return trainers[-1]

    yield made
    for one in trainers:
        one.close()


def changed(folders, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folders[0] / "model.safetensors")
    return {name: w + 0.05 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def dequantised(weights):
    sent = quantised(weights, FP8)
    return {
        name: dequantise_blockwise(sent[name], sent[name + SCALE], torch.float32)
        if name + SCALE in sent
        else weight
        for name, weight in sent.items()
        if not name.endswith(SCALE)
    }


def model_of(folders, weights, folder):
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    copy_model_files(folders[0], folder)
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_push_when_in_fp8_then_every_parameter_is_verified_and_samples_are_of_what_its_values_mean(
    make, folders, tmp_path, kind
):
    trainer, new = make(kind), changed(folders, seed=TRANSPORTS.index(kind))
    assert trainer.loop.call(find_quantization(trainer.client.control(trainer.client.base_urls))) == FP8
    trainer.push(new, "new")
    # Each of 2 layers: qkv, o, two norms of heads, the experts' two, gate, two norms; with both ends
    # and the last norm.
    assert trainer.compared == len(trainer.parameters()) == 21
    sample = trainer.sample()
    assert sample.oldest_version == "new"
    assert_is_truth(sample, model_of(folders, dequantised(new), tmp_path / "meant"), atol=1e-5)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_is_truth(sample, model_of(folders, new, tmp_path / "whole"), atol=1e-3)
    # After a push to disk the server names that folder.
    assert trainer.loop.call(find_quantization(trainer.client.control(trainer.client.base_urls))) == FP8


def test_folder_when_pushed_to_disk_then_it_is_an_fp8_checkpoint_as_the_servers_own(make, folders, tmp_path):
    make("disk").push(changed(folders, seed=5), "7")
    folder = tmp_path / "pushed/version-7"
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (folders[1] / "config.json").read_text()
    )

    def described(path):
        found = {}
        for file in path.glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                found |= {
                    name: (opened.get_slice(name).get_dtype(), opened.get_slice(name).get_shape())
                    for name in opened.keys()  # noqa: SIM118
                }
        return found

    assert described(folder) == described(folders[1])


def test_push_when_a_scale_is_lost_or_changed_on_its_way_then_its_weight_is_named(make, folders, monkeypatch):
    name = "model.layers.0.self_attn.k_proj.weight" + SCALE
    for ways, seed in ((lambda bucket: [one for one in bucket if one[0] != name], 6), (_doubled(name), 7)):
        trainer = make("tensor")
        trainer.push(changed(folders, seed=10 + seed), "right")  # so that each parameter has once fitted
        send = trainer.transport.send
        monkeypatch.setattr(
            trainer.transport, "send", lambda bucket, send=send, ways=ways: send(ways(bucket))
        )
        with pytest.raises(RolloutProtocolError, match="model.layers.0.self_attn.qkv_proj.weight"):
            trainer.push(changed(folders, seed=seed), "wrong")


def _doubled(name):
    return lambda bucket: [(one, 2 * tensor if one == name else tensor) for one, tensor in bucket]


def test_push_when_a_weight_is_not_finite_then_it_is_named_and_the_server_goes_on(make, folders):
    trainer, new = make("tensor"), changed(folders, seed=8)
    new["model.layers.1.mlp.experts.2.up_proj.weight"][3, 5] = torch.inf
    with pytest.raises(
        IncompletePush, match=r"model.layers.1.mlp.experts.2.up_proj.weight has numbers that are not"
    ):
        trainer.push(new, "infinite")
    assert len(trainer.paused_response().output_ids) == 6


def test_push_when_in_16_bits_to_a_server_in_fp8_then_refused(make, folders):
    with pytest.raises(
        RolloutProtocolError, match=r"its weights are quantised \(fp8\), and their scales would stay"
    ):
        make("tensor", quantization=None).push(changed(folders, seed=9), "plain")
