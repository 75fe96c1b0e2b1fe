"""After a push a real server's log-probs of a text are Megatron's own, in every layout; one wrong expert is found."""

import asyncio
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl_corr.rollout import RolloutClient
from tests.megatron_forks import run_megatron

HERE = Path(__file__).resolve().parent
LAYOUTS = {
    1: [{}],
    4: [{"tp": 2, "pp": 2, "ep": 2, "sp": True, "packed": 64}, {"cp": 2, "pp": 2, "vpp": 2}],
}
EXPERT = "model.layers.1.mlp.experts.{}.down_proj.weight"


def probed(processes, model_dir, server, folder, specs):
    """Of each layout every rank's results."""
    out = folder / "found.pt"
    run = run_megatron(HERE / "probe_worker.py", processes, model_dir, server.url, out, *map(json.dumps, specs))
    assert run.returncode == 0 and out.exists(), run.stderr[-4000:]
    return torch.load(out, weights_only=False)


async def load(url, tensors):
    """Put tensors into a server, without a new name for its weights."""
    async with RolloutClient([url], vocab_size=83) as client:
        await client.pause_generation("retract")
        await client.reopen_weight_update()
        await client.update_weights_from_tensor([[client.engine_of(url).serialized(list(tensors.items()))]])
        await client.end_weight_update()
        await client.flush_cache()
        await client.continue_generation()


@contextmanager
def exchanged_experts(url, model_dir):
    """Within, the server has one expert's weights in another's place."""
    weights = load_file(model_dir / "model.safetensors")
    right = {EXPERT.format(i): weights[EXPERT.format(i)] for i in (0, 1)}
    asyncio.run(load(url, {EXPERT.format(0): right[EXPERT.format(1)], EXPERT.format(1): right[EXPERT.format(0)]}))
    try:
        yield
    finally:
        asyncio.run(load(url, right))


@pytest.mark.parametrize("processes", LAYOUTS)
def test_probe_in_every_layout_then_its_logprobs_are_the_servers_and_nothing_is_moved(
    processes, tiny_moe_dir, sglang_server_fp32, tmp_path
):
    layouts = probed(processes, tiny_moe_dir, sglang_server_fp32, tmp_path, LAYOUTS[processes])
    for spec, ranks in zip(LAYOUTS[processes], layouts, strict=True):
        numbers, _, logprobs = ranks[0]
        assert 0 < numbers["rollout/probe_max_abs_log_ratio"] < 1e-5, spec  # measured 1e-6
        assert numbers["rollout/probe_mean_abs_log_ratio"] < 1e-6 and numbers["rollout/probe_k3"] < 1e-11
        assert (logprobs < -1).all() and len(logprobs) == 23
        for found, moved, own in ranks:
            assert found == numbers and not moved, (spec, moved)
            assert torch.equal(own, logprobs)


def test_probe_when_one_experts_weights_are_exchanged_at_the_server_then_it_is_named_and_every_rank_ends(
    tiny_moe_dir, sglang_server_fp32, tmp_path
):
    specs = [{"ep": 2}, {"ep": 2, "bound": 5.0}]
    with exchanged_experts(sglang_server_fp32.url, tiny_moe_dir):
        (first, second), allowed = probed(2, tiny_moe_dir, sglang_server_fp32, tmp_path, specs)
    url = sglang_server_fp32.url
    words = f"rollout server {url} broke the protocol of /generate: its weights differ from the trainer's: "
    assert first[0].startswith(f"RolloutProtocolError: {words}"), first[0]
    assert "max |log-ratio| may be 0.0001, as both compute in float32. All 1 servers differ" in first[0], first[0]
    assert second[0] == "PeerFailure: another rank failed; its message says why"
    assert 1e-3 < allowed[0][0]["rollout/probe_max_abs_log_ratio"] < 5 and allowed[0][0] == allowed[1][0]
