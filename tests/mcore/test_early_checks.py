"""What is looked at before Megatron is imported: what it finds, and what it leaves to the later checks."""

import json
import os

import numpy
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from megatron_rl_corr.config import flags
from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.mcore.checks.early_checks import EarlyChecks
from tests.test_launch import REQUIRED, write_inputs


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)


def found(only_checked=False, **changed):
    """What is wrong with a command line; changed: flags by their words, None leaves one out."""
    given = REQUIRED | {f"--rollout-{name.replace('_', '-')}": value for name, value in changed.items()}
    words = [part for flag, value in given.items() if value is not None for part in (flag, *value.split(" "))]
    problems = Problems()
    config, options = flags.read(words, problems)
    EarlyChecks(config, options, only_checked=only_checked).collect(problems)
    return [flags.name_flags(text) for text in problems.found]


def write(name, text):
    with open(name, "w", encoding="utf-8") as file:
        file.write(text)
    return name


def test_command_line_when_nothing_is_wrong_then_nothing_is_told():
    folders = {name: f"out/{name}" for name in ("save_trajectories", "trace", "save_hf")}
    assert found(**folders, eval_prompts="prompts.jsonl", environment="reward.py:reward") == []
    assert found(rank=None, correction_preset="decoupled_token_is", loss="reward.py:reward") == []


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "p: no prompts in it; expected one JSON object a line"),
        ("\n \n", "p: no prompts in it; expected one JSON object a line"),
        ("\n{\n", "p:2: not JSON: "),
        ("[1]\n", "p:1: expected a JSON object, got list"),
        ('\ufeff{"input_ids": [1]}\n', None),
        ('{"text": "a"}\n', "p:1: expected one of input_ids, prompt, messages, got "),
        ('{"prompt": null, "messages": null}\n', "p:1: expected one of input_ids, prompt, messages"),
        ('{"prompt": "a"}\n{broken\n', None),  # a later row is for the check of all of them
    ],
)
def test_prompts_when_their_first_row_can_not_be_used_then_told(text, told):
    answer = found(prompts=write("p", text))
    assert (
        answer == []
        if told is None
        else [one.startswith(f"--rollout-prompts: {told}") for one in answer] == [True]
    )


def test_prompts_when_their_keys_are_others_then_told_of_rows_and_of_columns():
    pq.write_table(pa.table({"question": ["a"], "extra": [{"answer": "1"}]}), "d.parquet")
    write("d.jsonl", '{"question": "a", "extra": {"answer": "1"}}\n')
    for path, place in (("d.parquet", "d.parquet: row 0"), ("d.jsonl", "d.jsonl:1")):
        assert found(prompts=path, input_key="question", label_key="extra.answer") == []
        assert found(prompts=path, input_key="questoin") == [
            f"--rollout-prompts: {place}: no key \"questoin\"; the row has ['extra', 'question']"
        ]
        [missing] = found(prompts=path)
        assert missing.startswith(
            f"--rollout-prompts: {place}: expected one of input_ids, prompt, messages, got the"
        )
        [label] = found(prompts=path, input_key="question", label_key="label")
        assert f'{place}: no key "label"' in label


def test_prompts_when_several_paths_are_wrong_then_each_is_told_once_held_out_ones_too():
    os.mkdir("empty")
    write("p.gz", "\x1f")
    with open("p.gz", "wb") as file:
        file.write(b"\x1f\x8b\x08")
    answer = found(prompts="gone prompts.jsonl empty p.gz", eval_prompts="a=gone2 b=prompts.jsonl")
    assert [one.split(": ")[:2] for one in answer] == [
        ["--rollout-prompts", "gone"],
        ["--rollout-prompts", "empty"],
        ["--rollout-prompts", "p.gz"],
        ["--rollout-eval-prompts", "gone2"],
    ]


def test_functions_when_several_are_wrong_then_each_with_its_flag():
    write("bad.py", "def f(:\n")
    answer = found(
        reward_function="gone.py:r bad.py:f math",
        environment="reward.py:Env",
        group_filter="no_such_package:keep",
        loss="gone.py:l",
        advantage="bad.py:a",
    )
    assert [one.split(" ")[0].rstrip(":") for one in answer] == [
        "--rollout-reward-function",
        "--rollout-reward-function",
        "--rollout-environment",
        "--rollout-group-filter",
        "--rollout-loss",
        "--rollout-advantage",
    ]


