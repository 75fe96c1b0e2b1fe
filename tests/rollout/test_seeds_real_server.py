"""A real server with deterministic inference draws what our seeds say: each sample its own, a retry the same."""

import json

import pytest

from megatron_rl_corr.doctor.findings import Examination
from megatron_rl_corr.doctor.probe import Probe
from megatron_rl_corr.doctor.questions import Expected, ask_quick
from megatron_rl_corr.engines.sglang.requests import generate_request
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams
from megatron_rl_corr.rollout.seeds import Draw

PROMPT = [3, 1, 4, 1, 5]
SAMPLING = SamplingParams(16, ignore_eos=True)


@pytest.fixture(scope="module")
def client(victim, tiny_moe_dir):
    vocab_size = json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]
    with LoopThread() as loop:
        client = RolloutClient([victim.server.url], vocab_size=vocab_size, timeout_s=60, seed=1234)
        client.wait = loop.call
        yield client
        loop.call(client.close())


def drawn(client, prompt, sampling, seed):
    """The response to the client's own request; seed None: to the same request without one."""
    body = generate_request(prompt, sampling, seed=0 if seed is None else seed).json
    if seed is None:
        del body["sampling_params"]["sampling_seed"]
    return client.wait(client.ask(client.base_urls[0], Request("POST", "/generate", body)))["output_ids"]


def responses(client, group_numbers, samples=8, **options):
    sampling = SamplingParams(16, ignore_eos=True, **options)
    trajectories = client.wait(
        client.generate([PROMPT] * len(group_numbers), sampling, samples_per_prompt=samples,
                        group_numbers=group_numbers)
    )  # fmt: skip
    return [tuple(trajectory.output_ids.tolist()) for trajectory in trajectories]


def test_samples_when_requests_have_no_seed_then_one_response_and_with_ours_as_many_as_samples(client):
    assert len({tuple(drawn(client, PROMPT, SAMPLING, None)) for _ in range(3)}) == 1
    first = responses(client, [0, 1])
    assert len(set(first)) == 16  # two groups of 8
    assert responses(client, [1, 0]) == first[8:] + first[:8]  # in another order, the same numbers


def test_samples_when_truncated_then_as_many_responses_as_samples(client):
    assert len(set(responses(client, [0], top_p=0.9, top_k=20))) == 8


def test_request_when_sent_again_then_the_same_response_and_a_continuation_draws_anew(client):
    draw = Draw(run_seed=1234, group=7, sample=3)
    whole = drawn(client, PROMPT, SAMPLING, draw.seed(0))
    assert drawn(client, PROMPT, SAMPLING, draw.seed(0)) == whole
    rest, so_far = SamplingParams(8, ignore_eos=True), PROMPT + whole[:8]
    assert drawn(client, so_far, rest, draw.seed(0)) == whole[8:]  # the noise of a seed belongs to a position
    assert drawn(client, so_far, rest, draw.seed(8)) != whole[8:]


def test_doctor_when_seeds_are_heeded_then_it_says_so(client):
    probe = Probe(client, client.base_urls[0])
    rows, _ = client.wait(ask_quick(probe, Expected()))
    (row,) = [row for row in rows if row.check == "seeds"]
    assert (row.status, row.message) == ("ok", "3 seeds gave 3 responses of 24 tokens, one seed twice gave one")
    assert Examination(probe.url, rows).findings == []
