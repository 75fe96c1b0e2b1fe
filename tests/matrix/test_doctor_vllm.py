"""The doctor on vLLM servers that need flags of their own: raw log-probs, and the V2 model runner."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from megatron_rl_corr import cli
from megatron_rl_corr.rollout import RolloutClient, SamplingParams
from tests.preloaded import PreloadedServer
from tests.tiers import long
from tools.cpu import environment, gpu_available, vllm_arguments

pytestmark = pytest.mark.skipif(gpu_available(), reason="make setup-vllm installs vLLM without a GPU only")
PROCESSED = "start the server with --logprobs-mode processed_logprobs, or train with "


@pytest.fixture(scope="module")
def raw_server(tiny_moe_dir, tmp_path_factory):
    """bfloat16, and log-probs of the softmax at temperature 1, whatever is asked for: vLLM's default."""
    with PreloadedServer(
        tiny_moe_dir,
        engine="vllm",
        dtype="bfloat16",
        log_path=tmp_path_factory.mktemp("raw") / "server.log",
        extra_arguments=[*vllm_arguments(), "--logprobs-mode", "raw_logprobs"],
        environment=environment("vllm"),
    ) as server:
        yield server


@pytest.fixture
def doctor(capsys):
    """doctor(url, *flags): exit status, rows by name and {name of a finding: its remedy}."""

    def run(url, *flags):
        status = cli.main(["doctor", "--url", url, "--json", *map(str, flags)])
        (server,) = json.loads(capsys.readouterr().out)["servers"]
        rows = {row["check"]: row for row in server["rows"]}
        found = {finding["name"]: finding["remedy"] for finding in server["findings"]}
        return SimpleNamespace(status=status, found=found, rows=rows)

    return run


def test_doctor_when_log_probs_are_raw_and_the_run_samples_hot_then_found_by_name(
    raw_server, doctor, tiny_moe_dir
):
    answer = doctor(raw_server.url, "--temperature", 2, "--model", tiny_moe_dir, "--expect-dtype", "float32")
    assert set(answer.found) == {"logprobs_without_temperature", "dtype_differs", "model_difference"}
    assert answer.found["logprobs_without_temperature"] == PROCESSED + "--rollout-temperature 1"
    assert answer.rows["temperature"]["numbers"]["slope"] == pytest.approx(1, abs=0.05)
    assert answer.rows["precision"]["numbers"]["grid"] in (2**-8, 2**-9)  # logits around 1 in 8 bits


def test_doctor_when_log_probs_are_raw_and_the_run_truncates_then_found_by_name(raw_server, doctor):
    answer = doctor(raw_server.url, "--top-p", 0.9, "--top-k", 8, "--expect-dtype", "bfloat16")
    assert set(answer.found) == {"logprobs_of_another_set", "sampling_mask_missing"}
    assert answer.found["logprobs_of_another_set"] == PROCESSED + "--rollout-top-p 1 --rollout-top-k -1"


def test_sampling_test_when_log_probs_are_raw_then_what_the_server_does_shows_it_without_what_it_tells(
    raw_server,
):
    async def asked(sampling):
        async with RolloutClient([raw_server.url], vocab_size=83, engine="vllm", timeout_s=60) as client:
            engine, told = client.engine_of(raw_server.url), await client.sampling_problem(sampling)
            request = engine.sampling_test(sampling)
            answer = None if request is None else await client.ask(raw_server.url, request)
            return told, answer and engine.sampling_test_problem(answer, sampling)

    told, shown = asyncio.run(asked(SamplingParams(8, temperature=0.7)))
    for problem in (told, shown):
        assert "`temperature` 0.7" in problem and "--logprobs-mode processed_logprobs" in problem
    assert told.startswith(raw_server.url) and shown.startswith("a sample from one id alone had log-prob -")
    assert asyncio.run(asked(SamplingParams(8))) == (None, None)


def test_server_when_started_anew_with_raw_log_probs_in_mid_run_then_not_taken_back(raw_server, caplog):
    async def scenario():
        async with RolloutClient([raw_server.url], vocab_size=83, engine="vllm", timeout_s=60) as client:
            [version] = await client.reported_versions()
            for temperature, left_out in ((0.7, [raw_server.url]), (1.0, [])):
                client.require_sampling([SamplingParams(8, temperature=temperature)])
                await client.expect_version(version, restarted=[raw_server.url])
                await asyncio.sleep(5)
                assert client.left_out == left_out

    asyncio.run(scenario())
    assert caplog.text.count("--logprobs-mode processed_logprobs") == 1


def test_doctor_when_the_run_samples_at_temperature_1_then_the_same_server_is_right(raw_server, doctor):
    answer = doctor(raw_server.url, "--temperature", 1, "--expect-dtype", "bfloat16")
    assert answer.found == {} and answer.status == 0
    assert answer.rows["temperature"]["status"] == answer.rows["top-p"]["status"] == "note"


@long
def test_doctor_when_the_v2_runner_returns_routed_experts_then_they_are_of_the_models_shape(
    tiny_moe_dir, tmp_path_factory, doctor
):
    with PreloadedServer(
        tiny_moe_dir,
        engine="vllm",
        dtype="float32",
        log_path=tmp_path_factory.mktemp("experts") / "server.log",
        extra_arguments=[*vllm_arguments(), "--enable-return-routed-experts"],
        environment=environment("vllm_v2"),
    ) as server:
        answer = doctor(server.url, "--expect-routed-experts", "--expect-dtype", "float32", "--timeout", 300)
    assert answer.found == {}
    row = answer.rows["routed experts"]
    # 24 + 24 - 1 tokens, layers, experts
    assert row["status"] == "ok" and row["numbers"]["ids"] == 47 * 4 * 2


@long
def test_doctor_when_the_server_returns_masks_then_what_it_refuses_is_named_and_the_mask_is_right(
    vllm_v2_server_fp32, doctor
):
    answer = doctor(vllm_v2_server_fp32.url, "--top-p", 0.9, "--top-k", 8, "--timeout", 300)
    assert answer.found == {} and answer.status == 2
    assert answer.rows["sampling mask"]["status"] == "ok"
    refused = {check: row["message"] for check, row in answer.rows.items() if row["status"] == "failed"}
    assert {"repeats", "prefix cache"} <= set(refused)
    assert [
        m for m in refused.values() if not m.startswith("refused: ") or "--return-sampling-mask" not in m
    ] == []
