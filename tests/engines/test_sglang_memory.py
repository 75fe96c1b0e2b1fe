"""Which SGLang servers can take turns with a trainer on their GPUs, by what /server_info tells of them."""

import re

import pytest

from megatron_rl_corr.engines import load_engine

PROBLEM = load_engine("sglang").memory_problem
INFO = {
    "enable_memory_saver": True,
    "pp_size": 1,
    "tp_size": 4,
    "weight_cache_mode": "off",
    "speculative_algorithm": None,
    "quantization": None,
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": None,
    "enable_lmcache": False,
}


def test_memory_problem_when_the_server_can_take_turns_then_none():
    assert PROBLEM(INFO) is None
    assert PROBLEM({"enable_memory_saver": True}) is None  # an older one, that has no more to tell


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"enable_memory_saver": False},
            "`colocate` needs a server started with --enable-memory-saver, without",
        ),
        ({"pp_size": 2}, "`colocate` with --pp-size 2 is not proven: .*; start it with --tp-size alone"),
        ({"weight_cache_mode": "client"}, "`colocate` with --weight-cache-mode client: .*; start it without"),
        (
            {"speculative_algorithm": "EAGLE"},
            "`colocate` with --speculative-algorithm EAGLE: .*; start it without",
        ),
        (
            {"quantization": "fp8"},
            "`colocate` with quantised weights is not tested: .*; serve the model in 16 bits",
        ),
        (
            {"hicache_storage_backend": "mooncake"},
            r"\(--hicache-storage-backend mooncake\), .*; start it without",
        ),
        ({"enable_lmcache": True}, r"outside its own memory \(--enable-lmcache\), .*; start it without"),
    ],
)
def test_memory_problem_when_it_can_not_then_the_flag_and_the_remedy(changed, message):
    assert re.search(message, PROBLEM(INFO | changed))
