"""The doctor with an engine that lacks questions: rows that say so, and no traceback."""

import asyncio
import pickle

import pytest
from aiohttp import web

from megatron_rl_corr.commands.doctor.command import as_table
from megatron_rl_corr.commands.doctor.full_check import ask_full
from megatron_rl_corr.commands.doctor.reference_model import ask_model
from megatron_rl_corr.config.run import ENGINES
from megatron_rl_corr.doctor import Examination, Expected, exit_status, questions, quick_check
from megatron_rl_corr.doctor.findings import Row
from megatron_rl_corr.doctor.judgements import judge_version
from megatron_rl_corr.doctor.probe import Probe
from megatron_rl_corr.doctor.questions import ask_quick, ask_same
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.inspection import VersionSupport
from megatron_rl_corr.engines.types import UnsupportedByEngine
from megatron_rl_corr.rollout import RolloutClient

CHECKS = [
    "version",
    "model",
    "weight updates",
    "temperature",
    "top-p",
    "sampling mask",
    "seeds",
    "precision",
    "decode and prefill",
    "repeats",
    "prefix cache",
    "routed experts",
]
SAMPLES = "samples with the likeliest ids: not supported by recorded samples"


@pytest.fixture
def ask_recorded(tmp_path, monkeypatch):
    """ask_recorded(scenario): `await scenario(client)` of an engine that replays two files and
    examines nothing.
    """
    monkeypatch.setitem(ENGINES, "replay_recorded", "tests.engines.replay_recorded")
    paths = [str(tmp_path / name) for name in ("first.jsonl", "second.jsonl")]
    for path in paths:
        open(path, "w").close()

    def ask(scenario):
        async def inner():
            async with RolloutClient(paths, vocab_size=10, engine="replay_recorded") as client:
                return await scenario(client)

        return asyncio.run(inner())

    return ask


def test_quick_when_the_engine_supports_no_question_then_each_row_failed_and_names_it(ask_recorded):
    async def scenario(client):
        probe = Probe(client, client.base_urls[0])
        rows, facts = await ask_quick(probe, Expected())
        same = await ask_same([probe, Probe(client, client.base_urls[1])], [facts, facts])
        return rows, same

    rows, [(url, same)] = ask_recorded(scenario)
    assert [row.check for row in rows] == CHECKS and {row.status for row in rows} == {"failed"}
    messages = {row.check: row.message for row in rows}
    assert messages["version"] == "server_info: not supported by recorded samples"
    assert messages["weight updates"] == "lists of endpoints: not supported by recorded samples"
    assert messages["temperature"] == messages["seeds"] == messages["sampling mask"] == SAMPLES
    assert messages["prefix cache"] == "server_info: not supported by recorded samples"
    assert (same.check, same.status, same.message) == ("servers", "failed", SAMPLES) and url.endswith(
        "second.jsonl"
    )
    examination = Examination(url, rows)
    assert exit_status([examination]) == 2 and f"  FAILED  temperature         {SAMPLES}" in as_table(
        [examination]
    )


def test_quick_check_when_the_engine_supports_no_question_then_no_finding_and_a_warning_for_each(
    ask_recorded, capsys
):
    assert ask_recorded(quick_check) == []
    warned = capsys.readouterr().err.splitlines()
    assert len(warned) == 2 * len(CHECKS) + 1  # of two servers, and their comparison
    assert all(line.startswith("[rollout] ") and " is not checked: " in line for line in warned)


def test_quick_check_when_a_version_was_not_tested_then_a_warning_says_so_and_other_notes_stay_unsaid(
    ask_recorded, capsys, monkeypatch
):
    support = VersionSupport("0.33.0", "0.32.0", note="vLLM 0.33.0 is newer than 0.32.0, the newest tested")
    rows = [judge_version("vLLM", support), Row("sampling mask", "note", "needed only with --rollout-top-p")]

    async def asked(probe, expected):
        return (rows if probe.url.endswith("first.jsonl") else []), None

    async def compared(probes, facts):
        return []

    monkeypatch.setattr(questions, "ask_quick", asked)
    monkeypatch.setattr(questions, "ask_same", compared)
    assert ask_recorded(quick_check) == []
    [warned] = capsys.readouterr().err.splitlines()
    assert warned.startswith("[rollout] ") and warned.endswith(f"first.jsonl: {support.note}")


def test_full_and_model_when_the_engine_supports_no_question_then_rows_say_so(ask_recorded):
    async def scenario(client):
        probe, rows = Probe(client, client.base_urls[0]), []
        _, facts = await ask_quick(probe, Expected())
        await ask_full(probe, facts, None, lambda what: None, rows)
        return rows, await ask_model(probe, False, "no folder", lambda what: None)

    full, model = ask_recorded(scenario)
    assert [(row.check, row.status, row.message) for row in full] == [
        ("pauses and updates", "failed", "lists of models: not supported by recorded samples")
    ]
    assert [(row.check, row.status) for row in model] == [
        ("model difference", "failed"),
        ("tokenizer", "note"),
    ]
    assert model[0].message == SAMPLES
    assert model[1].message.startswith("unknown: recorded samples does not support tokenizing")


class NoScores(type(load_engine("sglang"))):
    """SGLang without scores of given tokens."""

    score = Engine.score


async def certain(request):
    """A server whose model always samples id 5."""
    if request.path != "/generate":
        info = {"version": "0.5.23", "dtype": "float32", "model_path": "m", "weight_version": "default"}
        return web.json_response(info)
    tokens = (await request.json())["sampling_params"]["max_new_tokens"]
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[0.0, 5, None]] * tokens,
        "output_top_logprobs": [[[0.0, 5, None], [-40.0, 4, None]]] * tokens,
    }
    return web.json_response({"output_ids": [5] * tokens, "meta_info": meta})


def test_quick_when_the_engine_lacks_scores_then_only_the_rows_that_need_them_failed(faulty):
    async def scenario(client):
        client.fleet._engines["sglang"] = NoScores()
        return await ask_quick(Probe(client, client.base_urls[0]), Expected())

    rows, facts = faulty.run(scenario, certain)
    failed = {row.check: row.message for row in rows if row.status == "failed"}
    assert set(failed) == {"temperature", "top-p", "decode and prefill", "prefix cache"}
    assert set(failed.values()) == {"scores of given tokens: not supported by SGLang"}
    assert facts.half is False and facts.model.is_initial and facts.plain.output == [5] * 24


def test_quick_when_seeds_are_asked_for_then_no_other_request_is_under_way(faulty):
    beside, under_way = [], {}

    async def noting(request):
        body = await request.json() if request.path == "/generate" else {}
        under_way[id(request)] = "sampling_seed" in body.get("sampling_params", {})
        await asyncio.sleep(0.05)
        beside.append(list(under_way.values()))
        try:
            return await certain(request)
        finally:
            del under_way[id(request)]

    async def scenario(client):
        client.fleet._engines["sglang"] = NoScores()
        return await ask_quick(Probe(client, client.base_urls[0]), Expected())

    faulty.run(scenario, noting)
    with_seeds = [seeded for seeded in beside if any(seeded)]
    assert max(map(len, with_seeds)) == 4 and all(all(seeded) for seeded in with_seeds)
    assert max(map(len, beside)) > 4  # the rest are asked at once


def test_unsupported_when_pickled_then_the_same_message():
    error = UnsupportedByEngine("recorded samples", "checksums")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error) == "recorded samples does not support checksums; use another engine, or leave it out"
