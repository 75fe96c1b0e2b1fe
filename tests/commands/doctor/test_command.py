"""The doctor's command line, and its questions to servers that answer badly."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from megatron_rl_corr import cli
from megatron_rl_corr.commands.doctor.command import run
from megatron_rl_corr.commands.doctor.weight_change import read_tensors, uninterrupted
from megatron_rl_corr.doctor.probe import Probe
from megatron_rl_corr.rollout import RolloutProtocolError, RolloutServerError
from tools.local_server import free_port

ROOT = Path(__file__).resolve().parents[3]


def test_help_when_asked_then_nothing_heavy_is_loaded():
    code = """
import sys
from megatron_rl_corr import cli
try:
    cli.main(["doctor", "--help"])
finally:
    print("loaded", [name for name in ("torch", "numpy", "aiohttp", "transformers") if name in sys.modules])
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "--expect-routed-experts" in result.stdout and "loaded []" in result.stdout


def test_doctor_when_nobody_listens_then_2_and_the_url_and_endpoint_but_no_key(capsys, monkeypatch):
    monkeypatch.setenv("DOCTOR_KEY", "s3cret")
    url = f"http://127.0.0.1:{free_port()}"
    flags = ["--vocab-size", "10", "--api-key-env", "DOCTOR_KEY", "--json"]
    assert cli.main(["doctor", "--url", url, *flags]) == 2
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)["servers"][0]["rows"]
    assert row["status"] == "failed" and f"{url} did not answer GET /" in row["message"]
    assert "connection refused" in row["message"] and "s3cret" not in printed.out + printed.err


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--timeout", "0"], "--timeout must be positive, got 0"),
        (
            ["--api-key-env", "DOCTOR_NO_SUCH"],
            "--api-key-env names DOCTOR_NO_SUCH, which is not set; export it",
        ),
        (
            ["--model", "/nowhere"],
            "--model: /nowhere is not a Hugging Face model folder: it has no config.json",
        ),
        (["--temperature", "-1"], "`temperature` must be 0 (greedy) or positive"),
        (["--top-p", "0.9", "--engine", "sglang"], "`top_p` below 1 needs a `top_k`"),
        (["--url", "http://127.0.0.1:1"], "a server address is given twice"),
    ],
)
def test_doctor_when_a_flag_is_wrong_then_2_and_one_line_that_names_it(capsys, flags, words):
    assert cli.main(["doctor", "--url", "http://127.0.0.1:1", *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("megatron-rl-corr doctor: error: ") and words in printed.err


def test_doctor_when_interrupted_then_130(capsys, monkeypatch):
    async def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_rl_corr.commands.doctor.command._examine", interrupted)
    arguments = cli._parser().parse_args(["doctor", "--url", "http://127.0.0.1:1"])
    assert run(arguments) == 130 and "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("cancellations", [0, 1, 3])
def test_uninterrupted_when_the_caller_is_cancelled_then_the_work_ends_before_it_is_raised(cancellations):
    done = []

    async def work():
        for step in range(5):
            await asyncio.sleep(0.01)
            done.append(step)

    async def scenario():
        task = asyncio.create_task(uninterrupted(work()))
        for _ in range(cancellations):
            await asyncio.sleep(0.005)
            task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(scenario()) is (cancellations > 0)
    assert done == [0, 1, 2, 3, 4]


def test_uninterrupted_when_the_work_fails_then_its_error_whether_cancelled_or_not():
    async def work():
        await asyncio.sleep(0.01)
        raise ValueError("not put back")

    async def scenario(cancel):
        task = asyncio.create_task(uninterrupted(work()))
        await asyncio.sleep(0)
        if cancel:
            task.cancel()
        await asyncio.wait([task])
        return task.exception()

    for cancel in (False, True):
        assert str(asyncio.run(scenario(cancel))) == "not put back"


# Questions to a server that misbehaves; its vocabulary has 10 ids


def rows_of(*ids):
    return [[-1.0 - i, token, None] for i, token in enumerate(ids)]


def sampled(**changes):
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": rows_of(3, 9),
        "output_top_logprobs": [[[-0.5, 4, None]], [[-2.0, 9, None]]],
    }
    return {"output_ids": [3, 9], "meta_info": meta | changes}


def scored(ids, **changes):
    meta = {
        "finish_reason": {"type": "length"},
        "cached_tokens": 1,
        "input_token_logprobs": [[None, 1, None], *rows_of(*ids)],
        "input_top_logprobs": [None, [[-0.5, 4, None]], [[-0.5, 4, None]]],
    }
    return {"output_ids": [0], "meta_info": meta | changes}


def ask(faulty, answer, question):
    """`await question(probe)` where every /generate is answered with `answer`; the request is
    in answer["sent"].
    """

    async def handle(request):
        answer["sent"] = await request.json()
        return web.json_response({k: v for k, v in answer.items() if k != "sent"})

    return faulty.run(lambda client: question(Probe(client, client.base_urls[0])), handle)


def test_generate_when_answered_well_then_logprobs_and_likeliest_in_order(faulty):
    answer = sampled()
    got = ask(
        faulty, answer, lambda probe: probe.generate([1], 2, temperature=2.0, top_p=0.5, request_id="x")
    )
    assert got.output == [3, 9] and got.logprobs.tolist() == [-1, -2]
    assert got.top.tolist() == [[-0.5], [-2]] and got.top_ids.tolist() == [[4], [9]]
    sent = answer["sent"]
    assert sent["rid"] == "x" and sent["return_logprob"] is True
    assert {
        "temperature": 2.0,
        "top_p": 0.5,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "min_p": 0.0,
    }.items() <= (sent["sampling_params"].items())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"output_token_logprobs": rows_of(3, 8)}, "are of different tokens"),
        ({"output_token_logprobs": None}, "are of different tokens"),
        ({"output_top_logprobs": [[[-1.0, 4, None]]]}, "are of different tokens"),
        ({"output_token_logprobs": [[None, 3, None], [-1.0, 9, None]]}, "1 of 2 log-probs are not finite"),
        ({"output_token_logprobs": [3, 9]}, "missing or malformed"),
    ],
)
def test_generate_when_logprobs_are_of_something_else_then_error_names_the_endpoint(faulty, changes, words):
    with pytest.raises(RolloutProtocolError, match="/generate") as error:
        ask(faulty, sampled(**changes), lambda probe: probe.generate([1], 2))
    assert words in str(error.value)


