"""Sampling from real servers of every engine: what their answers mean, checked against the
Hugging Face model.
"""

import asyncio
import json
import time

import pytest
import torch

from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.http import HTTPTransport
from megatron_rl_corr.engines.sglang.logprob_rows import read_flat
from megatron_rl_corr.engines.sglang.requests import generate_request
from megatron_rl_corr.mcore.first_step import first_step_bound
from megatron_rl_corr.rollout import (
    LoopThread,
    RolloutClient,
    RolloutServerError,
    SampleFailure,
    SamplingParams,
)
from tests.hf_truth import assert_is_truth, inside, response
from tests.tiers import in_matrix, matrix

pytestmark = matrix

PROMPTS = [[3, 1, 4], [15, 9, 2, 6, 5], [3, 1, 4, 1]]


@pytest.fixture(scope="module")
def loop():
    with LoopThread() as thread:
        yield thread


@pytest.fixture(scope="module")
def vocab_size(tiny_moe_dir):
    return json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def engine(request):
    """The name of what the client's server runs."""
    return request.param


@pytest.fixture(scope="module")
def url(engine, request):
    return request.getfixturevalue(f"{engine}_server_fp32").url


@pytest.fixture(scope="module")
def client(engine, url, tiny_moe_dir, vocab_size, loop):
    client = RolloutClient(
        [url],
        engine=engine,
        vocab_size=vocab_size,
        timeout_s=120,
        max_continuations=0,
        decode=Tokenizer.from_folder(tiny_moe_dir).decode_all,
    )
    loop.call(client.wait_healthy(60))
    yield client
    loop.call(client.close())


@pytest.fixture(scope="module")
def model(tiny_moe_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_moe_dir, dtype=torch.float32).eval()


def refused_without_mask(client, loop, sampling):
    """Whether the server was started so that it can't tell what truncation kept, which a run's
    start then says.

    vLLM can with its V2 model runner alone, which is too slow here: tests/matrix samples from one.
    """
    problem, (url,) = loop.call(client.sampling_problem(sampling)), client.base_urls
    assert (problem is not None) == (client.engine_of(url).name == "vLLM")
    assert problem is None or problem.startswith(url) and "start it with --return-sampling-mask" in problem
    return problem is not None


