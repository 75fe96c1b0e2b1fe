"""What a run does with what the doctor finds at its start."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_rl_corr.doctor import Finding
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.features.evaluation.feature import EvaluationFeature
from megatron_rl_corr.mcore.checks.server_check import check_servers, judge
from megatron_rl_corr.mcore.first_step import FirstStep, first_step_bound
from megatron_rl_corr.reduce.failure import StartupError
from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams

SEMANTIC = Finding("temperature_ignored", "http://a:1", "slope 1.00 where 0.50 is right")
ONE_RESPONSE = Finding("one_response", "http://a:1", "3 seeds gave 1 response of 24 tokens")
ROUTES = Finding("routed_experts_missing", "http://c:1", "requested and not returned")
INFERENCE = Finding("dtype_differs", "http://b:2", "float16 against bfloat16")


@pytest.mark.parametrize(
    ("findings", "kind", "fatal", "told"),
    [
        ([], "all", [], []),
        ([INFERENCE], "semantic", [], [INFERENCE]),
        ([INFERENCE], "all", [INFERENCE], []),
        ([INFERENCE, SEMANTIC], "semantic", [SEMANTIC], [INFERENCE]),
        ([ONE_RESPONSE], "semantic", [ONE_RESPONSE], []),
        ([INFERENCE, ROUTES], "semantic", [ROUTES], [INFERENCE]),  # only a run that replays them asks
        ([INFERENCE, SEMANTIC], "all", [INFERENCE, SEMANTIC], []),
    ],
)
def test_findings_when_judged_then_the_fatal_ones_refuse_and_the_others_are_told(
    findings, kind, fatal, told, capsys
):
    error = judge(findings, kind)
    assert capsys.readouterr().err.splitlines() == [f"[rollout] {finding}" for finding in told]
    if not fatal:
        assert error is None
        return
    assert isinstance(error, StartupError) and str(error).endswith("--rollout-server-check off")
    assert [finding for finding in findings if f"{finding.server}: {finding.name}" in str(error)] == fatal
    assert all(finding.remedy in str(error) for finding in fatal)


def test_finding_when_printed_in_a_run_then_with_flags_and_not_with_fields(capsys):
    judge([Finding("dtype_differs", "http://b:2", "`weight_transport` disk has float16")], "semantic")
    printed = capsys.readouterr().err
    assert (
        printed.startswith("[rollout] http://b:2: ")
        and "--rollout-weight-transport disk has float16" in printed
    )


def test_problem_of_an_evaluation_when_told_then_with_the_names_of_its_settings():
    feature = EvaluationFeature(None)
    feature.evaluation = SimpleNamespace(sampling=SamplingParams(4))
    [further] = feature.samplings()
    error = further.explain("http://a:1: HTTP 500 to `temperature` 0 with `top_k` -1")
    assert str(error).startswith("http://a:1: HTTP 500 to `eval_temperature` 0 with `eval_top_k` -1")


def test_server_when_it_returns_no_experts_and_the_run_replays_them_then_refused_with_its_flag(
    sglang_server_fp32,
):
    shape = ExpertShape(num_layers=4, layers=(0, 1, 2, 3), top_k=2, experts=8)
    with LoopThread() as loop:
        for experts, refused in ((shape, True), (None, False)):
            client = RolloutClient([sglang_server_fp32.url], vocab_size=83, timeout_s=60, experts=experts)
            error = asked_once(
                lambda client=client: check_servers("semantic", SamplingParams(8), client, loop)
            )
            loop.call(client.close())
            assert (error is not None) == refused
            assert not refused or "--enable-return-routed-experts" in str(error)


def asked_once(check):
    """The StartupError of one rank alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check()
    except StartupError as error:
        return error
    finally:
        dist.destroy_process_group()


HALF = {"dtype": "bfloat16", "quantization": None, "kv_cache_dtype": "auto"}
FLOAT32 = HALF | {"dtype": "float32"}


@pytest.mark.parametrize(
    ("float32", "servers", "bound"),
    [
        (True, [FLOAT32, FLOAT32], 1e-4),
        (False, [FLOAT32], 1e-2),
        (True, [FLOAT32, HALF], 1e-2),
        # As SGLang resolves it: of a checkpoint in float32 it is float16.
        (True, [FLOAT32 | {"dtype": "auto"}], 1e-2),
        (False, [HALF | {"kv_cache_dtype": "bf16"}], 1e-2),
        (False, [HALF, HALF | {"quantization": "fp8"}], 1e-1),
        (True, [FLOAT32 | {"kv_cache_dtype": "fp8_e4m3"}], 1e-1),
    ],
)
def test_first_step_bound_when_none_is_given_then_the_one_of_the_coarsest_numbers(float32, servers, bound):
    engines = [load_engine("sglang")] * len(servers)
    assert first_step_bound(float32, engines, servers) == bound
    assert first_step_bound(float32, engines, servers, rounded=True) == 1e-1


@pytest.mark.parametrize(
    ("kl", "said"), [(0.011, "is 0.011, so"), (float("nan"), "is not a number"), (1e30, "1e+30")]
)
def test_first_step_when_its_kl_is_above_the_bound_or_no_number_then_the_error_says_what_to_look_at(kl, said):
    error = FirstStep(0, 0.01).judge(kl)
    assert isinstance(error, StartupError) and said in str(error)
    assert str(error).startswith("--rollout-max-first-step-kl 0.01: ")
    for cause in (
        "--hidden-dropout 0",
        "`megatron-rl-corr model-flags`",
        "checkpoint",
        "shifted",
        "-corr doctor`",
    ):
        assert cause in str(error)
    assert FirstStep(0, 0.01).judge(0.01) is None and FirstStep(0, float("inf")).judge(1e30) is None
    assert FirstStep(0, float("inf")).judge(float("nan")) is not None
