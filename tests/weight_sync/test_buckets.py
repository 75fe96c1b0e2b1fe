"""Buckets keep the order, keep the bound, and lose nothing."""

import itertools

import pytest
import torch

from megatron_rl_corr.weight_sync.export import buckets, default_bucket_mib


def names(tensors, bucket_bytes: int) -> list[list[str]]:
    """Every tensor a unit of its own."""
    units = ([named] for named in tensors)
    return [[name for name, _ in bucket] for bucket in buckets(units, bucket_bytes)]


# 8, 16, 4, 40, 4, 12 bytes
TENSORS = [
    ("a", torch.zeros(2)),
    ("b", torch.zeros(2, dtype=torch.float64)),
    ("c", torch.zeros(2, 1).bfloat16()),
    ("d", torch.zeros(10)),
    ("e", torch.zeros(4, dtype=torch.uint8)),
    ("f", torch.zeros(3)),
]


@pytest.mark.parametrize(
    "limit, expected",
    [
        # 8 + 16 fill 24 exactly; 4 cannot take 40; 40 passes the limit alone; 4 + 12.
        (24, [["a", "b"], ["c"], ["d"], ["e", "f"]]),
        (23, [["a"], ["b", "c"], ["d"], ["e", "f"]]),
        # 16 is full alone, and 4 + 12 fill a later bucket exactly.
        (16, [["a"], ["b"], ["c"], ["d"], ["e", "f"]]),
        (1, [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
        (84, [["a", "b", "c", "d", "e", "f"]]),
    ],
)
def test_buckets_when_bounded_then_in_order_and_within_it(limit, expected):
    assert names(TENSORS, limit) == expected


@pytest.mark.parametrize(
    "limit, expected",
    [
        # 8, then 16 + 4 together, 40, 4 + 12: the unit does not fit behind "a" in 27, though "b" would.
        (27, [["a"], ["b", "c"], ["d"], ["e", "f"]]),
        (28, [["a", "b", "c"], ["d"], ["e", "f"]]),
        # Larger than a bucket: alone, and whole.
        (10, [["a"], ["b", "c"], ["d"], ["e"], ["f"]]),
    ],
)
def test_buckets_when_tensors_must_come_together_then_no_bucket_has_a_part_of_them(limit, expected):
    a, b, c, *rest = TENSORS
    units = [[a], [b, c], *([named] for named in rest)]
    assert [[name for name, _ in bucket] for bucket in buckets(units, limit)] == expected


def test_buckets_when_there_is_nothing_then_none():
    assert names([], 10) == []


def test_buckets_when_a_tensor_has_no_elements_then_it_is_sent_too():
    assert names([("a", torch.zeros(0)), ("b", torch.zeros(1))], 4) == [["a", "b"]]


def test_buckets_when_the_stream_is_long_then_read_no_further_than_one_unit_ahead():
    read = []

    def stream():
        for i in itertools.count():
            read.append(i)
            yield [(str(i), torch.zeros(1))]

    first = next(iter(buckets(stream(), 8)))
    assert [name for name, _ in first] == ["0", "1"] and read == [0, 1, 2]


@pytest.mark.parametrize("size", [0, -5])
def test_buckets_when_the_size_is_not_positive_then_refused(size):
    with pytest.raises(ValueError, match=f"bucket_bytes must be positive, got {size}"):
        next(buckets([TENSORS], size))


@pytest.mark.parametrize(
    ("servers", "mib"), [(1, 256), (16, 256), (17, 272), (64, 1024), (128, 2048), (256, 2048)]
)
def test_default_size_when_there_are_more_servers_then_larger_within_its_bounds(servers, mib):
    assert default_bucket_mib(servers) == mib