def test_folders_when_they_can_not_be_written_or_links_are_in_the_way_then_each_is_told():
    os.makedirs("hf")
    os.symlink("model", "hf/iter_0000001")
    answer = found(
        save_hf="hf",
        trace="reward.py/t",
        save_trajectories="reward.py/s",
        weight_transport="disk",
        weight_dir="reward.py/w",
    )
    assert [one.split(" ")[0] for one in answer] == [
        "--rollout-weight-dir",
        "--rollout-save-trajectories",
        "--rollout-save-hf",
        "--rollout-trace",
    ]
    assert "iter_0000001 in it is a link to model" in answer[2]


def test_other_checkpoints_when_they_are_wrong_then_told_with_their_own_flags():
    os.mkdir("reference")
    write("reference/config.json", "{}")
    save_file({"a": numpy.zeros(1)}, "reference/part.safetensors")
    write(
        "reference/model.safetensors.index.json",
        json.dumps({"weight_map": {"a": "part.safetensors", "b": "lost"}}),
    )
    answer = found(reference_checkpoint="reference", kl_loss_coef="0.1", quantized_checkpoint="nowhere")
    assert [one.split(" ")[0].rstrip(":") for one in answer] == [
        "--rollout-quantized-checkpoint",
        "--rollout-reference-checkpoint",
    ]
    assert "reference/lost can't be read as safetensors" in answer[1]


def test_replay_when_its_folder_is_wrong_then_told_and_nothing_of_prompts():
    without = {"url": None, "prompts": None, "reward_function": None}
    assert found(**without, replay="gone") == [
        "--rollout-replay: no such folder: gone; give the one that --rollout-save-trajectories named"
    ]
    [empty] = found(**without, replay="model")
    assert empty.startswith("--rollout-replay: model has no sample file")


def test_checks_when_a_flag_was_refused_then_those_of_it_are_left_out_and_others_run():
    answer = found(eval_prompts="gone", eval_samples="0", prompts="gone2", temperature="0")
    assert [one.split(" ")[0].rstrip(":") for one in answer] == [
        "--rollout-temperature",
        "--rollout-eval-samples",
        "--rollout-prompts",
    ]


def test_functions_when_something_else_of_the_reward_is_refused_then_their_files_are_told_all_the_same():
    write("bad.py", "def f(:\n")
    for changed, flag in (
        ({"max_new_tokens": "0"}, "--rollout-max-new-tokens"),
        ({"reward_weights": "1 2 3"}, "--rollout-reward-weights"),
        ({"reward_url": "ftp://x"}, "--rollout-reward-url"),
    ):
        answer = found(reward_function="gone.py:r bad.py:f", **changed)
        assert [one.split(" ")[0].rstrip(":") for one in answer] == [
            flag,
            *["--rollout-reward-function"] * 2,
        ], answer


def test_prompts_when_both_keys_are_others_then_both_are_told():
    pq.write_table(pa.table({"question": ["a"]}), "d.parquet")
    for path in ("prompts.jsonl", "d.parquet"):
        [answer] = found(prompts=path, input_key="questoin", label_key="anwser")
        assert 'no key "questoin"' in answer and 'no key "anwser"' in answer


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"top_p": "1.5"}, ["--rollout-top-p must be from 0 to 1, got 1.5"]),
        ({"top_p": "0", "top_k": "50"}, ["--rollout-top-p must be positive"]),
        (
            {"top_k": "1", "min_p": "1"},
            ["--rollout-top-k must be -1 (off) or at least 2, got 1", "--rollout-min-p must be in [0, 1)"],
        ),
        ({"temperature": "inf"}, ["--rollout-temperature must be finite, got inf"]),
        ({"top_p": "0.9", "top_k": "50", "min_p": "0.05", "temperature": "0.7"}, []),
    ],
)
def test_sampling_when_it_is_none_then_it_is_told_before_anything_heavy_is_imported(flags, told):
    answer = found(**flags)
    assert len(answer) == len(told) and all(map(str.startswith, answer, told)), answer


def test_replay_when_flags_have_no_effect_then_those_alone_that_were_given():
    given = {
        "reward_url": "http://a:1/r",
        "environment": "reward.py:reward",
        "group_filter": "reward.py:reward",
    }
    for more in ({}, {"truncated_samples": "cut"}):
        answer = found(replay="model", **given, **more)
        idle = sorted(one.split(" ")[0] for one in answer if "has no effect with --rollout-replay" in one)
        names = ("environment", "group-filter", "prompts", "reward-function", "reward-url", "url")
        assert idle == [f"--rollout-{name}" for name in names], answer
    assert any(one.startswith("--rollout-truncated-samples must be one of") for one in answer)
