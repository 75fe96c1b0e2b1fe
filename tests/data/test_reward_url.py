"""Rewards from an address: a real server on a loop of its own, in good health and with every
fault that we know.
"""

import asyncio
import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web

from megatron_rl_corr.config.reward_specs import parse_rewards
from megatron_rl_corr.data import reward_url
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.rewards import Rewards
from megatron_rl_corr.engines.errors import SampleFailure
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.rollout.blocking import LoopThread
from tools.local_server import free_port

PROMPT = Prompt(5, [1, 2], {"kind": "x"}, "two", label=7)
TOKENIZER = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))


def sample(*ids):
    return Trajectory(
        0,
        0,
        torch.tensor([1, 2]),
        torch.tensor(ids),
        torch.zeros(len(ids)),
        "stop",
        (VersionSpan("v", 0, len(ids)),),
        0,
        "http://a:1",
    )


class Server:
    """Answers each sample with its first id; /fault/N fails in the way that it is called."""

    def __init__(self):
        self.batches, self.failures = [], 0

    async def answer(self, request):
        samples = json.loads(await request.read())["samples"]
        fault = request.match_info.get("fault")
        values = [one["output_ids"][0] for one in samples]
        if not samples:
            locked = fault == "key" and "Authorization" not in request.headers
            return web.json_response([], status=401 if locked else 200)
        self.batches.append(samples)
        if fault == "flaky" and self.failures:
            self.failures -= 1
            return web.Response(status=500, text="out of memory")
        found = {
            "short": values[1:],
            "dict": {"rewards": values},
            "nan": [*values[1:], float("nan")],
            "null": [None, *values[1:]],
            "large": ["x" * (1 << 20)] * 8,
            "parts": [{"score": one / 2, "judge": one} for one in values],
        }.get(fault, values)
        if fault == "slow":
            await asyncio.sleep(30)
        if fault == "deep":
            return web.Response(text="[" * 100_000 + "]" * 100_000)
        if fault == "html":
            return web.Response(text="<html>busy</html>")
        if fault == "moved":
            raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/elsewhere")
        if fault in ("teapot", "key"):
            return web.Response(status=418, text=f"no {request.headers.get('Authorization')}")
        if fault == "packed":
            assert request.headers["Accept-Encoding"] == "identity"
            return web.Response(
                body=gzip.compress(json.dumps(found).encode()), headers={"Content-Encoding": "gzip"}
            )
        if fault in ("quotes", "babbles"):
            key = request.headers["Authorization"]
            text = json.dumps({"key": key, "query": request.query_string})
            return web.Response(text=text if fault == "quotes" else f"{key} {request.query_string}")
        return web.json_response(found)


@pytest.fixture(scope="module")
def server():
    found, port = Server(), free_port()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/reward", found.answer)
    app.router.add_post("/{fault}", found.answer)
    runner = web.AppRunner(app)

    async def begin():
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, shutdown_timeout=0.1).start()

    with LoopThread("reward-server") as loop:
        loop.call(begin())
        found.url = f"http://127.0.0.1:{port}"
        yield found
        loop.call(runner.cleanup())


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    # attempts follow after 0.05 s, 0.55 s
    monkeypatch.setattr(reward_url.random, "uniform", lambda low, high: -0.45)


def run(url, scenario, *, functions=(), weights=(), **options):
    async def inner():
        specs = parse_rewards(functions, [url], weights, max_new_tokens=4)
        rewards = Rewards(
            specs, workers=0, **({"limit_s": 5.0, "tokenizer": TOKENIZER, "url_batch": 3} | options)
        )
        try:
            await rewards.start()
            return await asyncio.wait_for(scenario(rewards), 30)
        finally:
            await rewards.close()

    return asyncio.run(inner())


async def scored(rewards, count=2):
    """The rewards or failures of `count` samples that end at the same time."""
    calls = [rewards.of_sample(PROMPT, sample(n + 1, 9)) for n in range(count)]
    return [
        (one.cause, str(one)) if isinstance(one, SampleFailure) else one.reward
        for one in await asyncio.gather(*calls, return_exceptions=True)
    ]


def test_samples_when_posted_then_in_batches_with_text_and_added_to_other_rewards(server):
    server.batches.clear()

    async def scenario(rewards):
        # 0.5 x the first id, less 2 of max 4 tokens
        assert await scored(rewards, 7) == [0.5 * (n + 1) - 0.5 for n in range(7)]

    run(f"judge={server.url}/reward", scenario, functions=["length"], weights=[1, 0.5])
    assert sorted(len(batch) for batch in server.batches) == [1, 3, 3]  # they may arrive in any order
    [first] = [sample for batch in server.batches for sample in batch if sample["response"] == "1 9"]
    assert first == {
        "prompt": "two",
        "response": "1 9",
        "label": 7,
        "metadata": {"kind": "x"},
        "prompt_ids": [1, 2],
        "output_ids": [1, 9],
        "finish_reason": "stop",
        "row": 5,
    }