def test_generate_when_prompts_are_longer_than_a_batch_together_then_each_is_sampled(client, loop, model):
    """A vLLM server without a GPU ended at a prompt that it had split between two batches."""
    prompts = [[(i * n) % 80 for i in range(400)] for n in range(1, 9)]
    samples = loop.call(client.generate(prompts, SamplingParams(2, ignore_eos=True)))
    assert len(samples) == 8
    assert_is_truth(samples[-1], model, atol=2e-5, temperature=1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_generate_when_several_samples_then_logprobs_are_of_the_temperature_scaled_softmax(
    client, loop, model, vocab_size, temperature
):
    sampling = SamplingParams(12, temperature=temperature, ignore_eos=True)
    trajectories = loop.call(client.generate(PROMPTS, sampling, samples_per_prompt=3))
    order = [(p, s) for p in range(3) for s in range(3)]
    assert [(t.prompt_index, t.sample_index) for t in trajectories] == order
    for t in trajectories:
        assert t.prompt_ids.tolist() == PROMPTS[t.prompt_index]
        assert t.output_ids.numel() == 12 and t.finish_reason == "length"
        assert t.output_ids.min() >= 0 and t.output_ids.max() < vocab_size
        assert [(span.start, span.end) for span in t.weight_versions] == [(0, 12)]
        assert t.server == client.base_urls[0]
        assert_is_truth(t, model, atol=2e-5, temperature=temperature)
    assert len({tuple(t.output_ids.tolist()) for t in trajectories}) > 3  # samples of one prompt differ


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_generate_when_likeliest_ids_are_asked_for_then_they_and_their_logprobs_are_the_models(
    client, loop, model, temperature
):
    sampling = SamplingParams(12, temperature=temperature, ignore_eos=True, top_logprobs=16)
    found = 0
    for t in loop.call(client.generate(PROMPTS, sampling, samples_per_prompt=3)):
        top = t.top_logprobs
        assert top.ids.shape == top.logprobs.shape == (12, 16)
        assert (top.logprobs.diff(dim=1) <= 0).all()
        # Where it is among them, the sampled id's log-prob is the very one that the token has.
        row, column = (top.ids == t.output_ids[:, None]).nonzero(as_tuple=True)
        assert torch.equal(top.logprobs[row, column], t.rollout_logprobs[row])
        found += len(row)
        logits, settled = response(model, t)
        exact = torch.log_softmax(logits / temperature, -1)
        ours = exact.gather(1, top.ids.long())
        assert (ours - top.logprobs)[settled].abs().max() < 2e-5
        # No id that is not among them is likelier.
        others = exact.scatter(1, top.ids.long(), -torch.inf).amax(dim=1)
        assert (others < ours.amin(dim=1) + 1e-4)[settled].all()
    assert 10 < found < 108
    # A vLLM server has --max-logprobs 20, and the sampled id is one of them.
    for wanted, refused in ((19, False), (20, client.engine_of(client.base_urls[0]).name == "vLLM")):
        problem = loop.call(client.sampling_problem(SamplingParams(2, top_logprobs=wanted)))
        assert (problem is not None and "--max-logprobs is 20" in problem) == refused, problem
    assert loop.call(client.generate(PROMPTS, SamplingParams(2)))[0].top_logprobs is None
    with pytest.raises(ValueError, match="`score_centering` 1000 asks for more ids than the vocabulary"):
        loop.call(client.generate(PROMPTS, SamplingParams(2, top_logprobs=1000)))


@pytest.mark.parametrize("temperature, top_p, top_k", [(0.7, 0.8, 20), (1.0, 1.0, 5), (1.5, 0.5, 4096)])
def test_generate_when_truncated_then_logprobs_are_renormalised_on_the_likeliest_tokens(
    client, loop, model, vocab_size, temperature, top_p, top_k
):
    sampling = SamplingParams(12, temperature=temperature, top_p=top_p, top_k=top_k, ignore_eos=True)
    if refused_without_mask(client, loop, sampling):
        return
    trajectories = loop.call(client.generate(PROMPTS, sampling, samples_per_prompt=3))
    for t in trajectories:
        assert t.support.lengths.numel() == 12 and t.support.lengths.max() <= min(top_k, vocab_size - 1)
        (logits, settled), kept = response(model, t), inside(t, vocab_size)
        least = logits.masked_fill(~kept, torch.inf).amin(-1)
        most = logits.masked_fill(kept, -torch.inf).amax(-1)
        assert (least > most - 1e-4)[settled].all()  # no id outside is likelier than one inside
        assert_is_truth(t, model, atol=2e-5, temperature=temperature)
        whole = torch.log_softmax(logits / temperature, -1).gather(1, t.output_ids[:, None])[:, 0]
        # what is left out makes each token likelier
        assert (t.rollout_logprobs > whole + 1e-3)[settled].all()
    assert len({tuple(t.output_ids.tolist()) for t in trajectories}) > 3


def test_generate_when_min_p_then_logprobs_are_renormalised_on_the_ids_that_are_likely_enough(
    client, loop, tiny_moe_dir, vocab_size
):
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.float64, "experts_implementation": "eager"}  # grouped products know no float64
    double = AutoModelForCausalLM.from_pretrained(tiny_moe_dir, **options).eval()
    sampling = SamplingParams(12, temperature=0.7, top_k=60, min_p=0.5, ignore_eos=True)
    if refused_without_mask(client, loop, sampling):
        return
    lengths = set()
    for t in loop.call(client.generate(PROMPTS, sampling, samples_per_prompt=3)):
        (logits, settled), kept = response(double, t), inside(t, vocab_size)
        share = torch.softmax(logits / 0.7, -1)
        share /= share.amax(-1, keepdim=True)
        clear = settled & ((share - 0.5).abs() > 1e-5).all(-1)  # no id on the border
        likely = (share >= 0.5) & (logits.argsort(-1, descending=True).argsort(-1) < 60)
        assert clear.any() and (kept == likely)[clear].all()
        expected = torch.log_softmax((logits / 0.7).masked_fill(~kept, -torch.inf), -1)
        expected = expected.gather(1, t.output_ids[:, None])[:, 0]
        torch.testing.assert_close(t.rollout_logprobs.double()[settled], expected[settled], atol=1e-5, rtol=0)
        lengths |= set(t.support.lengths.tolist())
    assert len(lengths) > 5 and max(lengths) < 60  # min_p decides, not top_k


