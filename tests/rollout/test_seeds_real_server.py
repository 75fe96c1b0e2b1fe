"""Real servers draw what our seeds say: each sample its own, a retry the same, a continuation anew.

SGLang heeds seeds with deterministic inference alone, and its noise belongs to a seed and a position; vLLM
always does, and its noise (V1 runner) to a seed and a token's place in the response.
"""

import json

import pytest
import torch

from megatron_rl_corr.doctor.findings import Examination
from megatron_rl_corr.doctor.probe import Probe
from megatron_rl_corr.doctor.questions import Expected, ask_quick
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams
from megatron_rl_corr.rollout.seeds import Draw

PROMPT = [3, 1, 4, 1, 5]
SAMPLING = SamplingParams(16, ignore_eos=True)


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def client(request, tiny_moe_dir):
    vocab_size = json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]
    if request.param == "sglang":
        server = request.getfixturevalue("victim").server  # started with deterministic inference
    else:
        server = request.getfixturevalue("vllm_server_fp32")
    with LoopThread() as loop:
        client = RolloutClient(
            [server.url], engine=request.param, vocab_size=vocab_size, timeout_s=60, seed=1234
        )
        client.wait, client.runs = loop.call, request.param
        client.submit = loop.submit
        yield client
        loop.call(client.close())


def drawn(client, prompt, sampling, seed):
    """The response to the client's own request; seed None: to the same request without one."""
    (url,) = client.base_urls
    engine = client.engine_of(url)
    request = engine.generate(prompt, sampling, seed=0 if seed is None else seed)
    if seed is None:
        fields = request.json["sampling_params"]
        del fields["sampling_seed" if client.runs == "sglang" else "seed"]
    answer = json.dumps(client.wait(client.ask(url, request))).encode()
    asked = SampleRequest(
        torch.tensor(prompt), sampling, "r1", seed=0, prompt_index=0, sample_index=0, vocab_size=None
    )
    return engine.parse(answer, asked, server=url).output_ids.tolist()


def responses(client, group_numbers, samples=8, **options):
    sampling = SamplingParams(16, ignore_eos=True, **options)
    trajectories = client.wait(
        client.generate(
            [PROMPT] * len(group_numbers), sampling, samples_per_prompt=samples, group_numbers=group_numbers
        )
    )
    return [tuple(trajectory.output_ids.tolist()) for trajectory in trajectories]


def test_samples_when_requests_have_our_seeds_then_as_many_responses_as_samples_in_any_order(client):
    unseeded = {tuple(drawn(client, PROMPT, SAMPLING, None)) for _ in range(3)}
    assert len(unseeded) == {"sglang": 1, "vllm": 3}[client.runs]
    first = responses(client, [0, 1])
    assert len(set(first)) == 16  # two groups of 8
    assert responses(client, [1, 0]) == first[8:] + first[:8]  # in another order, the same numbers


def test_samples_when_truncated_then_as_many_responses_as_samples(client):
    if client.runs == "vllm":  # its V1 runner returns no sampling mask, so only evaluations truncate
        seeds = [Draw(1234, 0, sample).seed(0) for sample in range(8)]
        truncated = SamplingParams(16, ignore_eos=True, top_p=0.9, top_k=20, with_support=False)
        assert len({tuple(drawn(client, PROMPT, truncated, seed)) for seed in seeds}) == 8
        return
    assert len(set(responses(client, [0], top_p=0.9, top_k=20))) == 8


def test_request_when_sent_again_then_the_same_response_and_a_continuation_draws_anew(client):
    draw = Draw(run_seed=1234, group=7, sample=3)
    whole = drawn(client, PROMPT, SAMPLING, draw.seed(0))
    assert drawn(client, PROMPT, SAMPLING, draw.seed(0)) == whole
    rest, so_far = SamplingParams(8, ignore_eos=True), PROMPT + whole[:8]
    # What a continuation with its first part's seed would draw: the noise that was used up, or that
    # of the first part.
    repeated, noise_of = drawn(client, so_far, rest, draw.seed(0)), {"sglang": whole[8:], "vllm": whole[:8]}
    assert alike(repeated, noise_of[client.runs]) >= {"sglang": 8, "vllm": 5}[client.runs]
    assert alike(drawn(client, so_far, rest, draw.seed(8)), noise_of[client.runs]) < 4


def alike(ids, others):
    """At how many places two responses have the same token."""
    return sum(a == b for a, b in zip(ids, others, strict=True))


def test_continuation_when_a_pause_has_aborted_the_response_then_it_repeats_no_noise(
    client, wait_until_sampling
):
    url = client.base_urls[0]
    sampling = client.submit(
        client.generate([PROMPT], SamplingParams(400, ignore_eos=True), group_numbers=[3])
    )
    wait_until_sampling(url)
    try:
        client.wait(client.pause_generation("abort"))
    finally:
        client.wait(client.continue_generation())
    (trajectory,) = sampling.result(60)
    assert client.counts()["continuations"] >= 1 and trajectory.output_ids.numel() == 400
    first = drawn(client, PROMPT, SamplingParams(400, ignore_eos=True), Draw(1234, 3, 0).seed(0))
    ids = trajectory.output_ids.tolist()
    cut = next(place for place, (ours, whole) in enumerate(zip(ids, first, strict=True)) if ours != whole)
    assert 10 < cut < 380  # up to the cut the response is that of its seed
    length = min(cut, 400 - cut)
    for others in (first[cut : cut + length], first[:length]):
        assert alike(ids[cut : cut + length], others) < 0.3 * length


def test_doctor_when_seeds_are_heeded_then_it_says_so(client):
    probe = Probe(client, client.base_urls[0])
    rows, _ = client.wait(ask_quick(probe, Expected()))
    (row,) = [row for row in rows if row.check == "seeds"]
    assert (row.status, row.message) == (
        "ok",
        "3 seeds gave 3 responses of 24 tokens, one seed twice gave one",
    )
    assert Examination(probe.url, rows).findings == []