def test_sample_when_its_label_has_more_than_64_bits_then_the_server_gets_every_digit(server):
    server.batches.clear()
    prompt = Prompt(5, [1, 2], {"seed": -(10**25) - 9}, "two", label=2**64 + 1)

    async def scenario(rewards):
        assert (await rewards.of_sample(prompt, sample(3))).reward == 3

    run(f"{server.url}/reward", scenario)
    [[sent]] = server.batches
    assert (sent["label"], sent["metadata"]) == (18446744073709551617, {"seed": -(10**25) - 9})


def test_server_when_it_fails_twice_then_asked_again_and_dicts_are_parts(server, told):
    server.batches.clear()
    server.failures = 2

    async def scenario(rewards):
        assert await scored(rewards) == [1, 2]

    async def parts(rewards):
        score = await rewards.of_sample(PROMPT, sample(3))
        assert (score.reward, score.parts) == (1.5, {"url": 1.5, "url/judge": 3.0})

    run(f"{server.url}/flaky?key=s3cretkey", scenario)
    assert len(server.batches) == 3
    text = f"`reward_url` {server.url}/flaky: it answered HTTP 500: out of memory"
    assert told == [("reward_retried", {"reason": text, "samples": 2})] * 2
    run(f"{server.url}/parts", parts)


FAULTS = {
    "flaky": "it answered HTTP 500: out of memory, 2 times; see its server's log",
    "short": "it must answer a list of 2 rewards, one for each sample, got 1",
    "dict": "it must answer a list of 2 rewards, one for each sample, got",
    "html": "its answer is no JSON (Expecting value: line 1 column 1 (char 0)): <html>busy</html>",
    "deep": "its answer is no JSON (maximum recursion depth exceeded",
    "large": "its answer has more than the 4194304 bytes that an answer to this request can have; it must be "
    "a list",
    "packed": "its answer is compressed (gzip), which it was asked not to do: how long is it?; it must be a "
    "list of",
    "quotes": "it must answer a list of 2 rewards, one for each sample, got \"{'key': 'Bearer ***', 'query': "
    "'***'}\"",
    "babbles": "its answer is no JSON (Expecting value: line 1 column 1 (char 0)): Bearer *** ***",
    "moved": "it answered HTTP 307: 307: Temporary Redirect; a redirect is not followed: give the address "
    "that it",
    "teapot": "it answered HTTP 418: no Bearer ***; see its server's log",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_batch_when_its_answer_is_wrong_then_all_its_samples_fail_and_the_next_batch_does_not(
    server, fault, monkeypatch
):
    monkeypatch.setattr(reward_url, "RETRIES", 1)
    server.failures = 2

    async def scenario(rewards):
        found = await scored(rewards)
        assert [cause for cause, _ in found] == ["reward_error"] * 2
        assert found[0][1].startswith(f"`reward_url` {server.url}/{fault}: {FAULTS[fault]}")
        if fault == "flaky":
            assert await scored(rewards) == [1, 2]

    run(f"{server.url}/{fault}?token=secret", scenario, api_key="s3cret")


@pytest.mark.parametrize(
    "fault, expected", [("nan", "finite in float32, got nan"), ("null", "a number, got None")]
)
def test_value_when_one_is_no_number_then_its_sample_fails_alone(server, fault, expected):
    async def scenario(rewards):
        found = await scored(rewards)
        [(cause, text)], [value] = [x for x in found if isinstance(x, tuple)], [x for x in found if x == 2]
        assert cause == "reward_error" and expected in text and value == 2

    run(f"{server.url}/{fault}", scenario)


def test_server_when_it_is_slow_then_reward_timeout_and_the_loop_goes_on(server):
    async def scenario(rewards):
        call = asyncio.create_task(scored(rewards))
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert not call.done()  # the loop went round ten times meanwhile
        text = (
            f"`reward_url` {server.url}/slow: no answer within 2 s; make it faster, or raise "
            "`reward_timeout_s`"
        )
        assert await call == [("reward_timeout", text)] * 2

    run(f"{server.url}/slow", scenario, limit_s=2.0)


def test_group_when_given_up_before_its_batch_is_sent_then_its_sample_is_left_out(server):
    server.batches.clear()

    async def scenario(rewards):
        given_up = asyncio.create_task(rewards.of_sample(PROMPT, sample(8)))
        await asyncio.sleep(0.02)
        given_up.cancel()
        assert await scored(rewards, 1) == [1]

    run(f"{server.url}/reward", scenario)
    assert [one["output_ids"] for batch in server.batches for one in batch] == [[1, 9]]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (
            "",
            "it does not answer: Cannot connect to host 127.0.0.1:1 .*; start its server first, or give its "
            "right",
        ),
        ("/a/b", "answered HTTP 404: 404: Not Found; is the path right, and does it take POST"),
        ("/key", "answered HTTP 401: .*; give the key that it wants in an environment variable with"),
    ],
)
def test_start_when_nobody_answers_or_lets_us_in_then_flag_value_and_remedy(server, path, told):
    url = f"{server.url}{path}" if path else "http://127.0.0.1:1/reward"
    with pytest.raises(ValueError, match=f"^`reward_url` {url}.*{told}"):
        run(url, None)
