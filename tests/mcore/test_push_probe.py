"""After a push a real server's log-probs of a text are Megatron's own, in every layout; one wrong
expert is found.
"""

import asyncio
import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.rollout.blocking import LoopThread
from tests import tensor_files
from tests.mcore.server_weights import load
from tests.megatron_forks import run_megatron
from tests.preloaded import PreloadedServer
from tests.tiers import in_matrix, long, matrix
from tools.cpu import environment, sglang_arguments

pytestmark = matrix

HERE = Path(__file__).resolve().parent
LAYOUTS = {
    1: [{}],
    4: [{"tp": 2, "pp": 2, "ep": 2, "sp": True, "packed": 64}, {"cp": 2, "pp": 2, "vpp": 2}],
}
EXPERT = "model.layers.1.mlp.experts.{}.down_proj.weight"


def probed(processes, model_dir, engine_server, folder, specs):
    """Of each layout every rank's results."""
    (engine, server), out = engine_server, folder / "found.pt"
    where = f"{engine}={server.url}"
    run = run_megatron(HERE / "probe_worker.py", processes, model_dir, where, out, *map(json.dumps, specs))
    assert run.returncode == 0 and out.exists(), run.stderr[-4000:]
    return tensor_files.load(out)


@contextmanager
def exchanged_experts(engine, url, model_dir):
    """Within, the server has one expert's weights in another's place."""
    weights = load_file(model_dir / "model.safetensors")
    one, other = EXPERT.format(0), EXPERT.format(1)
    asyncio.run(load(engine, url, weights | {one: weights[other], other: weights[one]}))
    try:
        yield
    finally:
        asyncio.run(load(engine, url, weights))


@pytest.mark.parametrize("engine_server", ["sglang", *in_matrix("vllm")], indirect=True)
@pytest.mark.parametrize("processes", LAYOUTS)
def test_probe_in_every_layout_then_its_logprobs_are_the_servers_and_nothing_is_moved(
    processes, tiny_moe_dir, engine_server, tmp_path
):
    layouts = probed(processes, tiny_moe_dir, engine_server, tmp_path, LAYOUTS[processes])
    for spec, ranks in zip(LAYOUTS[processes], layouts, strict=True):
        numbers, _, logprobs, rounded = ranks[0]
        assert 0 < numbers["rollout/probe_max_abs_log_ratio"] < 1e-5, spec  # measured 1e-6
        assert numbers["rollout/probe_mean_abs_log_ratio"] < 1e-6 and numbers["rollout/probe_k3"] < 1e-11
        assert (
            numbers["rollout/probe_over_rounding"] < 1 and numbers["rollout/probe_decode_over_rounding"] < 4
        )
        # 5 texts, none off
        assert numbers["rollout/probe_rounds"] == 0 and numbers["rollout/probe_bits"] < -4.8
        assert [len(one) for one in logprobs] == [22] * 5  # of 24 - 1 ids
        assert all((one < -1).all() for one in logprobs)
        # Simulated rounding of 16 bits moves every text by about what 16 bits do, by other
        # values in each draw.
        assert all(one.shape == (4, 22) and 2e-4 < one.abs().median() < 2e-2 for one in rounded), spec
        assert all(not torch.equal(one[0], one[1]) for one in rounded)
        for found, moved, own, other in ranks:
            assert found == numbers and not moved, (spec, moved)
            assert all(map(torch.equal, own, logprobs)) and all(map(torch.equal, other, rounded))


@long
@pytest.mark.parametrize("engine_server", ["sglang", *in_matrix("vllm")], indirect=True)
def test_probe_when_rows_are_long_then_its_own_are_as_short_as_its_texts(
    tiny_moe_dir, engine_server, tmp_path
):
    layouts = probed(
        4,
        tiny_moe_dir,
        engine_server,
        tmp_path,
        [
            {"cp": 2, "pp": 2, "vpp": 2, "length": 4096},
            {"tp": 2, "pp": 2, "sp": True, "length": 4096},
        ],
    )
    for [numbers, moved, logprobs, _], *_ in layouts:
        assert 0 < numbers["rollout/probe_max_abs_log_ratio"] < 1e-5 and not moved, (numbers, moved)
        assert [len(one) for one in logprobs] == [191] + [63] * 4


@pytest.mark.parametrize("engine_server", ["sglang", *in_matrix("vllm")], indirect=True)
def test_probe_when_one_experts_weights_are_exchanged_at_the_server_then_it_is_named_and_every_rank_ends(
    tiny_moe_dir, engine_server, tmp_path
):
    specs = [{"ep": 2}, {"ep": 2, "bound": 5.0}]
    engine, server = engine_server
    with exchanged_experts(engine, server.url, tiny_moe_dir):
        (first, second), allowed = probed(2, tiny_moe_dir, engine_server, tmp_path, specs)
    endpoint = load_engine(engine).generate_endpoint
    words = (
        f"rollout server {server.url} broke the protocol of {endpoint}: its weights differ from the "
        "trainer's, "
    )
    assert first[0].startswith(f"RolloutProtocolError: {words}"), first[0]
    # The worker's server has had these weights before the push, too.
    assert "before the first push" in first[0] and "model-flags" in first[0], first[0]
    assert second[0] == "PeerFailure: another rank failed; its message says why"
    assert 1e-3 < allowed[0][0]["rollout/probe_max_abs_log_ratio"] < 5 and allowed[0][0] == allowed[1][0]


