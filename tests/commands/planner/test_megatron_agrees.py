"""The planner beside Megatron's own estimates, `megatron.training.theoretical_memory_usage`, of parsed flags.

Weights, gradients and optimizer can be compared for every model and layout but for context parallelism:
Megatron divides the optimizer by the data-parallel size, and its distributed optimizer by data x context
parallel. Its activations are those of GPT-3's layer (dropout, as many key heads as query heads, an MLP
without gate, no experts), so they are compared after the terms that differ, and not for experts.
"""

import json
from pathlib import Path

import pytest

from megatron_rl_corr.commands.planner.activations import layer_bytes, logits_bytes
from megatron_rl_corr.commands.planner.planned_flags import training_flags
from megatron_rl_corr.commands.planner.train_layout import TrainLayout, Workload
from megatron_rl_corr.commands.planner.training_memory import padded_vocab_size, training_memory
from megatron_rl_corr.models.megatron_flags import model_flags
from tests.commands.planner.published import (
    DEEPSEEK_V3,
    GLM_4_5_AIR,
    KIMI_K2,
    LLAMA_2_7B,
    MIXTRAL_8X7B,
    QWEN1_5_MOE,
    QWEN3_4B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
)
from tests.preloaded import run_preloaded

ROOT = Path(__file__).resolve().parents[3]
WORKLOAD = Workload(global_batch_size=1024)
COMMON = ["--train-iters", "1", "--lr", "1e-6", "--no-gradient-accumulation-fusion"]
CASES = {
    "Qwen3-4B on 1": (QWEN3_4B, TrainLayout(gpus=1)),
    "Qwen3-4B TP 2": (QWEN3_4B, TrainLayout(gpus=4, tensor=2, recompute="selective")),
    "Qwen3-4B PP 4": (QWEN3_4B, TrainLayout(gpus=8, pipeline=4)),
    "Qwen3-4B whole optimizer": (QWEN3_4B, TrainLayout(gpus=8, tensor=2, distributed_optimizer=False)),
    "Qwen3-30B-A3B EP 4": (QWEN3_30B_A3B, TrainLayout(gpus=4, tensor=2, expert=4)),
    "Qwen3-30B-A3B EP 8 PP 2": (QWEN3_30B_A3B, TrainLayout(gpus=32, tensor=2, expert=8, pipeline=2)),
    "Qwen3-30B-A3B ETP 2": (QWEN3_30B_A3B, TrainLayout(gpus=16, tensor=2, expert=4, expert_tensor=2)),
    "Qwen3-235B-A22B EP 16 PP 2": (QWEN3_235B_A22B, TrainLayout(gpus=128, tensor=4, expert=16, pipeline=2)),
    "DeepSeek-V3 EP 64": (DEEPSEEK_V3, TrainLayout(gpus=256, tensor=4, expert=64, recompute="full")),
    "Kimi-K2 EP 64": (KIMI_K2, TrainLayout(gpus=256, tensor=4, expert=64, recompute="full")),
    "GLM-4.5-Air EP 8": (GLM_4_5_AIR, TrainLayout(gpus=32, tensor=4, expert=8)),
    "Mixtral-8x7B EP 8": (MIXTRAL_8X7B, TrainLayout(gpus=32, tensor=2, expert=8)),
    "Qwen1.5-MoE EP 4": (QWEN1_5_MOE, TrainLayout(gpus=8, tensor=2, expert=4)),
    "Llama-2-7B TP 4": (LLAMA_2_7B, TrainLayout(gpus=8, tensor=4, recompute="selective")),
}


@pytest.fixture(scope="module")
def megatron():
    """name -> Megatron's numbers, in bytes."""
    flags = {
        name: [layout.gpus, [*model_flags(config), *training_flags_of_megatron(config, layout), *COMMON]]
        for name, (config, layout) in CASES.items()
    }
    run = run_preloaded([ROOT / "tests/commands/planner/megatron_memory.py", json.dumps(flags)], cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def training_flags_of_megatron(config, layout):
    """Those of the plan without ours."""
    flags = training_flags(config, layout, WORKLOAD)
    return flags[: flags.index("--rollout-group-size")]


@pytest.mark.parametrize("name", CASES)
def test_weights_gradients_and_optimizer_when_megatron_counts_them_then_within_10_percent(megatron, name):
    config, layout = CASES[name]
    assert layout.problems(config, WORKLOAD) == [] and layout.replicas == megatron[name]["replicas"]
    ours = max(stage.state for stage in training_memory(config, layout, WORKLOAD).stages)
    assert ours == pytest.approx(megatron[name]["state"], rel=0.10)
    if name == "Qwen3-30B-A3B EP 4":
        # They differ by norms of queries and keys alone, which Megatron's estimate leaves out.
        assert ours == pytest.approx(megatron[name]["state"], rel=1e-3)
    assert padded_vocab_size(config, layout) == megatron[name]["padded_vocab_size"]


@pytest.mark.parametrize("name", ["Qwen3-4B TP 2", "Llama-2-7B TP 4"])
def test_activations_of_a_dense_model_when_what_megatron_assumes_is_exchanged_then_the_same(megatron, name):
    config, layout = CASES[name]
    tokens, hidden, width = WORKLOAD.seq_length, config["hidden_size"], config["intermediate_size"]
    heads, groups, t = config["num_attention_heads"], config["num_key_value_heads"], layout.tensor
    size = config.get("head_dim") or hidden // heads
    query, key = heads * size, groups * size
    layer = 18 * hidden + 4 * width  # as compute_activation_memory has it
    layer -= 2 * hidden  # masks of two dropouts, one byte each
    layer += 2 * width  # gate and up, not up alone
    # q, k, v, output: q and k before and behind their rotation too
    layer += 2 * (3 * query + 3 * key) - 8 * hidden
    assert layer_bytes(config, layout, has_experts=False) * t == layer
    # Beside the layers: ids and the embedding's dropout, the output layer's input and float32 logits. Ours
    # are 2 bytes and a gradient of 2.
    vocabulary = padded_vocab_size(config, layout)
    beside = 8 + hidden + 4 * hidden + 4 * vocabulary
    layers = 18 * hidden + 4 * width
    assert megatron[name]["activations"] * t == tokens * (config["num_hidden_layers"] * layers + beside)
    assert logits_bytes(config, layout, tokens, vocabulary) * t == tokens * 4 * vocabulary
    # As it stands, Megatron's estimate of a gated MLP is too low, by more than the bound above.
    assert 1.15 < layer / layers < 1.35
