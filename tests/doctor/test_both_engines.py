"""The doctor on a real server of each engine: one list of cases, and by name what an engine cannot do."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl_corr import cli
from megatron_rl_corr.commands.doctor.weight_change import FIRST_NORM, TemporaryWeights, read_tensors
from megatron_rl_corr.doctor import DEFECTS, quick_check
from megatron_rl_corr.doctor.probe import Probe
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.rollout import RolloutClient
from tests.preloaded import run_preloaded

ROOT = Path(__file__).resolve().parents[2]
UNEQUAL = ("repeats", "prefix cache")
"""Whether two runs are bit-equal is the machine's affair, and whether a prompt is cached that of
the test before.
"""
RIGHT = [
    "version",
    "model",
    "weight updates",
    "temperature",
    "top-p",
    "precision",
    "decode and prefill",
    "model difference",
    "whole vocabulary",
    "tokenizer",
    "pause abort",
    "pause in_place",
    "pause retract",
    "version spans, retract",
    "update",
    "restored",
]
"""Rows that are "ok" on a right server of each engine."""
OTHER = {
    "sglang": {
        "sampling mask": ("ok", "kept 8 to 8 ids"),
        "seeds": ("note", "seeds are ignored"),  # without deterministic inference
        "version spans, in_place": ("finding", "log-probs switch"),  # with the overlap scheduler
        "routed experts": ("finding", "requested and not returned"),
    },
    "vllm": {
        "sampling mask": ("note", "the answer holds no sampling_mask"),  # of the V2 model runner alone
        "seeds": ("ok", "3 seeds gave 3 responses of 24 tokens, one seed twice gave one"),
        "version spans, in_place": ("ok", "log-probs switch"),
        "routed experts": ("finding", "requested and not returned"),
    },
}
"""Rows in which the engines' servers differ."""
FOUND = {
    "sglang": ["routed_experts_missing", "version_spans_wrong"],
    "vllm": ["routed_experts_missing"],
}


@pytest.fixture
def doctor(capsys):
    """doctor(url, *flags): exit status, rows by name and findings."""

    def run(url, *flags):
        status = cli.main(["doctor", "--url", url, "--json", *map(str, flags)])
        (server,) = json.loads(capsys.readouterr().out)["servers"]
        rows = {row["check"]: row for row in server["rows"]}
        return SimpleNamespace(status=status, findings=server["findings"], rows=rows)

    return run


def ask(url, folder, scenario):
    """`await scenario(probe)` of a server that serves `folder`."""

    async def inner():
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        async with RolloutClient([url], vocab_size=vocab_size, engine="auto", timeout_s=60) as client:
            await client.find_servers(5)
            return await scenario(Probe(client, url))

    return asyncio.run(inner())


def test_full_when_the_server_is_right_then_every_row_is_what_its_engine_can_do(
    engine_server, doctor, tiny_moe_dir
):
    engine, server = engine_server
    answer = doctor(
        server.url, "--full", "--model", tiny_moe_dir, "--expect-dtype", "float32", "--expect-routed-experts"
    )
    rows = {check: row for check, row in answer.rows.items() if check not in UNEQUAL}
    assert [check for check in RIGHT if rows[check]["status"] != "ok"] == []
    for check, (status, words) in OTHER[engine].items():
        assert rows[check]["status"] == status and words in rows[check]["message"], check
    notes = {"log-probs at temperature 2", "log-probs at top-p 0.5"}
    assert set(rows) == {*RIGHT, *OTHER[engine], *notes} and all(
        rows[check]["status"] == "note" for check in notes
    )
    remedies = load_engine(engine).remedies
    assert [(f["name"], f["kind"], f["remedy"]) for f in answer.findings] == [
        (name, DEFECTS[name].kind, remedies[name]) for name in FOUND[engine]
    ]
    assert rows["temperature"]["numbers"]["slope"] == pytest.approx(0.5, abs=1e-4)  # 1 / T of T = 2
    numbers = rows["log-probs at top-p 0.5"]["numbers"]
    defined, other = ("filtered", "raw") if engine == "vllm" else ("raw", "filtered")
    assert numbers[defined] < 1e-5 and numbers[other] > 0.1  # keeping half adds ln 2
    numbers = rows["log-probs at temperature 2"]["numbers"]
    assert numbers["temperature-scaled"] < 1e-5 and numbers["raw"] > 1e-2


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory):
    """The tiny model of another seed."""
    folder = tmp_path_factory.mktemp("other")
    made = run_preloaded([ROOT / "examples/quickstart/make_model.py", folder, "--seed", 1], engine="sglang")
    assert made.returncode == 0, made.stderr
    return folder


