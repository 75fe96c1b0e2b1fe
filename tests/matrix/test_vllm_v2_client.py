"""Supports and routed experts of a real vLLM server with the V2 model runner, as the client collects them."""

from dataclasses import replace

import pytest
import torch

from megatron_rl_corr.engines.routes import ExpertShape, has_routes
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams
from tests.hf_truth import assert_is_truth, inside, response, scored
from tests.tiers import long

pytestmark = long
PROMPTS = [[3, 67, 4, 71], [15, 9, 2]]
SHAPE = ExpertShape(num_layers=4, layers=(0, 1, 2, 3), top_k=2, experts=8)
SAMPLING = SamplingParams(24, temperature=1.5, top_k=20, top_p=0.8, ignore_eos=True)
VOCAB = 83


@pytest.fixture(scope="module")
def model(tiny_moe_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_moe_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def client(vllm_v2_server_fp32):
    with LoopThread() as loop:
        client = RolloutClient(
            [vllm_v2_server_fp32.url], engine="vllm", vocab_size=VOCAB, timeout_s=300, experts=SHAPE, seed=5
        )
        client.wait, client.submit = loop.call, loop.submit
        yield client
        loop.call(client.close())


def assert_supports_and_routes(trajectory, model):
    assert_is_truth(trajectory, model, atol=2e-5, temperature=SAMPLING.temperature)
    (logits, _), kept = response(model, trajectory), inside(trajectory, VOCAB)
    least = logits.masked_fill(~kept, torch.inf).amin(-1)
    assert (least > logits.masked_fill(kept, -torch.inf).amax(-1) - 1e-4).all()  # none outside is likelier
    ids = torch.cat([trajectory.prompt_ids, trajectory.output_ids])
    _, settled, out = scored(model, ids)
    # [T - 1, M, k]
    routes = torch.stack([logits.topk(2).indices for logits in out.router_logits], dim=1)[:-1]
    assert trajectory.routed_experts.shape == routes.shape and settled[:-1].any()
    assert torch.equal(trajectory.routed_experts[settled[:-1]].long(), routes[settled[:-1]])
    assert has_routes(trajectory.routed_experts, SHAPE.experts).all()


def test_generate_when_truncated_and_routed_then_supports_logprobs_and_routes_are_the_models(client, model):
    (info,) = client.wait(client.server_info())
    engine = client.engine_of(client.base_urls[0])
    assert engine.sampling_problem(info, SAMPLING) is None
    # the server refuses what has no top_k
    assert "HTTP 500" in engine.sampling_problem(info, SamplingParams(8))
    trajectories = client.wait(client.generate(PROMPTS, SAMPLING, samples_per_prompt=4))
    for trajectory in trajectories:
        assert trajectory.support.lengths.max() <= 20 and trajectory.support.lengths.min() < 20
        assert_supports_and_routes(trajectory, model)
    assert len({tuple(t.output_ids.tolist()) for t in trajectories}) == 8


def test_generate_when_it_goes_on_from_known_tokens_then_their_routes_are_not_asked_for_again(client, model):
    engine, url, prompt = client.engine_of(client.base_urls[0]), client.base_urls[0], torch.tensor(PROMPTS[0])
    whole = client.wait(client.generate(PROMPTS[:1], SAMPLING))[0]
    known = whole.routed_experts[: prompt.numel() + 9]
    ids = torch.cat([prompt, whole.output_ids[:10]])
    request = engine.generate(ids.tolist(), SAMPLING, seed=1, routed_experts=True, routes_from=len(known))

    async def ask():
        transport = engine.open_transport([url], timeout_s=300, connect_timeout_s=10)
        try:
            return (await transport.send(url, request))[1]
        finally:
            await transport.close()

    asked = SampleRequest(
        ids,
        SAMPLING,
        "r1",
        seed=1,
        prompt_index=0,
        sample_index=0,
        vocab_size=VOCAB,
        experts=SHAPE,
        routes_from=len(known),
    )
    part = engine.parse(client.wait(ask()), asked, server=url)
    routes = torch.cat([known, part.routed_experts])
    assert_supports_and_routes(replace(part, routed_experts=routes, routes_from=0), model)


def test_generate_when_min_p_then_exactly_the_ids_that_are_likely_enough_are_kept(client, model):
    sampling = SamplingParams(12, temperature=0.5, top_k=60, min_p=0.3, ignore_eos=True)
    for trajectory in client.wait(client.generate(PROMPTS, sampling)):
        assert_is_truth(trajectory, model, atol=2e-5, temperature=0.5)
        (logits, settled), kept = response(model, trajectory), inside(trajectory, VOCAB)
        share = torch.softmax(logits / 0.5, -1)
        share /= share.amax(-1, keepdim=True)
        clear = settled & ((share - 0.3).abs() > 1e-4).all(-1)  # no id on the border
        likely = (share >= 0.3) & (logits.argsort(-1, descending=True).argsort(-1) < 60)
        assert clear.any() and (kept == likely)[clear].all()
        assert trajectory.support.lengths.min() < 60
