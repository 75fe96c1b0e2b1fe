"""`megatron-rl-corr gateway` and `rollout --agent` on a real server."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from megatron_rl_corr import cli
from megatron_rl_corr.rollout.sample_file import read_batch, read_trajectories
from tests.rollout.agents.harness_file import ask
from tests.rollout.agents.model_folder import folder_with_template, write_rows
from tests.rollout.agents.test_harnesses import FILE
from tests.tiers import long, matrix

pytestmark = matrix

USER = {"role": "user", "content": "is it wet?"}


@pytest.fixture(scope="module")
def model(tiny_moe_dir, tmp_path_factory):
    return folder_with_template(tiny_moe_dir, tmp_path_factory.mktemp("agents"))


@contextmanager
def gateway(server, model, *flags):
    """(its base URL, the process, its lines so far)."""
    command = [sys.executable, "-m", "megatron_rl_corr.cli", "gateway", "--url", server.url, "--port", "0"]
    command += ["--hf-checkpoint", str(model), "--max-new-tokens", "8", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    try:
        while not any(line.startswith("OPENAI_BASE_URL=") for line in lines):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        yield lines[-1].strip().partition("=")[2], process, lines
    finally:
        process.kill()
        process.wait()


def delete(base_url, key):
    url = f"{base_url.removesuffix('/v1')}/episodes/{key}"
    with urllib.request.urlopen(urllib.request.Request(url, method="DELETE")) as answer:
        return json.loads(answer.read())


def test_gateway_when_episodes_end_then_files_of_samples(sglang_server_fp32, model, tmp_path):
    out = tmp_path / "out"
    with gateway(sglang_server_fp32, model, "--out", str(out)) as (url, process, _):
        first = ask(url, "any", [USER])
        ask(url, "any", [USER, first, USER])
        ask(url, "other", [USER], temperature=0.5)
        told = delete(url, "any")
        assert (told["requests"], told["turns"], told["branches"], told["problems"]) == (2, 2, 1, [])
        with pytest.raises(urllib.error.HTTPError) as raised:
            delete(url, "any")
        assert raised.value.code == 404
        process.send_signal(signal.SIGTERM)
        printed = process.communicate(timeout=60)[0]
        assert process.returncode == 0 and "overridden {'temperature': 1}" in printed
    one, two = sorted(out.iterdir())
    assert str(one) == told["file"] and read_batch(one).agent_branches == "episode"
    [sample] = read_trajectories(one)
    assert set(sample.trajectory.turn_ids.tolist()) == {-1, 0, 1} and sample.reward is None
    assert sample.trajectory.sampled.sum() <= 16
    [sample] = read_trajectories(two)
    assert sample.trajectory.output_ids.numel() <= 8
    assert cli.main(["samples", str(out), "--ids", "--limit", "1"]) == 0


def test_gateway_when_strict_then_other_sampling_is_refused(sglang_server_fp32, model):
    with gateway(sglang_server_fp32, model, "--strict") as (url, _, _):
        with pytest.raises(urllib.error.HTTPError) as raised:
            ask(url, "any", [USER], temperature=0.5)
        assert raised.value.code == 400
        assert ask(url, "any", [USER], temperature=1.0)["role"] == "assistant"


@long
def test_gateway_when_a_conversation_is_longer_than_the_server_takes_then_the_harness_is_told(
    sglang_server_fp32, model
):
    """And its episode has not failed for that."""
    with gateway(sglang_server_fp32, model) as (url, _, _):
        with pytest.raises(urllib.error.HTTPError) as raised:
            ask(url, "any", [USER | {"content": "is it wet? " * 500}])
        assert raised.value.code == 400 and b"context_length_exceeded" in raised.value.read()
        assert ask(url, "any", [USER])["role"] == "assistant"


@pytest.mark.parametrize("by_command", [False, True])
def test_rollout_when_agents_sample_then_their_episodes_are_written(
    sglang_server_fp32, model, tmp_path, capsys, by_command
):
    rows = [{"do": "turns", "question": f"{n}?"} if n else {"do": "crash"} for n in range(4)]
    write_rows(tmp_path / "prompts.jsonl", *rows)
    agent = ["--agent", f"{FILE}:run"]
    if by_command:
        (tmp_path / "agent.py").write_text(
            "import asyncio, json, os\n"
            "from tests.rollout.agents.harness_file import run\n"
            "task = json.load(open(os.environ['ROLLOUT_TASK']))\n"
            "found = asyncio.run(run(task, os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']))\n"
            "print(json.dumps(found))\n"
        )
        agent = ["--agent-command", f"{sys.executable} {tmp_path / 'agent.py'}"]
    command = ["rollout", "--url", sglang_server_fp32.url, "--hf-checkpoint", str(model), *agent]
    command += ["--prompts", str(tmp_path / "prompts.jsonl"), "--input-key", "messages", "--group-size", "2"]
    command += ["--max-new-tokens", "8", "--out", str(tmp_path / "out"), "--agent-timeout-s", "60"]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "6 samples of 3 prompts" in printed and "mean reward 0.5000" in printed
    assert "agent/steps 2.0000" in printed and "failed: agent 1; groups lost 1" in printed
    [path] = (tmp_path / "out").iterdir()
    samples = list(read_trajectories(path))
    assert len(samples) == 6 and read_batch(path).agent_branches == "episode"
    assert all(sample.reward == 0.5 and sample.origin.row > 0 for sample in samples)
    assert all(set(sample.trajectory.turn_ids.tolist()) == {-1, 0, 1} for sample in samples)


def test_rollout_when_the_file_has_no_such_function_then_its_flag_is_named(
    sglang_server_fp32, model, tmp_path, capsys
):
    write_rows(tmp_path / "prompts.jsonl", {})
    command = [
        "rollout",
        "--url",
        sglang_server_fp32.url,
        "--hf-checkpoint",
        str(model),
        "--agent",
        f"{FILE}:no",
    ]
    command += ["--prompts", str(tmp_path / "prompts.jsonl"), "--input-key", "messages", "--group-size", "2"]
    assert cli.main([*command, "--max-new-tokens", "8", "--out", str(tmp_path / "out")]) == 2
    assert "--agent: " in (error := capsys.readouterr().err) and "has no 'no'" in error
