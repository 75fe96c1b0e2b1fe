"""Planted wrong layouts of weights: `megatron-rl-corr accept` refuses each, and its page names the part."""

import importlib.util
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.matrix.accepted import accept, made_model, server_of
from tests.tiers import long
from tools.cpu import gpu_available

pytestmark = [
    long,
    pytest.mark.skipif(gpu_available(), reason="without a GPU only"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
SCRIPT = Path(__file__).with_name("planted_layout.py")
TRAINER, PUSH = "both", "push"
"""Loaded wrongly and sent by the inverse, so that servers are right; loaded rightly and sent wrongly."""
CASES = [
    ("qwen3 tied", "gate_up", TRAINER, None, "as if servers had gate and up exchanged"),
    ("qwen3 tied", "gate_up", TRAINER, 2, "as if servers had gate and up exchanged in layer 2"),
    (
        "qwen3 tied",
        "heads",
        TRAINER,
        None,
        "as if servers had query heads by groups, not dealt to them in turn",
    ),
    ("qwen3 tied", "heads", TRAINER, 1, "query heads by groups, not dealt to them in turn in layer 1"),
    ("qwen3 tied", "mixed_heads", TRAINER, 1, "something else in the place of queries or keys in layer 1"),
    ("qwen3 tied", "keys_values", TRAINER, None, "as if servers had keys and values exchanged"),
    ("qwen3 tied", "qk_norms", TRAINER, None, "as if servers had norms of queries and keys exchanged"),
    ("qwen3 tied", "gate_up", PUSH, None, "model.layers.0.mlp.gate_up_proj.weight"),
    ("qwen3 tied", "heads", PUSH, 3, "1 of 34: model.layers.3.self_attn.qkv_proj.weight"),
    ("qwen3 tied", "qk_norms", PUSH, None, "model.layers.0.self_attn.k_norm.weight"),
    ("qwen2", "qkv_bias", TRAINER, None, "model.layers.0.self_attn.qkv_proj.bias"),
    ("qwen2", "qkv_bias", PUSH, None, "as if servers had no bias of queries, keys and values"),
    ("qwen2_moe sparse", "gate_up", TRAINER, None, "as if servers had gate and up exchanged"),
    ("qwen2_moe sparse", "shared_gate", TRAINER, None, "model.layers.0.mlp.shared_expert_gate.weight"),
    ("qwen2_moe sparse", "gate_ignored", TRAINER, None, "as without its gate of shared experts"),
    ("gpt_oss", "gate_up_turns", TRAINER, None, "gate and up one behind the other, not in turns"),
    ("gpt_oss", "sinks", TRAINER, None, "model.layers.0.self_attn.sinks"),
    ("deepseek_v3", "gate_up", TRAINER, None, "as if servers had gate and up exchanged"),
    ("qwen3_5_text", "query_gates", TRAINER, None, "queries and gates of the output exchanged"),
    ("qwen3_5_text", "delta_steps", TRAINER, None, "steps and decays of delta nets exchanged"),
    ("qwen3_5_text", "delta_steps", PUSH, None, "model.layers.0.linear_attn.in_proj_ba.weight"),
]
GATE_UP = "as if servers had gate and up exchanged"
DEALT = "query heads by groups, not dealt to them in turn"
QUERY_GATES = "queries and gates of the output exchanged"
NO_BIAS = "model.layers.0.self_attn.qkv_proj.bias"
IN_LAYER_1 = "something else in the place of queries or keys in layer 1"
CASES += [
    (name, what, TRAINER, None, words)
    for name, what, words in (
        ("llama", "gate_up", GATE_UP),
        ("llama", "heads", DEALT),
        ("mixtral", "gate_up", GATE_UP),
        ("mixtral", "heads", DEALT),
        ("qwen2", "gate_up", GATE_UP),
        ("qwen2", "heads", DEALT),
        ("qwen2_moe sparse", "heads", DEALT),
        ("qwen2_moe sparse", "qkv_bias", NO_BIAS),
        ("qwen3_moe", "gate_up", GATE_UP),
        ("qwen3_moe", "heads", DEALT),
        ("glm4_moe", "gate_up", GATE_UP),
        ("glm4_moe", "heads", DEALT),
        ("glm4_moe", "qkv_bias", NO_BIAS),
        ("gpt_oss", "heads", DEALT),
        ("gpt_oss", "qkv_bias", NO_BIAS),
        ("kimi_k2", "gate_up", GATE_UP),
        ("glm4_moe_lite", "gate_up", GATE_UP),
        ("qwen3_next", "gate_up", GATE_UP),
        ("qwen3_next", "query_gates", QUERY_GATES),
        ("qwen3_5_moe", "stacked_gate_up", "as if servers had gate and up of routed experts exchanged"),
        ("qwen3_5_moe", "query_gates", QUERY_GATES),
        ("qwen3_5_moe_text", "gate_up", GATE_UP),
        ("qwen3_5_text", "gate_up", GATE_UP),
    )
]
CASES += [
    (name, "latent_heads", TRAINER, 1, IN_LAYER_1) for name in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")
]
"""Servers have code of their own for each family: gate and up, heads and biases are tried of each."""


@pytest.fixture(scope="module")
def served(tiny_moe_dir, tmp_path_factory):
    """served(family): (its model, a server of it); one runs at a time."""
    with ExitStack() as opened:
        kept = {}

        def of(name):
            if name not in kept:
                opened.close()
                kept.clear()
                folder = tmp_path_factory.mktemp("served")
                model = made_model(name, tiny_moe_dir, folder)
                kept[name] = model, opened.enter_context(server_of(name, model, folder))
            return kept[name]

        yield of


@pytest.mark.parametrize(("name", "what", "where", "layer", "words"), sorted(CASES, key=lambda one: one[0]))
def test_layout_that_is_wrong_then_refused_and_named(
    name, what, where, layer, words, served, tmp_path, monkeypatch
):
    model, server = served(name)
    planted = {"PLANTED": what, "PLANTED_IN": where} | (
        {} if layer is None else {"PLANTED_LAYER": str(layer)}
    )
    many = ["--global-batch-size", 32]  # eight short responses are too few tokens for a verdict
    status, _, page = accept(name, model, server.url, tmp_path, monkeypatch, *many, script=SCRIPT, **planted)
    print(page)
    assert status == 1 and words in page, page
