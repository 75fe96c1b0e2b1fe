"""Whole runs on a vLLM server with the V2 model runner: replayed routes, truncated samples, what
it can't sample.
"""

import pytest
import torch

from tests.matrix.engine_pair import run, samples_of, steps_of
from tests.preloaded import PreloadedServer, address
from tests.tiers import long
from tools.cpu import environment, vllm_arguments

pytestmark = long
SHORT = ["--rollout-temperature", 1.5, "--rollout-top-k", 20]


@pytest.fixture(scope="module")
def servers(tiny_moe_dir, tmp_path_factory):
    address("vllm_v2")
    with PreloadedServer(
        tiny_moe_dir,
        engine="vllm",
        dtype="float32",
        log_path=tmp_path_factory.mktemp("v2") / "server.log",
        extra_arguments=[*vllm_arguments(), "--enable-return-routed-experts", "--return-sampling-mask"],
        environment=environment("vllm_v2"),
    ) as server:
        yield {"vllm": server}


def test_run_when_routes_are_replayed_then_the_trainer_takes_those_of_the_server(
    servers, tiny_moe_dir, tmp_path
):
    from transformers import AutoModelForCausalLM

    flags = ["--router-replay", "R3", "--rollout-save-routed-experts"]
    done = run(tmp_path, servers, tiny_moe_dir, *SHORT, *flags, steps=2, tokens=5)
    assert done.returncode == 0, done.stderr[-6000:]
    steps, samples = steps_of(tmp_path), samples_of(tmp_path)
    for step in steps:
        # The trainer computes in float32 too: left alone it would choose the same experts, but where
        # two are as good.
        assert step["router_replay/disagreement"] < 0.01 and step["rollout_corr/log_ratio_abs_max"] < 1e-4
    for number, path in ((1, tiny_moe_dir), (2, tmp_path / "run/hf/iter_0000001")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for row in samples[number]:
            ids = torch.tensor([row["prompt_ids"] + row["output_ids"]])
            with torch.no_grad():
                logits = model(ids, output_router_logits=True).router_logits
            routes = torch.stack([of_layer.topk(2).indices for of_layer in logits], dim=1)[:-1]
            served = torch.tensor(row["routed_experts"]).view(row["routed_experts_shape"])
            assert served.shape == routes.shape and (served == routes).float().mean() > 0.99


def test_run_when_its_evaluation_is_greedy_then_a_server_of_masks_is_refused_by_name(
    servers, tiny_moe_dir, tmp_path
):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"input_ids": [9, 8, 7]}\n')
    flags = ["--rollout-eval-prompts", held_out, "--rollout-eval-temperature", 0, "--eval-interval", 1]
    done = run(tmp_path, servers, tiny_moe_dir, *SHORT, *flags, steps=1, tokens=5)
    assert done.returncode == 1 and not steps_of(tmp_path)
    assert f"{servers['vllm'].url}: a server with --return-sampling-mask answers HTTP 500" in done.stderr
    assert "--rollout-eval-temperature 0 with --rollout-eval-top-k -1" in done.stderr
