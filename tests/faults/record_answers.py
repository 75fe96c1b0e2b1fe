"""Records answers of real servers in tests/faults/answers, for test_answers.py to mutate.

pytest tests/faults/record_answers.py; the file's name keeps it out of every other run.
"""

import json
import re
import tempfile
from pathlib import Path

import aiohttp
import pytest

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout import LoopThread

FOLDER = Path(__file__).parent / "answers"
PROMPT = [3, 1, 4, 1, 5]
SAMPLES = {
    "plain": SamplingParams(6, top_k=-1, ignore_eos=True),
    "mask": SamplingParams(6, top_k=8, top_p=0.95, ignore_eos=True),
}


async def asked(url, requests):
    """{name: text of the body} of a server's answers."""
    bodies = {}
    async with aiohttp.ClientSession() as session:
        for name, request in requests.items():
            async with session.request(request.method, url + request.endpoint, json=request.json) as response:
                assert response.status == 200, (name, await response.text())
                bodies[name] = {"endpoint": request.endpoint, "body": await response.text()}
    return bodies


def samples(engine, names, **options):
    return {name: engine.generate(PROMPT, SAMPLES[name], name, seed=7, **options) for name in names}


@pytest.fixture
def record():
    with LoopThread() as loop:
        yield lambda url, requests: loop.call(asked(url, requests))


def write(name, answers):
    """Keeps no folder of this machine: /tmp/pytest-of-me/pytest-0/tiny_moe0 becomes /tmp/tiny_moe0."""
    folders = re.compile(re.escape(tempfile.gettempdir()) + r"/(?:[\w.-]+/)*")
    text = folders.sub("/tmp/", json.dumps(answers, indent=1))
    (FOLDER / f"{name}.json").write_text(text + "\n")


def test_sglang(keeping_server, record):
    engine, url = load_engine("sglang"), keeping_server.url
    control = {
        "server_info": engine.server_info(),
        "model_info": engine.model_info(),
        "list_models": engine.list_models(),
        "weights_checker": engine.weights_checker(),
        "loads": load_loads(),
        "tokenize": engine.tokenize("a b"),
        "score": engine.score(PROMPT, [7, 9], likeliest=2),
        "detailed_sample": engine.detailed_sample(PROMPT, SAMPLES["mask"], likeliest=2, sampling_mask=True),
    }
    try:
        found = record(url, control)
    except AssertionError:  # the server has no tokenizer
        del control["tokenize"]
        found = record(url, control)
    found |= record(url, samples(engine, SAMPLES))
    found |= {"routes": record(url, samples(engine, ["plain"], routed_experts=True))["plain"]}
    write("sglang", found)


def load_loads():
    from megatron_rl_corr.engines.sglang.requests import loads

    return loads()


def test_vllm(vllm_server_fp32, vllm_v2_server_fp32, record):
    from megatron_rl_corr.engines.vllm.requests import is_paused, metrics

    engine = load_engine("vllm")
    control = {
        "server_info": engine.server_info(),
        "model_info": engine.model_info(),
        "list_models": engine.list_models(),
        "weights_checker": engine.weights_checker(),
        "is_paused": is_paused(),
        "metrics": metrics(),
        "score": engine.score(PROMPT, [7, 9], likeliest=2),
        "detailed_sample": engine.detailed_sample(PROMPT, SAMPLES["plain"], likeliest=2),
    }
    begun = {"begin": engine.begin_weight_update()}
    record(vllm_server_fp32.url, begun)
    found = record(vllm_server_fp32.url, control) | record(vllm_server_fp32.url, samples(engine, ["plain"]))
    both = record(vllm_v2_server_fp32.url, samples(engine, ["mask"], routed_experts=True))
    write("vllm", found | {"mask": both["mask"], "routes": both["mask"]})
