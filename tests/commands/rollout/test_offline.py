"""`megatron-rl-corr rollout` on a real server: files, summary, failures, what it does not import."""

import json
import re
import subprocess
import sys
import types

import pytest

from megatron_rl_corr import cli
from megatron_rl_corr.commands.rollout import offline
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.rollout.sample_file import read_batch, read_sampling, read_trajectories

REWARD = """
def reward(sample):
    if sample.metadata.get("fails"):
        raise RuntimeError("no verifier for this one")
    return {"score": len(sample.output_ids) / 8, "even": sum(i % 2 == 0 for i in sample.output_ids)}
"""


@pytest.fixture
def command(sglang_server_fp32, tiny_moe_dir, tmp_path):
    """The command's arguments for six prompts, one of whose rewards fails."""
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"input_ids": [3, 1, n], "label": f"{n}", "fails": n == 2} for n in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "rollout",
        "--url",
        sglang_server_fp32.url,
        "--hf-checkpoint",
        str(tiny_moe_dir),
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--reward-function",
        f"{tmp_path / 'reward.py'}:reward",
        "--reward-workers",
        "0",
        "--group-size",
        "2",
        "--max-new-tokens",
        "8",
        "--out",
        str(tmp_path / "out"),
    ]


def test_command_when_run_then_each_row_once_in_files_and_a_summary(command, tmp_path, capsys):
    assert cli.main([*command, "--temperature", "0.8"]) == 0
    printed = capsys.readouterr().out
    [path] = (tmp_path / "out").iterdir()
    samples = list(read_trajectories(path))
    assert sorted(sample.origin.row for sample in samples) == [0, 0, 1, 1, 3, 3, 4, 4, 5, 5]
    assert all(sample.origin.label == str(sample.origin.row) for sample in samples)
    assert [sample.trajectory.sample_index for sample in samples] == [0, 1] * 5
    assert [sample.trajectory.prompt_index for sample in samples] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    for sample in samples:
        length = sample.trajectory.output_ids.numel()
        assert sample.reward == length / 8 and sample.reward_parts["reward"] == sample.reward
        assert sample.train_logprobs is None and sample.loss_mask is None
    assert read_sampling(path).temperature == 0.8 and read_batch(path).group_size == 2
    mean = sum(sample.reward for sample in samples) / 10
    assert "10 samples of 5 prompts in " in printed and f"mean reward {mean:.4f}" in printed
    assert re.search("failed: reward_error [12]; groups lost 1; rows left out 0", printed)
    # The samples can be read, and a second run does not mix its own with them.
    assert cli.main(["samples", str(tmp_path / "out"), "--ids", "--limit", "1"]) == 0
    assert "D is not known" in capsys.readouterr().out
    assert cli.main(command) == 2 and "has sample files already; give a new folder" in capsys.readouterr().err


def test_command_when_prompts_are_counted_then_so_many(command, tmp_path, capsys):
    assert cli.main([*command, "--groups", "2", "--seed", "7", "--on-failed-reward", "-1"]) == 0
    assert "4 samples of 2 prompts" in capsys.readouterr().out


def test_command_when_an_argument_is_wrong_then_its_own_flag_is_named(command, capsys):
    for change, words in (
        (["--top-p", "0.5"], "--top-p below 1 needs a --top-k"),
        (["--groups", "0"], "--groups must be at least 1"),
        (["--max-turns", "2"], "--max-turns 2 has no effect"),
    ):
        assert cli.main([*command, *change]) == 2
        assert words in capsys.readouterr().err


def test_command_when_the_server_can_not_sample_so_then_refused_before_it_samples(
    command, vllm_server_fp32, capsys
):
    assert cli.main([*command, "--url", vllm_server_fp32.url, "--top-k", "5"]) == 2
    error = capsys.readouterr().err
    assert (
        f"{vllm_server_fp32.url}: --top-p 1, --top-k 5" in error
        and "start it with --return-sampling-mask" in error
    )


class Words:
    """A tokenizer with a chat template that shows contents alone."""

    has_template = True
    bos_id = eos_id = None

    def encode(self, text, special_tokens=True):
        return [1, 2]

    def render(self, messages, tools):
        return "".join(f"<{one['role']}>{one['content']}" for one in messages)


def test_prompts_when_rows_have_what_the_model_does_not_see_then_lines_say_so(
    tmp_path, tiny_moe_dir, capsys, monkeypatch
):
    user = {"role": "user", "content": "1+1", "weight": 1}
    rows = [
        {"prompt": 7},
        {"messages": [user]},
        {"messages": [user], "tools": [{"name": "f"}]},
        {"prompt": "2"},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(offline, "Tokenizer", types.SimpleNamespace(from_folder=lambda folder: Words()))
    options = RunConfig(
        urls=("http://127.0.0.1:9",),
        hf_checkpoint=str(tiny_moe_dir),
        prompts=(str(tmp_path / "p.jsonl"),),
        reward_function=("length",),
        max_new_tokens=8,
    )
    offline.OfflineRun(options, tmp_path / "out")
    assert capsys.readouterr().err.splitlines() == [
        "[rollout] --prompts: messages have weight, which the chat template does not show to the model",
        "[rollout] --prompts: rows have `tools`, which the model does not see; --tools-key tools shows them",
        "[rollout] --prompts: text is tokenised as it is, though the tokenizer has a chat template; "
        "--apply-chat-template makes a user's message of it",
    ]


def test_modules_of_the_command_when_imported_then_neither_megatron_nor_process_groups():
    code = (
        "import sys, megatron_rl_corr.commands.rollout.offline; "
        "print([m for m in sys.modules if m.split('.')[0] == 'megatron' or m.startswith("
        "('megatron_rl_corr.mcore', 'megatron_rl_corr.reduce', 'megatron_rl_corr.weight_sync'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
