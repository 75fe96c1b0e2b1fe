"""What rollout servers hold, by hand."""

import pytest

from megatron_rl_corr.commands.planner.serving import (
    GIB,
    cache_bytes_per_token,
    server_problems,
    serving_candidates,
    serving_memory,
)
from megatron_rl_corr.commands.planner.train_layout import Workload
from tests.commands.planner.published import DEEPSEEK_V3, QWEN3_4B, QWEN3_30B_A3B, QWEN3_235B_A22B

WORKLOAD = Workload(max_prompt_tokens=1024, max_new_tokens=4096, global_batch_size=128)


def serving(tensor, config=QWEN3_30B_A3B, gpus=4, gib=80):
    return serving_memory(config, WORKLOAD, gpus=gpus, tensor=tensor, gpu_bytes=gib * GIB, fraction=0.85)


@pytest.mark.parametrize(
    ("config", "tensor", "expected"),
    [
        (QWEN3_30B_A3B, 1, 2 * 48 * 4 * 128 * 2),
        (QWEN3_30B_A3B, 2, 2 * 48 * 2 * 128 * 2),
        (QWEN3_30B_A3B, 8, 2 * 48 * 1 * 128 * 2),  # 4 heads for 8 GPUs: each is there twice
        (QWEN3_4B, 1, 2 * 36 * 8 * 128 * 2),
        (DEEPSEEK_V3, 1, 61 * (512 + 64) * 2),
        (DEEPSEEK_V3, 8, 61 * (512 + 64) * 2),  # whole on every GPU
    ],
)
def test_cache_of_a_token_then_its_key_value_heads_on_a_gpu(config, tensor, expected):
    assert cache_bytes_per_token(config, tensor) == expected


def test_servers_of_two_gpus_then_weights_are_halved_and_requests_counted():
    found = serving(2)
    whole = 48 * 266496 + 2048  # norms and routers, on both
    assert found.weights == 2 * (whole + (30532122624 - whole) / 2)
    assert found.cache == 0.85 * 80 * GIB - found.weights
    assert found.tokens == int(found.cache / 49152) and found.servers == 2
    assert found.requests == 2 * (found.tokens // 5120) and found.fits


def test_weights_when_larger_than_the_gpu_then_nothing_fits():
    found = serving(1, gib=40)
    assert not found.fits and found.tokens == 0 and found.cache < 0
    assert found.as_dict()["fits"] is False


def test_candidates_when_none_fits_then_the_one_that_lacks_least_comes_first():
    found = serving_candidates(
        QWEN3_235B_A22B, WORKLOAD, gpus=8, gpus_per_node=8, gpu_bytes=40 * GIB, fraction=0.85
    )
    assert [one.tensor for one in found] == [8, 4, 2, 1] and not any(one.fits for one in found)
    # Weights of 54.8 GiB, 5120 tokens of 47 KiB, and 34 GiB of the GPU.
    assert found[0].lacks(WORKLOAD) / GIB == pytest.approx(54.8 + 5120 * 47 / 2**20 - 34, abs=0.1)


def test_candidates_then_the_smallest_servers_that_run_a_whole_batch_come_first():
    # One GPU each: 4 x (121563 // 5120) = 92 requests, fewer than the batch's 128; two GPUs each: 336.
    found = serving_candidates(
        QWEN3_30B_A3B, WORKLOAD, gpus=4, gpus_per_node=8, gpu_bytes=80 * GIB, fraction=0.85
    )
    assert [one.tensor for one in found] == [2, 4, 1]
    assert found[-1].requests == 92
    assert [
        one.tensor
        for one in serving_candidates(
            QWEN3_4B, WORKLOAD, gpus=4, gpus_per_node=8, gpu_bytes=80 * GIB, fraction=0.85
        )
    ] == [1, 2, 4]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        # 24 GPUs, 8 a node. 32 heads and 4 key-value heads: 1, 2, 4 divide both; 8 is a multiple of 4; 3 and
        # 6 divide neither, 16 and more leave the node.
        (QWEN3_30B_A3B, [1, 2, 4, 8]),
        # 24 heads and 8 key-value heads: 3 divides the heads, and is neither a divisor nor a
        # multiple of 8; so is 6.
        (QWEN3_4B | {"num_attention_heads": 24}, [1, 2, 4, 8]),
        # 24 heads and 2 key-value heads: 6 is a multiple of 2, and 3 is not.
        (QWEN3_4B | {"num_attention_heads": 24, "num_key_value_heads": 2}, [1, 2, 4, 6, 8]),
        # 128 heads of latent attention, whatever config.json says of key-value heads.
        (DEEPSEEK_V3 | {"num_key_value_heads": 3}, [1, 2, 4, 8]),
    ],
)
def test_candidates_then_those_that_sglang_can_run_on_a_node(config, sizes):
    found = serving_candidates(config, WORKLOAD, gpus=24, gpus_per_node=8, gpu_bytes=80 * GIB, fraction=0.85)
    assert sorted(one.tensor for one in found) == sizes


def test_problems_of_a_size_then_each_is_named():
    assert server_problems(QWEN3_30B_A3B, gpus=16, tensor=12, gpus_per_node=8) == [
        "must divide the 16 GPUs that serve",
        "must be at most --gpus-per-node 8",
        "must divide the model's 32 heads",
    ]
    assert server_problems(QWEN3_30B_A3B, gpus=9, tensor=3, gpus_per_node=8) == [
        "must divide the model's 32 heads",
        "must divide, or be a multiple of, the model's 4 key-value heads",
    ]
