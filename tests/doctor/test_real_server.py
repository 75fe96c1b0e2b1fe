"""The doctor on real SGLang servers: silent about a right one, and finds every defect that
is planted in one.
"""

import asyncio
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl_corr import cli
from megatron_rl_corr.commands.doctor.full_check import ask_full
from megatron_rl_corr.commands.doctor.weight_change import FIRST_NORM, TemporaryWeights, read_tensors
from megatron_rl_corr.doctor import Expected, quick_check
from megatron_rl_corr.doctor.probe import Probe
from megatron_rl_corr.doctor.questions import ask_quick
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.rollout import RolloutClient, SamplingParams
from tests.faults.drills import drill
from tests.preloaded import PreloadedServer
from tests.tiers import in_matrix, long, matrix
from tools.cpu import environment, sglang_arguments

pytestmark = matrix

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def vocab_size(tiny_moe_dir):
    return json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]


class PlantedServer(PreloadedServer):
    """planted_server.py in SGLang's place."""

    def command(self):
        interpreter, _, _, *flags = super().command()
        return [interpreter, ROOT / "tests/doctor/planted_server.py", *flags]


@pytest.fixture(scope="module")
def servers(tiny_moe_dir, tmp_path_factory):
    """right: float32 and every flag that training wants, with defects that sleep; wrong:
    bfloat16, raw log-probs.
    """
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed; make setup installs it")
    folder = tmp_path_factory.mktemp("doctor")
    plants = folder / "plants"
    plants.mkdir()
    right = PlantedServer(
        tiny_moe_dir,
        dtype="float32",
        log_path=folder / "right.log",
        extra_arguments=[*sglang_arguments(), "--enable-return-routed-experts", "--disable-overlap-schedule"],
        environment=environment("sglang") | {"PLANTED_DEFECTS": str(plants)},
    )
    wrong = PlantedServer(
        tiny_moe_dir,
        dtype="bfloat16",
        log_path=folder / "wrong.log",
        extra_arguments=sglang_arguments(),
        environment=environment("sglang") | {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"},
    )
    try:
        for server in (right, wrong):
            server.start()
        for server in (right, wrong):
            server.wait_ready()
        yield SimpleNamespace(right=right.url, wrong=wrong.url, plants=plants)
    finally:
        right.stop()
        wrong.stop()


@pytest.fixture
def plant(servers, vocab_size):
    """plant(name): a defect of the right server, gone after the test, with what it left in the cache."""
    planted = []

    def switch_on(name):
        planted.append(servers.plants / name)
        planted[-1].touch()

    yield switch_on
    for path in planted:
        path.unlink()
    ask(servers.right, vocab_size, lambda client: client.flush_cache())


@pytest.fixture
def doctor(capsys):
    """doctor(url, *flags): exit status and, of the JSON, the rows by name and the findings."""

    def run(url, *flags):
        status = cli.main(["doctor", "--url", url, "--json", *map(str, flags)])
        answer = json.loads(capsys.readouterr().out)
        assert answer["exit_status"] == status
        (server,) = answer["servers"]
        return SimpleNamespace(
            status=status, findings=server["findings"], rows={row["check"]: row for row in server["rows"]}
        )

    return run


def kinds_and_remedies(findings):
    return [(finding["name"], finding["kind"], finding["remedy"]) for finding in findings]


def ask(url, vocab_size, scenario):
    """`await scenario(client)`."""

    async def inner():
        async with RolloutClient([url], vocab_size=vocab_size, timeout_s=60) as client:
            return await scenario(client)

    return asyncio.run(inner())


def test_doctor_when_the_server_is_right_then_every_check_passes_and_nothing_is_found(
    servers, doctor, tiny_moe_dir
):
    flags = ["--full", "--model", tiny_moe_dir, "--expect-dtype", "float32", "--expect-routed-experts"]
    answer = doctor(servers.right, *flags)
    assert answer.findings == [] and answer.status == 0
    by_status = {status: [] for status in ("ok", "note")}
    for check, row in answer.rows.items():
        by_status[row["status"]].append(check)
    by_status["ok"] = [check for check in by_status["ok"] if check not in ("repeats", "prefix cache")]
    assert by_status["ok"] == [
        "version",
        "model",
        "weight updates",
        "temperature",
        "top-p",
        "sampling mask",
        "precision",
        "decode and prefill",
        "routed experts",
        "model difference",
        "whole vocabulary",
        "tokenizer",
        "pause abort",
        "pause in_place",
        "pause retract",
        "version spans, in_place",
        "version spans, retract",
        "update",
        "restored",
    ]
    # Whether two runs are bit-equal is the machine's affair, and nothing is cached the first time.
    assert set(by_status["note"]) - {"repeats", "prefix cache"} == {
        "seeds",
        "log-probs at temperature 2",
        "log-probs at top-p 0.5",
    }
    assert answer.rows["seeds"]["message"].startswith(
        "seeds are ignored: 3 seeds gave 3 responses of 24 tokens"
    )
    assert answer.rows["temperature"]["numbers"]["slope"] == pytest.approx(0.5, abs=1e-4)  # 1 / T of T = 2
    # 24 + 24 - 1 tokens, layers, experts
    assert answer.rows["routed experts"]["numbers"]["ids"] == 47 * 4 * 2
    buckets = answer.rows["model difference"]["numbers"]["buckets"]
    assert sum(bucket["tokens"] for bucket in buckets.values()) == 4 * 48
    of = answer.rows["log-probs at temperature 2"]["numbers"]
    assert of["temperature-scaled"] < 1e-5 and of["raw"] > 1e-2
    of = answer.rows["log-probs at top-p 0.5"]["numbers"]
    assert of["raw"] < 1e-5 and of["filtered"] > 0.1  # keeping half would add ln 2


def test_doctor_when_original_logprobs_and_bfloat16_then_one_semantic_finding_and_the_precision_twice(
    servers, doctor, tiny_moe_dir
):
    answer = doctor(servers.wrong, "--model", tiny_moe_dir, "--expect-dtype", "float32")
    assert answer.status == 1
    assert kinds_and_remedies(answer.findings) == [
        (
            "logprobs_without_temperature",
            "semantic",
            "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB, or train with --rollout-temperature 1",
        ),
        (
            "dtype_differs",
            "inference-path",
            "start the server with the trainer's --dtype, or correct with --rollout-correction-preset "
            "decoupled_token_is",
        ),
        (
            "model_difference",
            "inference-path",
            "start the server with --dtype float32, or correct with --rollout-correction-preset "
            "decoupled_token_is",
        ),
    ]
    assert answer.rows["temperature"]["numbers"]["slope"] == pytest.approx(1, abs=0.05)
    assert answer.rows["precision"]["numbers"]["grid"] in (2**-8, 2**-9)  # logits around 1 in 8 bits


def test_doctor_when_the_run_samples_at_temperature_1_in_bfloat16_then_the_same_server_is_right(
    servers, doctor
):
    answer = doctor(servers.wrong, "--temperature", 1, "--expect-dtype", "bfloat16")
    assert answer.findings == [] and answer.status == 0
    assert answer.rows["temperature"]["status"] == "note"


def test_quick_check_when_the_server_ignores_the_temperature_then_found(servers, plant, vocab_size):
    plant("ignore_temperature")
    (finding,) = ask(servers.right, vocab_size, quick_check)
    assert (finding.name, finding.kind) == ("temperature_ignored", "semantic")
    assert "--rollout-temperature 1" in finding.remedy and finding.server == servers.right
    assert finding.numbers["slope"] == pytest.approx(1, abs=1e-4) and not finding.numbers["follows"]


def test_quick_check_when_every_request_is_drawn_with_one_seed_then_one_response(servers, plant, vocab_size):
    plant("seed_42")
    (finding,) = ask(servers.right, vocab_size, quick_check)
    assert (finding.name, finding.kind) == ("one_response", "semantic")
    # Two of the three, at least: rounding may let one go another way, as its batch is another.
    assert finding.numbers["distinct"] <= 2
    assert finding.numbers["log_probability"] < -50  # 24 tokens of a fresh model: ln 83 = 4.4 nats each


def test_flush_when_the_scheduler_is_not_done_with_what_it_has_answered_then_it_is_waited_for(
    servers, plant, vocab_size
):
    async def scenario(client):
        await client.generate([[1, 2, 3]], SamplingParams(2))
        await client.flush_cache()

    plant("slow_loop")
    for _ in range(3):
        ask(servers.right, vocab_size, scenario)


@drill("a server that keeps prefixes of old weights", promised="the doctor names it")
def test_full_when_a_flush_does_nothing_then_stale_prefix_cache_alone(servers, plant, doctor):
    plant("keep_cache")
    answer = doctor(servers.right, "--full")
    assert kinds_and_remedies(answer.findings) == [
        ("stale_prefix_cache", "objective", load_engine("sglang").remedies["stale_prefix_cache"])
    ]
    # 24 tokens of the prompt, the last is computed
    assert answer.rows["update"]["numbers"]["cached_tokens"] == 23
    assert answer.rows["restored"]["status"] == "ok"


@drill("two servers of different models", promised="the later one is named")
def test_servers_when_their_models_differ_then_the_later_one_is_found(servers, vocab_size):
    async def scenario():
        urls = [servers.right, servers.wrong]
        async with RolloutClient(urls, vocab_size=vocab_size, timeout_s=60) as client:
            same = await quick_check(client, Expected(SamplingParams(1)))
            probe = Probe(client, servers.wrong)
            await probe.pause_generation("retract")
            folder = (await probe.served_model()).path
            weights = TemporaryWeights(probe, read_tensors(folder, [FIRST_NORM]), ranks=1, version="default")
            async with weights.scaled(FIRST_NORM, 4.0, "pushed"):
                await probe.continue_generation()
                return same, await quick_check(client, Expected(SamplingParams(1)))

    same, (finding,) = asyncio.run(scenario())
    assert same == []
    assert (finding.name, finding.kind, finding.server) == ("servers_differ", "semantic", servers.wrong)


def test_quick_check_when_it_asks_then_only_what_changes_nothing(servers, vocab_size):
    asked = []

    class Recording(RolloutClient):
        async def ask(self, url, request, **options):
            asked.append(f"{request.method} {request.endpoint}")
            return await super().ask(url, request, **options)

    async def scenario():
        async with Recording([servers.right], vocab_size=vocab_size, timeout_s=60) as client:
            await quick_check(client)

    asyncio.run(scenario())
    assert set(asked) == {"GET /server_info", "GET /model_info", "GET /openapi.json", "POST /generate"}
    assert len(asked) <= 20


MOMENTS = {
    "the server is paused": {"sglang": ("/continue_generation", 1), "vllm": ("/resume", 1)},
    "the weights are being sent": {
        "sglang": ("/update_weights_from_tensor", 1),
        "vllm": ("rl_corr_bucket", 1),
    },
    "the weights are changed, the server samples": {
        "sglang": ("/abort_request", 4),
        "vllm": ("/abort_requests", 4),
    },
    "the weights are being put back": {
        "sglang": ("/update_weights_from_tensor", 2),
        "vllm": ("rl_corr_bucket", 2),
    },
    "their name is put back": {
        "sglang": ("/update_weight_version", 1),
        "vllm": ("/update_weight_version", 1),
    },
}
"""When -> the request of each engine that is interrupted, or its `method`, and the how
many-th of its kind.
"""


@pytest.fixture
def examined(servers):
    """(engine, address) of a right server; tests/matrix/test_doctor_vllm.py has another."""
    return "sglang", servers.right


@pytest.mark.parametrize(
    "moment",
    [
        "the weights are changed, the server samples",
        *in_matrix(
            "the weights are being put back",
            "the server is paused",
            "the weights are being sent",
            "their name is put back",
        ),
    ],
)
def test_full_when_cancelled_at_any_point_then_the_server_has_its_weights_and_samples(
    examined, vocab_size, moment
):
    (engine, url), (endpoint, occurrence) = examined, MOMENTS[moment][examined[0]]

    class Cancelling(RolloutClient):
        task, seen = None, 0

        async def ask(self, url, request, **options):
            if endpoint in (request.endpoint, (request.json or {}).get("method")) and self.task is not None:
                self.seen += 1
                if self.seen == occurrence:
                    self.task.cancel()
            return await super().ask(url, request, **options)

    async def state(probe):
        """The name of the weights, and the log-probs of a text under them."""
        scores = await probe.score([3, 1, 4], [(7 * i) % vocab_size for i in range(40)])
        return (await probe.client.reported_versions())[0], scores.logprobs

    async def scenario():
        async with Cancelling([url], vocab_size=vocab_size, timeout_s=60, engine=engine) as client:
            probe = Probe(client, url)
            _, facts = await ask_quick(probe, Expected())
            version, before = await state(probe)
            client.task = asyncio.create_task(ask_full(probe, facts, None, lambda what: None, []))
            with pytest.raises(asyncio.CancelledError):
                await client.task
            assert client.seen >= occurrence
            name, after = await state(probe)
            assert name == version and abs(after - before).max() < 1e-6
            return await asyncio.wait_for(quick_check(client), 30)

    assert asyncio.run(scenario()) == []


@long
def test_command_when_interrupted_again_and_again_then_130_and_the_server_is_as_before(servers, vocab_size):
    async def state(client):
        (checksum,), (info,) = await client.weights_checker(), await client.model_info()
        return checksum["ranks"][0]["checksums"], info["weight_version"]

    before = ask(servers.right, vocab_size, state)
    command = [sys.executable, "-m", "megatron_rl_corr.cli", "doctor", "--full", "--url", servers.right]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=os.environ | {"PYTHONPATH": str(ROOT)}) as doctor:
        for line in doctor.stderr:
            if "under a running request" in line:
                break
        while ask(servers.right, vocab_size, state) == before:
            assert doctor.poll() is None
        # until its last instruction
        for number in itertools.cycle([signal.SIGINT, signal.SIGINT, signal.SIGTERM]):
            if doctor.poll() is not None:
                break
            doctor.send_signal(number)
            time.sleep(0.02)
        printed, errors = doctor.communicate(timeout=60)
    assert doctor.returncode == 130 and printed == "" and "interrupted" in errors
    assert ask(servers.right, vocab_size, state) == before
    assert ask(servers.right, vocab_size, quick_check) == []  # it samples