def test_model_when_it_is_another_checkpoint_then_semantic_with_the_engines_remedy(
    engine_server, doctor, other_checkpoint
):
    engine, server = engine_server
    answer = doctor(server.url, "--model", other_checkpoint)
    ((name, remedy),) = [(finding["name"], finding["remedy"]) for finding in answer.findings]
    assert name == "another_checkpoint" and remedy == load_engine(engine).remedies[name]
    numbers = answer.findings[0]["numbers"]
    assert numbers["mean"] > 10 * numbers["bfloat16"]["mean"]


def test_model_when_two_experts_of_one_layer_are_exchanged_then_the_weights_differ(
    engine_server, doctor, tiny_moe_dir
):
    server, checkpoint = engine_server[1], HFCheckpoint(tiny_moe_dir)
    names = [
        f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
        for expert in range(8)
        for part in ("gate", "up", "down")
    ]
    right = {name: checkpoint.tensor(name) for name in names}
    swapped = {**right}
    for part in ("gate", "up", "down"):
        first, second = (f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight" for expert in (0, 1))
        swapped[first], swapped[second] = right[second], right[first]

    async def load(probe, tensors):
        await probe.pause_generation("retract")
        try:
            await probe.reopen_weight_update()
            payload = probe.engine.serialized(list(tensors.items()))
            await probe.control(probe.engine.update_weights_from_tensor([payload]))
            await probe.end_weight_update()
            await probe.flush_cache()
        finally:
            await probe.continue_generation()

    try:
        ask(server.url, tiny_moe_dir, lambda probe: load(probe, swapped))
        answer = doctor(server.url, "--model", tiny_moe_dir)
    finally:
        ask(server.url, tiny_moe_dir, lambda probe: load(probe, right))
    ((name, numbers),) = [(finding["name"], finding["numbers"]) for finding in answer.findings]
    # Less than four times what 16 bits would do, and the server computes in 32.
    assert name == "another_checkpoint" and numbers["max"] > 1e-2


def test_quick_check_when_the_cache_is_older_than_the_weights_then_stale_prefix_cache(
    engine_server, tiny_moe_dir
):
    engine, server = engine_server

    async def scenario(probe):
        weights = TemporaryWeights(
            probe, read_tensors(tiny_moe_dir, [FIRST_NORM]), ranks=1, version="default"
        )
        before = await quick_check(probe.client)  # leaves the probe prompt in the cache
        await probe.pause_generation("in_place")  # which keeps the cache
        async with weights.scaled(FIRST_NORM, 4.0, "pushed", flush=False):
            await probe.continue_generation()
            during = await quick_check(probe.client)
        return before, during, await quick_check(probe.client)

    before, during, after = ask(server.url, tiny_moe_dir, scenario)
    assert before == after == []
    [finding] = [finding for finding in during if finding.name == "stale_prefix_cache"]
    # Of 83 ids: one time in ten another prompt of the check begins as one that is cached, and is
    # decoded on stale keys.
    assert {finding.name for finding in during} <= {"stale_prefix_cache", "decode_prefill_difference"}
    assert finding.kind == "objective" and finding.remedy == load_engine(engine).remedies[finding.name]


def test_servers_when_one_command_asks_both_engines_then_each_in_its_words_and_their_scores_agree(
    sglang_server_fp32, vllm_server_fp32, capsys
):
    urls = [sglang_server_fp32.url, vllm_server_fp32.url]
    assert cli.main(["doctor", "--json", *(word for url in urls for word in ("--url", url))]) == 0
    servers = json.loads(capsys.readouterr().out)["servers"]
    first, second = ({row["check"]: row for row in server["rows"]} for server in servers)
    assert first["version"]["message"].startswith("SGLang ") and second["version"]["message"].startswith(
        "vLLM "
    )
    assert second["servers"]["status"] == "ok" and second["servers"]["numbers"]["max"] < 1e-5