@pytest.mark.parametrize("ignore_eos", [False, *in_matrix(True)])
def test_generate_when_a_stop_text_is_sampled_then_its_ids_end_the_response_and_have_logprobs(
    client, loop, model, tiny_moe_dir, ignore_eos
):
    decode = Tokenizer.from_folder(tiny_moe_dir).decode_all
    # All texts of two digits beginning with 3, 4 or 7, and the end-of-sequence token's own text.
    stop = tuple(f"{a}{b}" for a in "347" for b in range(10)) + ("<eos>",)
    sampling = SamplingParams(200, stop=stop, ignore_eos=ignore_eos)
    stopped = 0
    for t in loop.call(client.generate(PROMPTS, sampling, samples_per_prompt=32)):
        text, before = decode(t.output_ids.tolist()), decode(t.output_ids[:-1].tolist())
        assert not any(one in before for one in stop)
        assert (t.finish_reason == "stop") == any(one in text for one in stop)
        stopped += t.finish_reason == "stop" and not text.endswith("<eos>")
        assert_is_truth(t, model, atol=2e-5)
    # about 17 of 96; end-of-sequence ends the others. Of 48 one run in a thousand had fewer than 2
    assert stopped > 1
    assert client.counts()["missed_stops"] == 0


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"top_k": 5}])
def test_answer_when_it_comes_from_the_server_then_its_logprobs_are_read_flat(client, loop, options):
    async def ask():
        transport = HTTPTransport(timeout_s=60, connect_timeout_s=10)
        try:
            request = generate_request(PROMPTS[0], SamplingParams(12, ignore_eos=True, **options), seed=0)
            return (await transport.send(client.base_urls[0], request))[1]
        finally:
            await transport.close()

    body = loop.call(ask())
    # None if the server writes JSON in another form, which is read more slowly
    answer, _, logprobs = read_flat(body)
    rows = json.loads(body)["meta_info"]["output_token_logprobs"]
    assert logprobs.tolist() == [row[0] for row in rows] and answer["output_ids"] == [row[1] for row in rows]


def test_generate_when_greedy_then_likeliest_tokens_with_logprobs_of_temperature_1(client, loop, model):
    (trajectory,) = loop.call(client.generate(PROMPTS[:1], SamplingParams(8, temperature=0, ignore_eos=True)))
    assert trajectory.output_ids.tolist() == response(model, trajectory)[0].argmax(-1).tolist()
    assert_is_truth(trajectory, model, atol=2e-5)


