"""Kernels, collectives, rows and bytes of the Triton log-probs: each launch counted, on tensors
without storage.
"""

import pytest

pytest.importorskip("triton")

from benchmarks.logprob_counts import count

T, N, V, SHARD = 8192, 2048, 151936, 18992


def names(launches) -> list[str]:
    return [one.kernel for one in launches]


@pytest.mark.parametrize("entropy", [False, True])
def test_kernels_when_on_eight_tensor_ranks_then_one_beside_the_exchange_and_none_of_torch(entropy):
    found = count(T, SHARD, sampled=N, tp=8, with_entropy=entropy, entropy_in_loss=entropy)
    assert names(found.forward) == ["stats_kernel", "combine_kernel"]
    assert names(found.backward) == ["gradient_kernel"]
    assert found.operators == []
    # Four float32 numbers of each sampled token, and of no other.
    assert found.exchanged == [4 * 4 * N]


def test_kernels_when_with_the_collision_then_the_same_and_four_bytes_more_a_token_in_the_same_exchange():
    found = count(T, SHARD, sampled=N, tp=8, with_entropy=True, with_collision=True)
    assert names(found.forward) == ["stats_kernel", "combine_kernel"]
    assert names(found.backward) == ["gradient_kernel"]
    assert found.operators == []
    assert found.exchanged == [5 * 4 * N]


def test_kernels_when_alone_and_rows_have_parts_then_two_small_ones_and_no_exchange():
    found = count(T, V, sampled=N, with_entropy=True)
    assert names(found.forward) == ["stats_kernel", "merge_kernel", "combine_kernel"]
    assert names(found.backward) == ["gradient_kernel"]
    assert found.operators == [] and found.exchanged == []


@pytest.mark.parametrize("sampled", [None, N])
def test_programs_then_those_of_sampled_rows_forward_and_of_all_rows_backward(sampled):
    found = count(T, V, sampled=sampled)
    rows = T if sampled is None else sampled
    # 151936 columns are five parts of 8 tiles of 4096.
    assert found.forward[0].programs == 5 * rows
    assert found.backward[0].programs == 5 * T


@pytest.mark.parametrize("columns, tp", [(V, 1), (SHARD, 8)])
@pytest.mark.parametrize("sampled", [None, N, 0])
def test_bytes_then_those_of_the_floor_within_one_percent(columns, tp, sampled):
    found = count(T, columns, sampled=sampled, tp=tp, with_entropy=True)
    rows = T if sampled is None else sampled
    assert found.floor == 2 * columns * (2 * rows + T)
    assert found.floor <= found.moved <= 1.01 * found.floor
