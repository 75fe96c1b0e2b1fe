"""Whole runs of gpt-oss, Qwen3.5-MoE and Qwen3-Next, from prompts to an exported folder: a real server, four
ranks in TP, PP and EP with the server's routes; biases, sinks and windows, gated delta nets in packed
sequences.
"""

import importlib.util

import pytest
import torch

from megatron_rl_corr.models.architectures import TEXT_OF
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams
from tests.matrix.accepted import made_model, server_of
from tests.mcore.launched import launch, untimed_steps, write_data
from tests.mcore.test_runs import SCRIPT
from tests.mcore.tiny_models import VOCAB
from tests.tiers import long
from tools.cpu import gpu_available

pytestmark = [
    long,
    pytest.mark.skipif(gpu_available(), reason="without a GPU only"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
LAYOUTS = {
    "tp2 pp2 ep2": [
        *("--tensor-model-parallel-size", 2, "--sequence-parallel", "--pipeline-model-parallel-size", 2),
        *("--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1),
    ],
    "cp2 dp2": ["--context-parallel-size", 2, "--expert-model-parallel-size", 2],
}
LONG = 20
"""Tokens of a response: with those of its prompt more than a window of gpt-oss has."""
RUNS = [
    ("gpt_oss", "tp2 pp2 ep2"),
    ("qwen3_5_moe", "tp2 pp2 ep2"),
    ("qwen3_next", "tp2 pp2 ep2"),
    ("qwen3_5_moe_text", "cp2 dp2"),
]
MISMATCH = {"gpt_oss": (2e-3, 1e-6)}
"""The largest |D| and k3 of a run: SGLang holds sinks in bfloat16 in a server of float32, too."""
FLOAT32 = (1e-4, 1e-9)


@pytest.fixture(scope="module", params=RUNS, ids=" ".join)
def run(request, tiny_moe_dir, tmp_path_factory):
    """The family, the folder of a run of three steps, its model, and the server's greedy response after."""
    family, layout = request.param
    folder = tmp_path_factory.mktemp(family)
    model = made_model(family, tiny_moe_dir, folder, spread=0.15)  # of which float32 keeps more digits
    write_data(folder)
    flags = [
        *LAYOUTS[layout],
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB),
        *("--router-replay", "R3", "--rollout-save-hf", folder / "hf"),
        *("--train-iters", 3, "--save-interval", 3),
        *("--rollout-max-probe-log-ratio", 0.01 if family == "gpt_oss" else 0.001),
    ]
    with server_of(family, model, folder) as server:
        done = launch(
            folder, "run", model, server.url, SCRIPT, *flags, processes=4, checks="semantic", tokens=LONG
        )
        assert done.returncode == 0, done.stderr[-4000:]
        greedy, prompt = SamplingParams(LONG, temperature=0, ignore_eos=True), [3, 1, 4, 1, 5]
        with LoopThread() as loop:
            client = RolloutClient([server.url], vocab_size=VOCAB, timeout_s=60)
            [response] = loop.call(client.generate([prompt], greedy))
            loop.call(client.close())
    return family, folder, model, response


def test_run_when_routes_are_replayed_then_trainer_and_server_agree_to_rounding(run):
    family, folder, *_ = run
    largest, k3 = MISMATCH.get(family, FLOAT32)
    steps = untimed_steps(folder / "run")
    assert len(steps) == 3 and [step["weight_version"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["skipped"] == 0 and step["grad_norm"] > 0
        assert step["rollout_corr/log_ratio_abs_max"] < largest and step["rollout_corr/k3_kl"] < k3
        assert step["router_replay/disagreement"] < 0.01


def test_export_after_a_run_then_transformers_gives_the_servers_logprobs(run):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    family, folder, start, response = run
    exported = folder / "hf/iter_0000003"
    before, after = HFCheckpoint(start), HFCheckpoint(exported)
    assert set(before.names) == set(after.names)
    moved = [name for name in before.names if not torch.equal(before.tensor(name), after.tensor(name))]
    assert set(moved) == {name for name in before.names if ".visual." not in name}
    maker = AutoModelForImageTextToText if family in TEXT_OF else AutoModelForCausalLM
    model = maker.from_pretrained(
        exported, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            parameter.data = parameter.data.bfloat16().double()
    ids = torch.cat([response.prompt_ids, response.output_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None]).logits[0, len(response.prompt_ids) - 1 : -1], -1)
    assert response.oldest_version.endswith("3")
    assert logprobs.argmax(-1).tolist() == response.output_ids.tolist()
    torch.testing.assert_close(logprobs.max(-1).values.float(), response.rollout_logprobs, atol=1e-5, rtol=0)
