"""A float32 trainer with a server in FP8: what it samples is of the FP8 values of the very weights
that are trained.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl_corr.models.block_fp8 import dequantise_blockwise, quantise_blockwise
from megatron_rl_corr.models.hf_folder import copy_model_files
from megatron_rl_corr.models.quantization import BlockFP8
from tests.matrix.engine_pair import EXACT, distance, run, samples_of, steps_of
from tests.preloaded import PreloadedServer, address
from tests.tiers import long
from tests.weight_sync.fp8_models import CONFIG, SPARED, make_fp8, make_model
from tools.cpu import environment, gpu_available, sglang_arguments

pytestmark = [
    long,
    pytest.mark.skipif(gpu_available(), reason="a GPU's kernels quantise activations too"),
]
STEPS = 2
SERVED = CONFIG | {"modules_to_not_convert": SPARED}
FP8 = BlockFP8.from_config({"quantization_config": SERVED})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The trainer's folder, in float32."""
    folder = tmp_path_factory.mktemp("fp8_run") / "plain"
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def servers(model):
    address("megatron")  # what forks runs must not end with a thread that waits for a server
    make_fp8(model, model.with_name("fp8"), SERVED)
    server = PreloadedServer(
        model.with_name("fp8"),
        dtype="float32",
        log_path=model.with_name("server.log"),
        environment=environment("sglang"),
        extra_arguments=[*sglang_arguments(), "--skip-tokenizer-init"],
    )
    with server:
        yield {"sglang": server}


def meant(path):
    """The Hugging Face model of a folder, with what its weights in FP8 stand for."""
    from transformers import AutoModelForCausalLM

    folder, weights = path.with_name(f"{path.name}-meant"), {}
    for file in path.glob("*.safetensors"):
        weights |= load_file(file)
    folder.mkdir()
    copy_model_files(path, folder)
    rounded = {
        name: dequantise_blockwise(*quantise_blockwise(weight), torch.float32)
        if FP8.quantises(name)
        else weight
        for name, weight in weights.items()
    }
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_run_when_its_server_is_in_fp8_then_every_log_prob_is_of_the_fp8_values_of_the_trained_weights(
    model, servers, tmp_path
):
    done = run(
        tmp_path, servers, model, "--tensor-model-parallel-size", 2, "--sequence-parallel", steps=STEPS
    )
    assert done.returncode == 0, done.stderr[-6000:]
    weights = {}
    for step, rows in samples_of(tmp_path).items():
        for row in rows:
            [span] = row["weight_versions"]
            version = int(span["version"].rpartition("-")[2])
            assert version == step - 1
            if version not in weights:
                weights[version] = meant(tmp_path / f"run/hf/iter_{version:07d}" if version else model)
            assert distance(row, weights[version], span["start"], span["end"]) < EXACT, row
    assert set(weights) == set(range(STEPS))
    for step in steps_of(tmp_path):
        # Far above what float32 explains, far below the bound of quantised servers; and no push
        # has made it worse.
        assert 1e-5 < step["rollout/probe_k3"] < 0.1 and step["rollout/probe_k3_growth"] < 10
    config = json.loads((tmp_path / "run/hf/iter_0000001/config.json").read_text())
    assert "quantization_config" not in config  # what is saved is the trainer's


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--rollout-push-rounding", "fp8_blockwise"],
            "--rollout-push-rounding fp8_blockwise: the servers have FP8 weights, and are sent what they "
            "hold; leave it",
        ),
        (
            ["--rollout-quantized-checkpoint", "{model}"],
            "has no quantization_config in its config.json; drop it",
        ),
    ],
)
def test_run_when_a_flag_contradicts_its_server_then_it_ends_with_its_name_and_nothing_is_sent(
    model, servers, tmp_path, flags, said
):
    done = run(tmp_path, servers, model, *(flag.format(model=model) for flag in flags), steps=1)
    assert done.returncode != 0 and said in done.stderr + done.stdout, done.stderr[-3000:]
