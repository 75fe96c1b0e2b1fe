"""benchmarks/engines.py on the tests' servers: what it measures of both engines, and what its tables say."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import engines
from benchmarks.engine_measures import Served, Truth, distances
from benchmarks.engine_tables import tables
from megatron_rl_corr.rollout import RolloutClient

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def served(sglang_server_fp32, vllm_server_fp32, tiny_moe_dir):
    """Both servers; afterwards their weights have the name that they were started with."""
    servers = {"sglang": sglang_server_fp32, "vllm": vllm_server_fp32}
    made = [Served(name, server.url, engines.vocab_size_of(tiny_moe_dir)) for name, server in servers.items()]
    yield made
    for one in made:
        one.loop.call(rename(one))
        one.loop.close()


async def rename(one):
    async with RolloutClient([one.url], vocab_size=one.vocab_size, engine=one.engine) as client:
        await client.update_weight_version("default")


@pytest.fixture
def models(tiny_moe_dir, tmp_path):
    """The servers' model and another one of its shape."""
    other = shutil.copytree(tiny_moe_dir, tmp_path / "other")
    weights = {
        name: torch.roll(tensor, 1, -1) for name, tensor in load_file(other / "model.safetensors").items()
    }
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return [tiny_moe_dir, other]


def test_measure_when_both_engines_serve_then_exact_log_probs_speeds_and_pushes_that_the_probe_shows(
    served, models, tmp_path
):
    found = {"distance": [], "speed": [], "push": []}
    engines.measure(
        found,
        served,
        models,
        "float32",
        tmp_path,
        repeats=1,
        tokens=6,
        concurrencies=(2,),
        texts=4,
        transports=("tensor",),
    )
    assert [(row["engine"], row["what"]) for row in found["distance"]] == [
        (engine, what)
        for engine in ("sglang", "vllm")
        for what in ("sampled at temperature 1", "scored", "sampled at temperature 0.7")
    ]
    assert all(0 <= row["mean"] <= row["max"] < 2e-5 for row in found["distance"])
    assert all(row["tokens"] + row["left_out"] == 24 and row["tokens"] > 12 for row in found["distance"])
    [speed] = found["speed"]
    assert speed["concurrency"] == 2 and min(*speed["sglang"], *speed["vllm"]) > 0
    assert [(row["transport"], row["engine"]) for row in found["push"]] == [
        ("tensor", "sglang"),
        ("tensor", "vllm"),
    ]
    assert all(
        row["probe_max"][0] < 2e-5 and row["seconds"][0] > row["verify_s"][0] > 0 for row in found["push"]
    )


def test_distance_when_the_server_has_another_model_then_it_is_large(served, models):
    found = distances(served[1], Truth(models[1]), count=2, tokens=4)
    assert all(one["max"] > 1e-2 for one in found.values())


def test_tables_then_they_have_the_medians_and_the_median_of_the_ratios():
    push = {
        "transport": "disk",
        "seconds": [2.0, 1.0, 4.0],
        "verify_s": [0.5],
        "probe_s": [0.02],
        "probe_max": [2e-7],
    }
    distance = {"dtype": "float32", "what": "scored", "mean": 1e-7, "max": 5e-7}
    found = json.loads((ROOT / "benchmarks/engines.json").read_text()) | {
        "distance": [distance | {"engine": engine} for engine in ("sglang", "vllm")],
        "speed": [
            {"dtype": "float32", "concurrency": 16, "sglang": [100, 200, 400], "vllm": [300, 200, 800]}
        ],
        "push": [push | {"engine": "vllm"}],
    }
    found["model"]["bytes"] = 30_000_000
    lines = tables(found)
    assert "| float32 | scored | 1.0e-07, 5.0e-07 | 1.0e-07, 5.0e-07 |" in lines
    assert "| float32 | 16 | 200 | 300 | 2.00 |" in lines  # ratios 3, 1, 2
    assert "| `disk` | vLLM | 30 | 2.00 | 15 | 0.50 | 20 | 2.0e-07 |" in lines
