"""What a patched Megatron calls while it is imported, where nothing heavy may happen yet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_launch import write_inputs

ROOT = Path(__file__).resolve().parents[1]
CODE = (
    "import sys; from megatron_rl_corr import plugin; {before}; plugin.load(); "
    "print(sorted({{'torch', 'megatron'}} & set(sys.modules)))"
)


GIVEN = {
    "--rollout-hf-checkpoint": "model",
    "--rollout-prompts": "prompts.jsonl",
    "--rollout-reward-function": "reward.py:reward",
    "--rollout-url": "http://a:1",
}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    """What GIVEN names is in the working folder."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)


def given(**changed):
    """The command line of GIVEN; changed: flags by their words, None leaves one out."""
    flags = GIVEN | {f"--rollout-{name.replace('_', '-')}": value for name, value in changed.items()}
    return tuple(word for flag, value in flags.items() if value is not None for word in (flag, value))


def load(*arguments, before="pass", rank="0"):
    return subprocess.run(
        [sys.executable, "-c", CODE.format(before=before), *arguments],
        env=os.environ | {"RANK": rank, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("flag", ["-h", "--help", "--rollout-corr-describe"])
def test_load_when_only_a_description_is_asked_for_then_nothing_is_read_or_replaced(flag):
    assert load("--rollout-nonsense", flag).stdout == "[]\n"


def test_load_when_the_launcher_has_begun_then_nothing_is_done_again():
    begun = "plugin.prepare(['--perform-rl-step', '--rl-inference-logprobs-is-correction'])"
    assert load("--rollout-nonsense", before=begun).stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (given(hf_checkpoint=None), "--rollout-hf-checkpoint is required; see --help"),
        (given(url=None), "--rollout-url is required; see --help"),
        (given(iss="token"), "unknown flag --rollout-iss; did you mean --rollout-is?"),
        (given(url="htp://a:1"), "--rollout-url: a server address is http://HOST:PORT or https://HOST:PORT"),
        (given(correction_config="nowhere.yaml"), "--rollout-correction-config nowhere.yaml cannot be read:"),
        (("--perform-rl-step",), "--perform-rl-step needs --rl-inference-logprobs-is-correction beside it"),
    ],
)
def test_load_when_flags_are_wrong_then_one_line_on_one_rank_and_status_2(arguments, told):
    first, second = load(*arguments), load(*arguments, rank="1")
    assert first.returncode == second.returncode == 2
    assert first.stderr.startswith(f"MEGATRON_RL_CORR: {told}") and first.stderr.count("\n") == 1
    assert first.stdout == second.stdout == second.stderr == ""


@pytest.mark.parametrize("name", ["metrics.jsonl", "experts.jsonl", "run.json", "tensorboard"])
def test_load_when_something_else_is_in_the_place_of_what_a_run_writes_then_refused_at_the_start(
    name, tmp_path
):
    path = tmp_path / name
    if name == "tensorboard":
        path.write_text("")
    elif name == "experts.jsonl":
        os.mkfifo(path)  # to open one without a reader would hang
    else:
        path.mkdir()
    done = load(*given(log_dir=str(tmp_path)), "--rollout-pad-sequences")
    kind = "folder" if name == "tensorboard" else "plain file"
    assert done.returncode == 2 and done.stderr == (
        f"MEGATRON_RL_CORR: --rollout-log-dir: {path} is no {kind}; remove it, or name another folder\n"
    )


def test_warnings_when_a_module_of_this_package_logs_them_then_with_flags_in_place_of_fields():
    code = (
        "import logging; from megatron_rl_corr import plugin; plugin.name_flags_in_logs()\n"
        "for name in ('megatron_rl_corr.weight_sync.verify', 'somebodys.megatron_rl_corr'):\n"
        "    logging.getLogger(name).warning('%s: use `verify_push` %s', 'http://a:1', 'off')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == [
        "http://a:1: use --rollout-verify-push off",
        "http://a:1: use `verify_push` off",
    ]
