"""Which servers compute a token's log-prob alike whatever else they compute, by what they tell."""

import pytest

from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.sglang import ENGINE as SGLANG
from megatron_rl_corr.engines.vllm import ENGINE as VLLM

GPU = {"device": "cuda", "version": "0.5.23", "attention_backend": "flashinfer"}
VLLM_GPU = {"vllm_config": {"device_config": {"device_type": "cuda"}}}


@pytest.mark.parametrize(
    "engine, info, words",
    [
        (SGLANG, GPU | {"enable_deterministic_inference": True}, None),
        (SGLANG, GPU, ("--enable-deterministic-inference", "--attention-backend flashinfer", "0.5.23")),
        (SGLANG, GPU | {"enable_deterministic_inference": False}, ("--enable-deterministic-inference",)),
        (SGLANG, {"device": "cpu"}, ("on GPUs alone", "--device cpu")),
        (VLLM, VLLM_GPU | {"vllm_env": {"VLLM_BATCH_INVARIANT": True}}, None),
        (VLLM, VLLM_GPU | {"vllm_env": {"VLLM_BATCH_INVARIANT": False}}, ("VLLM_BATCH_INVARIANT=1",)),
        (VLLM, VLLM_GPU, ("VLLM_BATCH_INVARIANT=1",)),
        (VLLM, {"vllm_config": {"device_config": {"device_type": "cpu"}}}, ("on GPUs alone", "a CPU")),
    ],
)
def test_server_then_in_its_mode_or_what_is_missing(engine, info, words):
    found = engine.batch_invariance_problem(info)
    assert (found is None) == (words is None)
    assert all(word in found for word in words or ())


def test_log_probs_of_a_server_then_of_16_bits_where_it_makes_them_so():
    assert SGLANG.logprob_type(GPU) == VLLM.logprob_type(VLLM_GPU) == "float32"
    assert SGLANG.logprob_type(GPU | {"rl_on_policy_target": None}) == "float32"
    assert SGLANG.logprob_type(GPU | {"rl_on_policy_target": "fsdp"}) == "bfloat16"


def test_engine_that_tells_nothing_then_refused_by_its_name():
    class Unknown(Engine):
        name = "Unknown"

    problem = Engine.batch_invariance_problem(Unknown.__new__(Unknown), {})
    assert "Unknown has no batch-invariant mode" in problem
