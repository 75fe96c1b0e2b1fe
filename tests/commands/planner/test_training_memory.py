"""Bytes on a GPU that trains, by hand for small numbers, and how each part of a layout changes them."""

import pytest

from megatron_rl_corr.commands.planner.activations import layer_bytes, logits_bytes
from megatron_rl_corr.commands.planner.train_layout import TrainLayout, Workload
from megatron_rl_corr.commands.planner.training_memory import training_memory
from tests.commands.planner.published import DEEPSEEK_V3, QWEN3_4B, QWEN3_30B_A3B

TINY = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
SPARSE = TINY | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
}
WORKLOAD = Workload(max_prompt_tokens=10, max_new_tokens=22, global_batch_size=64)


def memory(config=TINY, workload=WORKLOAD, **layout):
    return training_memory(config, TrainLayout(**{"gpus": 8} | layout), workload)


def test_tiny_model_on_two_tensor_ranks_then_each_number_by_hand():
    [stage] = memory(tensor=2).stages
    # A layer: attention 8 x (8 + 2 x 4) + 8 x 8 = 192 and MLP 3 x 8 x 16 = 384 are split, 576 / 2 = 288; its
    # norms 2 x 8 + 2 x 2 = 20 are not. The vocabulary is padded to 256: 256 x 8 / 2 = 1024. The last norm: 8.
    parameters = 4 * (288 + 20) + 1024 + 8
    assert stage.parameters == parameters
    assert (stage.weights, stage.gradients) == (2 * parameters, 4 * parameters)
    assert stage.optimizer == 12 * parameters / 4  # over 4 replicas
    # A token of a layer: norms 4 x 2 x 8 = 64, attention 2 x (3 x 8 + 3 x 4) = 72 and 4 x 4 = 16 of
    # log-sum-exp, MLP 3 x 2 x 16 = 96: 248 / 2. Four layers, and the gradients of one at work; 32 tokens.
    assert stage.activations == 32 * (4 + 1) * 124
    assert stage.logits == 32 * 4 * 256 / 2


def test_layers_when_recomputed_then_each_keeps_its_input_and_one_is_there_twice():
    [stage] = memory(recompute="full").stages
    assert stage.activations == 32 * (4 * 2 * 8 + 2 * 248)
    [core] = memory(recompute="selective").stages
    # but for the log-sum-exp of the layers that are done
    assert core.activations == 32 * (4 * (248 - 16) + 248)


def test_pipeline_when_of_two_stages_then_the_first_holds_two_microbatches_and_the_last_the_logits():
    first, last = memory(pipeline=2).stages
    assert (first.activations, last.activations) == (32 * (2 * 2 + 1) * 248, 32 * (2 + 1) * 248)
    assert first.logits == 0 and last.logits == 32 * 4 * 128
    assert first.parameters + 8 == last.parameters  # the tied output layer is a copy; the last norm


def test_context_parallel_ranks_then_each_has_its_part_of_the_tokens_and_of_the_optimizer():
    [whole], [parts] = memory().stages, memory(context=2).stages
    assert parts.activations == whole.activations / 2 and parts.logits == whole.logits / 2
    assert parts.optimizer == whole.optimizer  # 8 ranks in both
    assert parts.parameters == whole.parameters


def test_experts_when_parallel_then_their_parameters_are_parted_and_the_busiest_rank_has_more_tokens():
    [alone], [parts] = memory(SPARSE).stages, memory(SPARSE, expert=4).stages
    routed = 4 * 8 * 3 * 8 * 4  # layers, experts, gate + up + down, hidden, width
    assert alone.parameters - parts.parameters == routed * 3 / 4
    # The others over 8 ranks, the experts over the 2 that have the same ones.
    dense = alone.parameters - routed
    assert parts.optimizer == 12 * (dense / 8 + routed / 4 / 2)
    # Two experts of each token: input 2 x 8, gate and up 4 x 4, product 2 x 4; half as much again.
    assert parts.activations - alone.activations == 32 * 5 * 2 * 40 * 0.5
    assert memory(SPARSE, expert=4, expert_imbalance=1.0).stages[0].activations == alone.activations