def test_generate_when_a_stop_id_is_sampled_then_it_is_the_last_token_and_has_a_logprob(
    client, loop, model, vocab_size
):
    half = tuple(range(vocab_size // 2))
    trajectories = loop.call(
        client.generate(PROMPTS, SamplingParams(64, stop_token_ids=half), samples_per_prompt=4)
    )
    stopped = [t for t in trajectories if t.finish_reason == "stop"]
    assert len(stopped) > 6  # each token stops with a probability of about a half
    eos = model.config.eos_token_id
    for t in stopped:
        *before, last = t.output_ids.tolist()
        assert (last in half or last == eos) and not set(before) & {*half, eos}
        assert_is_truth(t, model, atol=2e-5)


def test_generate_when_more_samples_than_slots_then_all_of_them_in_order(engine, url, vocab_size):
    async def scenario():
        progress = []
        narrow = RolloutClient([url], engine=engine, vocab_size=vocab_size, max_concurrency=3)
        async with narrow as client:
            trajectories = await client.generate(
                PROMPTS,
                SamplingParams(4, ignore_eos=True),
                samples_per_prompt=10,
                on_progress=lambda done, total, tokens_per_s: progress.append(done),
            )
        assert progress == list(range(1, 31))
        assert [t.prompt_ids.tolist() for t in trajectories] == [p for p in PROMPTS for _ in range(10)]

    asyncio.run(scenario())


def test_generate_when_the_prompt_does_not_fit_then_error_names_it_and_the_server_goes_on(
    client, loop, engine
):
    with pytest.raises(SampleFailure) as error:
        loop.call(client.generate([[1], [2] * 5000], SamplingParams(4)))
    assert error.value.cause == "refused" and error.value.__cause__.status == 400
    assert {"sglang": "context length", "vllm": "maximum model length"}[engine] in str(error.value)
    assert error.value.__notes__ == ["it was sample 0 of prompt 1 (5000 tokens)"]
    assert len(loop.call(client.generate([[1]], SamplingParams(1)))) == 1


def test_generate_when_the_response_does_not_fit_then_refused_and_not_silently_shorter(client, loop):
    with pytest.raises(SampleFailure) as error:
        loop.call(client.generate([[1] * 500], SamplingParams(100, ignore_eos=True)))
    assert error.value.cause == "refused" and "context length" in str(error.value)
    assert client.counts()["left_out"] == 0


def test_generate_when_cancelled_then_the_server_becomes_idle(client, loop, wait_until_sampling):
    long = SamplingParams(400, ignore_eos=True)
    future = loop.submit(client.generate([[1, 2, 3]], long, samples_per_prompt=200))
    wait_until_sampling(client.base_urls[0])
    future.cancel()
    started = time.monotonic()  # of 200 samples, the 64 that were sent would take longer than this waits
    while True:
        try:
            loop.call(client.flush_cache())  # refused while anything runs
            break
        except RolloutServerError:
            assert time.monotonic() - started < 10
            time.sleep(0.2)


def test_pause_when_aborting_then_running_and_queued_samples_return_what_they_have(
    client, loop, model, wait_until_sampling
):
    long = SamplingParams(400, ignore_eos=True)
    future = loop.submit(client.generate([[1, 2, 3]], long, samples_per_prompt=60))
    # one that came after the pause would wait for its end
    wait_until_sampling(client.base_urls[0], requests=60)
    try:
        loop.call(client.pause_generation("abort"))
        trajectories = future.result(30)
    finally:
        loop.call(client.continue_generation())
    assert {t.finish_reason for t in trajectories} == {"abort"}
    lengths = [t.output_ids.numel() for t in trajectories]
    assert max(lengths) > 0 and min(lengths) == 0  # more samples than the server runs at a time
    assert all(t.weight_versions[-1].end == t.output_ids.numel() for t in trajectories)
    longest = max(trajectories, key=lambda t: t.output_ids.numel())
    assert_is_truth(longest, model, atol=2e-5)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_when_not_aborting_then_samples_wait_and_end_after_continue(
    client, loop, model, mode, wait_until_sampling
):
    long = SamplingParams(300, ignore_eos=True)
    future = loop.submit(client.generate([[1, 2, 3]], long, samples_per_prompt=4))
    wait_until_sampling(client.base_urls[0])
    try:
        loop.call(client.pause_generation(mode))
        later = loop.submit(client.generate([[5]], SamplingParams(1)))
        time.sleep(1.0)
        assert not future.done() and not later.done()
        # control is answered during a pause
        assert loop.call(client.model_info()) and loop.call(client.server_info())
    finally:
        loop.call(client.continue_generation())
    trajectories = future.result(60)
    assert [t.finish_reason for t in trajectories] == ["length"] * 4 and len(later.result(60)) == 1
    for t in trajectories:
        assert_is_truth(t, model, atol=2e-5)


@pytest.mark.parametrize("mode, samples", [("abort", 60), ("retract", 12)])
def test_pause_when_truncated_then_every_token_so_far_keeps_its_support(
    client, loop, model, mode, samples, wait_until_sampling
):
    long = SamplingParams(300, top_p=0.9, top_k=20, ignore_eos=True)
    if refused_without_mask(client, loop, long):
        return
    future = loop.submit(client.generate([[1, 2, 3]], long, samples_per_prompt=samples))
    wait_until_sampling(client.base_urls[0])
    try:
        loop.call(client.pause_generation(mode))
    finally:
        loop.call(client.continue_generation())
    trajectories = future.result(120)
    lengths = [t.output_ids.numel() for t in trajectories]
    if mode == "abort":
        assert max(lengths) > 0 and min(lengths) == 0  # more samples than the server runs at a time
    else:
        assert lengths == [300] * samples
    longest = max(trajectories, key=lambda t: t.output_ids.numel())
    assert_is_truth(longest, model, atol=2e-5)


def test_weight_version_when_renamed_then_samples_and_model_info_carry_the_name(client, loop):
    (before,) = loop.call(client.model_info())
    try:
        loop.call(client.update_weight_version("renamed"))
        assert loop.call(client.model_info())[0]["weight_version"] == "renamed"
        (trajectory,) = loop.call(client.generate([[1]], SamplingParams(2, ignore_eos=True)))
        assert trajectory.oldest_version == "renamed"
    finally:
        loop.call(client.update_weight_version(before["weight_version"]))


def test_server_info_when_asked_then_holds_the_version(client, loop):
    (info,) = loop.call(client.server_info())
    engine = client.engine_of(client.base_urls[0])
    support = engine.version_support(info)
    assert support.version.count(".") >= 2 and not support.lacks
    # What the bound of a run's first step is chosen by.
    assert engine.dtype(info) == "float32" and not engine.is_quantized(info)
    assert first_step_bound(True, [engine], [info]) == 1e-4