@pytest.mark.parametrize("engine_server", ["sglang", *in_matrix("vllm")], indirect=True)
def test_probe_when_the_first_push_exchanges_two_experts_then_found_in_16_bits_too(
    tiny_moe_dir, engine_server, tmp_path
):
    weights = load_file(tiny_moe_dir / "model.safetensors")
    one, other = EXPERT.format(0), EXPERT.format(1)
    save_file(weights | {one: weights[other], other: weights[one]}, tmp_path / "wrong.safetensors")
    sent = {"right": str(tiny_moe_dir / "model.safetensors"), "wrong": str(tmp_path / "wrong.safetensors")}
    specs = [{"half": True, "sent": sent[kind]} for kind in ("right", "wrong")]
    engine, server = engine_server
    try:
        right, wrong = probed(1, tiny_moe_dir, engine_server, tmp_path, specs)
    finally:
        asyncio.run(load(engine, server.url, weights))
    assert right[0][0]["rollout/probe_rounds"] == 0 and right[0][0]["rollout/probe_k3_growth"] < 1e-3
    assert "its weights differ from the trainer's, with" in wrong[0][0], wrong
    assert "before the first push" not in wrong[0][0] and "a tensor wrongly" in wrong[0][0]


class SplitProxy:
    """Asks one server to sample, and another one everything else: what decodes with old weights
    looks like this.
    """

    def __init__(self, samples, scores):
        self._samples, self._scores, self.url = samples, scores, ""

    async def answer(self, request):
        body = await request.read()
        samples = request.path == "/generate" and json.loads(body)["sampling_params"]["max_new_tokens"] > 1
        upstream = self._samples if samples else self._scores
        async with aiohttp.ClientSession() as session:
            kind = {"Content-Type": "application/json"}
            async with session.request(
                request.method, upstream + request.path_qs, data=body, headers=kind
            ) as answer:
                return web.Response(
                    status=answer.status, body=await answer.read(), content_type="application/json"
                )


@contextmanager
def split(samples, scores):
    """The address of a SplitProxy on a thread of its own."""
    proxy = SplitProxy(samples, scores)
    with LoopThread() as loop:

        async def start():
            app = web.Application(client_max_size=1 << 26)
            app.router.add_route("*", "/{rest:.*}", proxy.answer)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return runner, site._server.sockets[0].getsockname()[1]

        runner, port = loop.call(start())
        try:
            yield SimpleNamespace(url=f"http://127.0.0.1:{port}")
        finally:
            loop.call(runner.cleanup())


def test_probe_when_a_server_samples_with_other_weights_than_it_scores_with_then_the_decode_path_is_named(
    tiny_moe_dir, sglang_server_fp32, keeping_server, tmp_path
):
    with exchanged_experts("sglang", keeping_server.url, tiny_moe_dir):
        with split(keeping_server.url, sglang_server_fp32.url) as stale_decode:
            [[found]] = probed(1, tiny_moe_dir, ("sglang", stale_decode), tmp_path, [{}])
        with split(sglang_server_fp32.url, keeping_server.url) as stale_scores:
            [[other]] = probed(1, tiny_moe_dir, ("sglang", stale_scores), tmp_path, [{}])
    assert "decode path computes with other weights than its prefill" in found[0], found[0]
    assert "scores of given tokens are wrong and its samples are right" in other[0], other[0]


@long
@pytest.mark.parametrize(("name", "value"), [("rms_norm_eps", 1e-2), *in_matrix(("rope_theta", 100.0))])
def test_probe_when_a_server_computes_with_another_setting_then_it_was_so_before_the_first_push(
    name, value, tiny_moe_dir, tmp_path
):
    other = shutil.copytree(tiny_moe_dir, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    where = config if name in config else config["rope_parameters"]
    assert where[name] != value
    where[name] = value
    (other / "config.json").write_text(json.dumps(config))
    arguments = [*sglang_arguments(), "--random-seed", "0"]
    with PreloadedServer(
        other,
        dtype="float32",
        log_path=tmp_path / "server.log",
        extra_arguments=arguments,
        environment=environment("sglang"),
    ) as server:
        specs = [{}, {"half": True}]
        found = probed(1, tiny_moe_dir, ("sglang", server), tmp_path, specs)
    for spec, [[message, *_]] in zip(specs, found, strict=True):
        assert "before the first push" in message and "model-flags" in message, (spec, message)


@pytest.mark.parametrize("engine_server", ["sglang", *in_matrix("vllm")], indirect=True)
@pytest.mark.parametrize(
    "stale", ["layers.2.mlp.gate.", *in_matrix("layers.1.", "layers.0.self_attn.k_proj.")]
)
def test_probe_when_a_push_leaves_tensors_as_they_were_then_the_server_is_named(
    stale, tiny_moe_dir, engine_server, tmp_path
):
    """The server has other weights before the push, and the push brings the trainer's, but for these."""
    weights, (engine, server) = load_file(tiny_moe_dir / "model.safetensors"), engine_server
    generator = torch.Generator().manual_seed(3)
    old = {
        name: w + 0.05 * w.std() * torch.randn(w.shape, generator=generator) for name, w in weights.items()
    }
    save_file(
        {name: (old if stale in name else weights)[name] for name in weights}, tmp_path / "sent.safetensors"
    )
    asyncio.run(load(engine, server.url, old))
    try:
        [[found]] = probed(
            1, tiny_moe_dir, engine_server, tmp_path, [{"sent": str(tmp_path / "sent.safetensors")}]
        )
    finally:
        asyncio.run(load(engine, server.url, weights))
    assert "its weights differ from the trainer's, with" in found[0], found