def test_expert_tensor_ranks_then_they_split_the_experts_and_gather_tokens():
    [parts] = memory(SPARSE, tensor=2, expert_tensor=2).stages
    # A layer: half of attention's 192 and of the experts' 768, all of norms and router, 20 + 64; the
    # vocabulary's half.
    assert parts.parameters == 4 * (96 + 384 + 84) + 1024 + 8
    one = layer_bytes(SPARSE, TrainLayout(gpus=8, tensor=2), has_experts=True)
    gathered = layer_bytes(SPARSE, TrainLayout(gpus=8, tensor=2, expert_tensor=2), has_experts=True)
    assert gathered - one == 2 * 2 * 8 / 2  # two experts' input again, bfloat16, on half of the tokens


def test_optimizer_when_on_the_host_then_16_bytes_a_parameter_there_and_none_on_the_gpu():
    found = memory(offload_optimizer=True)
    assert found.stages[0].optimizer == 0
    assert found.host == 16 * (4 * (576 + 20) + 800 + 8)


def test_optimizer_when_not_distributed_then_whole_on_every_replica():
    [stage] = memory(distributed_optimizer=False).stages
    assert stage.optimizer == 12 * stage.parameters


def test_logits_when_from_hidden_states_then_a_tile_and_hidden_states_alone():
    layout = TrainLayout(gpus=8, linear_logprobs=True)
    assert logits_bytes(QWEN3_4B, layout, 1000, 151936) == 256 * 2**20 + 1000 * 2560 * 6
    assert logits_bytes(QWEN3_4B, TrainLayout(gpus=8), 1000, 151936) == 4 * 1000 * 151936


def test_latent_attention_then_low_rank_rows_and_the_way_up_are_kept():
    # Norms 8 x 7168; 2 x (2 x (1536 + 512) + 64); 128 heads x (2 x 192 + 256 + 128) x 2 and 4 of log-sum-exp;
    # MLP 6 x 18432.
    expected = 8 * 7168 + 2 * (2 * 2048 + 64) + 128 * (768 * 2 + 4) + 6 * 18432
    assert layer_bytes(DEEPSEEK_V3, TrainLayout(gpus=1), has_experts=False) == expected


@pytest.mark.parametrize(
    ("config", "layout", "words"),
    [
        (
            QWEN3_4B,
            {"tensor": 3},
            "--tensor-model-parallel-size 3 x pipeline 1 x context 1 must divide 8 GPUs",
        ),
        (QWEN3_30B_A3B, {"tensor": 8}, "must divide the model's 32 heads and 4 key-value heads"),
        (QWEN3_4B, {"pipeline": 8}, "--pipeline-model-parallel-size 8 must divide the model's 36 layers"),
        (QWEN3_4B, {"expert": 2}, "--expert-model-parallel-size 2: the model has no experts; leave it out"),
        (QWEN3_30B_A3B, {"expert": 3}, "--expert-model-parallel-size 3 must divide the model's 128 experts"),
        (
            QWEN3_30B_A3B,
            {"expert": 8, "expert_tensor": 2},
            "x expert tensor 2 x pipeline 1 must divide 8 GPUs",
        ),
        (QWEN3_4B, {"gpus": 24}, "--global-batch-size 64 must be a multiple of 24 replicas x --group-size 8"),
        (QWEN3_4B, {"context": 4, "tensor": 2}, "32 tokens, must be a multiple of 16"),
        (
            QWEN3_4B,
            {"offload_optimizer": True, "distributed_optimizer": False},
            "needs the distributed optimizer",
        ),
    ],
)
def test_layout_when_megatron_can_not_make_it_then_a_line_says_why(config, layout, words):
    workload = Workload(
        max_prompt_tokens=10, max_new_tokens=22 + 8 * ("context" in layout), global_batch_size=64
    )
    words = words.replace("32 tokens", f"{workload.seq_length} tokens")
    problems = TrainLayout(**{"gpus": 8} | layout).problems(config, workload)
    assert any(words in problem for problem in problems), problems
