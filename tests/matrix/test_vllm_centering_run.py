"""Score centering with samples of a real vLLM server, over pipeline and over context parallelism."""

import pytest
import torch

from tests.matrix.engine_pair import run, samples_of, steps_of
from tests.preloaded import PreloadedServer, address
from tests.tiers import long
from tools.cpu import environment, vllm_arguments

pytestmark = long
IDS = 8
LAYOUTS = {"pp": ["--pipeline-model-parallel-size", 2], "cp": ["--context-parallel-size", 2]}


@pytest.fixture(scope="module")
def servers(tiny_moe_dir, tmp_path_factory):
    address("megatron")
    with PreloadedServer(
        tiny_moe_dir,
        engine="vllm",
        dtype="float32",
        log_path=tmp_path_factory.mktemp("centering") / "server.log",
        extra_arguments=vllm_arguments(),
        environment=environment("vllm"),
    ) as server:
        yield {"vllm": server}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_when_centered_then_its_ids_and_tails_are_those_of_the_weights_that_sampled(
    layout, servers, tiny_moe_dir, tmp_path
):
    from transformers import AutoModelForCausalLM

    flags = ["--rollout-score-centering", IDS, *LAYOUTS[layout]]
    done = run(tmp_path, servers, tiny_moe_dir, *flags, steps=2)
    assert done.returncode == 0, done.stderr[-6000:]
    steps, samples = steps_of(tmp_path), samples_of(tmp_path)
    assert len(steps) == 2
    for step, path in zip(steps, (tiny_moe_dir, tmp_path / "run/hf/iter_0000001"), strict=True):
        assert step["grad_norm"] > 0
        # The server has the weights that train: only rounding is centered away.
        assert 0 < step["loss/centering_drift"] < 1e-4
        model, tails = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), []
        for row in samples[step["step"]]:
            ids, prompt = torch.tensor([row["prompt_ids"] + row["output_ids"]]), len(row["prompt_ids"])
            with torch.no_grad():
                logprobs = model(ids).logits[0, prompt - 1 : -1].log_softmax(-1)
            top_ids = torch.tensor(row["top_ids"]).view(len(logprobs), IDS).long()
            served = torch.tensor(row["top_logprobs"]).view(len(logprobs), IDS)
            truth = logprobs.gather(1, top_ids)
            assert (truth - served).abs().max() < 1e-4
            # They are the likeliest, up to two that are as good.
            assert (truth.min(dim=1).values - logprobs.topk(IDS).values[:, -1]).abs().max() < 1e-4
            tails += (1 - truth.exp().sum(dim=1)).tolist()
        for side in ("train", "rollout"):
            assert step[f"loss/centering_{side}_tail"] == pytest.approx(sum(tails) / len(tails), rel=1e-4)