def test_generate_when_the_request_failed_then_server_error_and_an_empty_abort_is_an_answer(faulty):
    failed = sampled(
        finish_reason={"type": "abort", "status_code": 400, "err_type": "BadRequest", "message": "no"}
    )
    with pytest.raises(RolloutServerError, match="BadRequest"):
        ask(faulty, failed, lambda probe: probe.generate([1], 2))
    empty = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
    got = ask(faulty, empty, lambda probe: probe.generate([1], 2))
    assert got.output == [] and got.logprobs.shape == (0,) and got.top.shape == (0, 0)


def test_generate_when_the_vocabulary_has_no_such_id_then_the_error_says_so(faulty):
    outside = {"output_token_logprobs": rows_of(3, 10)}
    with pytest.raises(RolloutProtocolError, match="it sampled id 10, and the model has 10 ids: serve it"):
        ask(faulty, sampled(**outside) | {"output_ids": [3, 10]}, lambda probe: probe.generate([1], 2))


def test_score_when_asked_then_the_prompt_is_computed_anew(faulty):
    answer = scored([3, 9])
    got = ask(faulty, answer, lambda probe: probe.score([1, 2], [3, 9]))
    assert got.logprobs.tolist() == [-1, -2] and got.top[:, 0].tolist() == [-0.5, -0.5]
    assert answer["sent"]["input_ids"] == [1, 2, 3, 9] and answer["sent"]["logprob_start_len"] == 0


def test_score_when_the_last_id_of_the_vocabulary_is_called_0_then_its_logprob_is_taken(faulty):
    got = ask(faulty, scored([3, 0]), lambda probe: probe.score([1, 2], [3, 9]))
    assert got.logprobs.tolist() == [-1, -2]
    with pytest.raises(RolloutProtocolError, match="other ids"):
        ask(faulty, scored([0, 9]), lambda probe: probe.score([1, 2], [3, 9]))


def test_probe_when_an_id_is_outside_the_vocabulary_then_nothing_is_sent(faulty):
    answer = sampled()
    with pytest.raises(ValueError, match="token id 10"):
        ask(faulty, answer, lambda probe: probe.score([1], [10]))
    assert "sent" not in answer


@pytest.mark.parametrize("vocab_size", [1, 2, 10, 83, 151_936])
def test_prompts_when_made_then_inside_the_vocabulary_and_the_fixed_one_the_same(faulty, vocab_size):
    async def question(client):
        probe = Probe(client, client.base_urls[0])
        assert probe.fixed_prompt() == probe.fixed_prompt()
        for prompt in (probe.fixed_prompt(), *(probe.fresh_prompt() for _ in range(20))):
            assert len(prompt) == 24 and min(prompt) >= 0 and max(prompt) < min(vocab_size, 1000)

    faulty.run(question, faulty.good, vocab_size=vocab_size)


def test_read_tensors_when_a_weight_is_missing_then_its_name(tiny_moe_dir, tmp_path):
    name = "model.norm.weight"
    assert (
        list(read_tensors(tiny_moe_dir, [name])) == [name]
        and read_tensors(tiny_moe_dir, [name])[name].numel() == 64
    )
    with pytest.raises(ValueError, match="no.such.weight"):
        read_tensors(tiny_moe_dir, ["no.such.weight"])
    with pytest.raises(ValueError, match="has no config.json"):
        read_tensors(tmp_path, [name])
    shutil.copy(tiny_moe_dir / "config.json", tmp_path)
    with pytest.raises(ValueError, match="model.safetensors"):
        read_tensors(tmp_path, [name])
