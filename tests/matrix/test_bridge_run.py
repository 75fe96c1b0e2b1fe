"""Whole runs of families that Megatron-Bridge has and the table lacks, with real SGLang servers, to a folder:
in tensor, pipeline and expert parallel groups.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams
from tests.matrix.bridge_environment import needs_bridge, with_bridge
from tests.matrix.bridge_models import VOCAB, make_bridge_model
from tests.mcore.launched import run_command, run_environment, untimed_steps, write_data
from tests.preloaded import PreloadedServer
from tools.cpu import environment, sglang_arguments

pytestmark = [
    pytest.mark.matrix,
    *needs_bridge,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
HERE = Path(__file__).resolve().parent
TOKENS = 12


class Case(NamedTuple):
    script: str
    processes: int
    flags: tuple = ()
    server: tuple = ()


PIPELINE = ("--pipeline-model-parallel-size", 2)
TENSOR = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
CASES = {
    # by the flags of a script that knows nothing of Bridge, in packed sequences
    "mistral": Case("pretrain_any.py", 4, (*TENSOR, *PIPELINE)),
}


def model_flags(model):
    """What `megatron-rl-corr model-flags` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl_corr.cli", "model-flags", str(model)],
        env=with_bridge(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture(scope="module", params=CASES)
def run(request, tiny_moe_dir, tmp_path_factory):
    """The folder of a run of three steps, its model, and the server's greedy response after it."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    model = folder / "model"
    model.mkdir()
    make_bridge_model(request.param, model)
    for file in tiny_moe_dir.glob("*token*"):
        shutil.copy(file, model)
    write_data(folder)
    server = PreloadedServer(
        model,
        dtype="float32",
        log_path=folder / "server.log",
        extra_arguments=[*sglang_arguments(), *case.server, "--random-seed", "0"],
        environment=environment("sglang"),
    )
    flags = [
        *case.flags,
        *("--tokenizer-type", "NullTokenizer", "--rollout-save-hf", folder / "hf"),
        *("--train-iters", 3, "--save-interval", 3, "--rollout-max-probe-log-ratio", 0.01),
    ]
    with server:
        command = run_command(
            folder,
            "run",
            model,
            server.url,
            HERE / case.script,
            *flags,
            processes=case.processes,
            checks="semantic",
            tokens=TOKENS,
            model_words=model_flags(model),
        )
        done = subprocess.run(
            command, env=with_bridge(run_environment()), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-6000:]
        greedy, prompt = SamplingParams(TOKENS, temperature=0, ignore_eos=True), [3, 1, 4, 1, 5]
        with LoopThread() as loop:
            client = RolloutClient([server.url], vocab_size=VOCAB, timeout_s=60)
            [response] = loop.call(client.generate([prompt], greedy))
            loop.call(client.close())
    return folder, model, response


def test_run_when_bridge_gives_the_names_then_servers_sample_with_what_is_trained(run):
    folder, *_ = run
    steps = untimed_steps(folder / "run")
    assert len(steps) == 3 and [step["weight_version"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["skipped"] == 0 and step["grad_norm"] > 0
        assert step["rollout_corr/k3_kl"] < 1e-8 and step["rollout_corr/log_ratio_abs_max"] < 2e-4


def test_export_after_a_run_then_transformers_gives_the_servers_logprobs(run):
    from transformers import AutoModelForCausalLM

    folder, start, response = run
    exported = folder / "hf/iter_0000003"
    before, after = HFCheckpoint(start), HFCheckpoint(exported)
    assert set(before.names) == set(after.names)
    moved = [name for name in before.names if not torch.equal(before.tensor(name), after.tensor(name))]
    assert set(moved) == set(before.names)
    model = AutoModelForCausalLM.from_pretrained(
        exported, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.cat([response.prompt_ids, response.output_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0, len(response.prompt_ids) - 1 : -1], -1)
    assert response.oldest_version.endswith("3")
    assert logprobs.argmax(-1).tolist() == response.output_ids.tolist()
    torch.testing.assert_close(logprobs.max(-1).values, response.rollout_logprobs, atol=2e-5, rtol=0)
