"""The launcher's command line as a user meets it: help at once, a wrong flag in one line, on one rank."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[1]
REQUIRED = {
    "--rollout-url": "http://127.0.0.1:30000",
    "--rollout-hf-checkpoint": "model",
    "--rollout-prompts": "prompts.jsonl",
    "--rollout-reward-function": "reward.py:reward",
}
"""Paths are in the folder of the fixture `script`."""


def write_inputs(folder: Path) -> None:
    """What REQUIRED names."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    save_file({"a": numpy.zeros(2)}, folder / "model/model.safetensors")
    (folder / "prompts.jsonl").write_text('{"prompt": "1 + 1"}\n')
    (folder / "reward.py").write_text("def reward(sample):\n    return 1.0\n")


def run(
    *arguments: str, rank: str | None = None, code: str | None = None, **variables: str
) -> subprocess.CompletedProcess:
    command = ["-c", code] if code else ["-m", "megatron_rl_corr.launch", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    environment.pop("RANK", None)
    if rank is not None:
        environment["RANK"] = rank
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=60
    )


def flags(without: str = "", **more: str) -> list[str]:
    given = {name: value for name, value in REQUIRED.items() if name != without}
    given |= {"--" + name.replace("_", "-"): value for name, value in more.items()}
    return [part for pair in given.items() for part in pair]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("script")
    write_inputs(made)
    return made


@pytest.fixture(autouse=True)
def _in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def script(folder) -> str:
    """A script that must never be reached."""
    path = folder / "pretrain_gpt.py"
    path.write_text("raise SystemExit('the script ran')\n")
    return str(path)


def test_help_when_asked_then_under_a_second_of_work_and_nothing_heavy_imported():
    # The heavy names are gone from sys.modules only if the help never imported them; the clock
    # is this process's.
    code = """
import resource, sys
from megatron_rl_corr import launch

status = launch.main(["--help"])
used = resource.getrusage(resource.RUSAGE_SELF)
print(
    "status", status, "heavy", [n for n in ("torch", "numpy", "megatron", "transformers") if n in sys.modules]
)
print("seconds", used.ru_utime + used.ru_stime, file=sys.stderr)
"""
    result = run(code=code)
    assert result.returncode == 0, result.stderr
    assert "status 0 heavy []" in result.stdout
    assert "torchrun [...] -m megatron_rl_corr.launch SCRIPT.py" in result.stdout
    for flag in (*REQUIRED, "--rollout-is-threshold", "--rollout-rs", "--rollout-log-dir"):
        assert flag in result.stdout
    assert float(result.stderr.split()[1]) < 1.0


def test_help_when_asked_after_the_script_then_ours_and_where_the_rest_is(script):
    result = run(script, "--num-layers", "2", "--help")
    assert result.returncode == 0
    assert "--rollout-url" in result.stdout and "Megatron's: run it without the launcher" in result.stdout
    assert "the script ran" not in result.stdout + result.stderr


def test_command_when_empty_then_usage_and_status_2():
    result = run()
    assert result.returncode == 2 and result.stdout.startswith("usage: torchrun")


@pytest.mark.parametrize("number", ["", "0", "four", "--num-layers"])
def test_check_when_the_number_of_processes_is_missing_then_one_line_and_status_2(script, number):
    result = run(script, *flags(), "--rollout-corr-check", *([number] if number else []))
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == (
        "megatron_rl_corr.launch: --rollout-corr-check takes the number of processes that would train, and "
        f"a script; got {number!r}\n"
    )


def test_check_when_a_flag_of_ours_is_wrong_then_told_before_anything_heavy(script):
    result = run("--rollout-corr-check", "4", script, *flags(rollout_is="tokens"))
    assert result.returncode == 2 and "--rollout-is" in result.stderr


def test_check_when_the_last_ranks_folder_can_not_be_made_then_refused_by_the_one_process(script):
    result = run("--rollout-corr-check", "4", script, *flags(rollout_log_dir=script))
    assert result.returncode == 2 and f"--rollout-log-dir {script} can't be made" in result.stderr


def test_script_when_it_is_not_there_then_its_name_and_status_2():
    result = run("pretrain_gtp.py", *flags())
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == (
        "megatron_rl_corr.launch: there is no script pretrain_gtp.py; "
        "the first argument names a Megatron pretrain script\n"
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            flags(rollout_is="token", rollout_is_threshold="-1"),
            "--rollout-is-threshold upper bound must be positive, got -1; "
            "use --rollout-is none to disable the weights",
        ),
        (flags(without="--rollout-prompts"), "--rollout-prompts is required; see --help"),
        (
            flags(rollout_max_new_token="3"),
            "unknown flag --rollout-max-new-token; did you mean --rollout-max-new-tokens?",
        ),
        (
            flags(rollout_url="htp://127.0.0.1:30000"),
            "--rollout-url: a server address is http://HOST:PORT or https://HOST:PORT, got "
            "'htp://127.0.0.1:30000'",
        ),
        (
            flags(rollout_url="127.0.0.1:30000"),
            "--rollout-url: a server address is http://HOST:PORT or https://HOST:PORT, got '127.0.0.1:30000'",
        ),
        (
            flags(rollout_url="http://u:secret@a:1"),
            "--rollout-url: the address of a:1 must not hold a password; name the environment variable of "
            "the key in --rollout-api-key-env",
        ),
        (
            flags(rollout_reference_url="http://b:30000x", rollout_kl_loss_coef="0.1"),
            "--rollout-reference-url: a server address is http://HOST:PORT or https://HOST:PORT, got "
            "'http://b:30000x'",
        ),
        (
            flags(yaml_cfg="megatron.yaml"),
            "--yaml-cfg replaces every flag, the rollout ones too; give Megatron's settings as flags",
        ),
        (
            flags(rollout_correction_config="nowhere.yaml"),
            "--rollout-correction-config nowhere.yaml cannot be read: No such file or directory",
        ),
    ],
)
def test_flags_when_wrong_then_one_line_on_rank_0_and_status_2(script, arguments, words):
    result = run(script, "--num-layers", "2", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"megatron_rl_corr.launch: {words}\n"


def test_flags_when_wrong_on_another_rank_then_it_leaves_the_telling_to_rank_0(script):
    told = run(script, *flags(rollout_is="tokens"), rank="0")
    assert told.returncode == 2 and told.stderr.count("\n") == 1
    silent = run(script, *flags(rollout_is="tokens"), rank="3")
    assert (silent.returncode, silent.stdout, silent.stderr) == (2, "", "")


MISTAKES = {
    "number": (["--rollout-group-size", "x"], "--rollout-group-size: invalid int value: 'x'"),
    "file": (
        ["--rollout-prompts", "nowhere.jsonl"],
        "--rollout-prompts: nowhere.jsonl: there is no such file",
    ),
    "function": (
        ["--rollout-reward-function", "reward.py:rewrad"],
        "--rollout-reward-function: reward.py has no ",
    ),
    "preset": (["--rollout-correction-preset", "tis"], "--rollout-correction-preset: unknown preset 'tis'"),
    "folder": (["--rollout-log-dir", "reward.py/logs"], "--rollout-log-dir reward.py/logs can't be made: "),
    "written": (
        ["--rollout-save-trajectories", "reward.py/s"],
        "--rollout-save-trajectories reward.py/s can't be ",
    ),
    "address": (
        ["--rollout-url", "a:30000"],
        "--rollout-url: a server address is http://HOST:PORT or https://",
    ),
    "model": (
        ["--rollout-hf-checkpoint", "nowhere"],
        "--rollout-hf-checkpoint: nowhere is not a Hugging Face",
    ),
}
"""Name -> (flags, how what is told of them begins)."""
ALL_AT_ONCE = """
import resource, sys
from megatron_rl_corr import launch
status = launch.main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print("status", status, "heavy", [n for n in ("torch", "megatron", "transformers") if n in sys.modules])
print("seconds", used.ru_utime + used.ru_stime)
"""


def told(result) -> list[str]:
    """The problems of a report, without their numbers."""
    head, *lines = result.stderr.splitlines()
    if not lines:
        return [head.removeprefix("megatron_rl_corr.launch: ")]
    assert head == f"megatron_rl_corr.launch: {len(lines)} problems:"
    found = [line.strip().partition(". ") for line in lines]
    assert [number for number, _, _ in found] == [str(number + 1) for number in range(len(lines))]
    return [text for _, _, text in found]


@pytest.mark.parametrize("right", [None, "model"])  # that of `script` has no table
def test_start_when_it_has_many_kinds_of_mistakes_then_all_are_told_in_seconds_and_nothing_heavy_is_imported(
    script, right
):
    mistakes = {name: mistake for name, mistake in MISTAKES.items() if name != right}
    flags = {**REQUIRED, **dict(given for given, _ in mistakes.values())}
    words = [word for pair in flags.items() for word in pair]
    command = [sys.executable, "-c", ALL_AT_ONCE, script, "--num-layers", "2", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.startswith("status 2 heavy []\n")
    found = told(done)
    for name, (_, begins) in mistakes.items():
        assert sum(text.startswith(begins) for text in found) == 1, (name, found)
    assert len(found) == len(mistakes)
    assert float(done.stdout.split()[-1]) < 1.5  # of a processor's; 0.4 on a quiet machine


@pytest.mark.parametrize("check", [[], ["--rollout-corr-check", "4"]])
@pytest.mark.parametrize(
    "names",
    [
        ("file", "model"),
        ("function", "address"),
        ("preset", "folder", "file"),
        ("number", "written", "model"),
    ],
)
def test_start_when_it_has_some_mistakes_then_exactly_these_are_told(script, names, check):
    flags = dict(REQUIRED)
    flags |= {flag: value for name in names for flag, value in [MISTAKES[name][0]]}
    result = run(*check, script, *(part for pair in flags.items() for part in pair))
    found = told(result)
    assert (result.returncode, result.stdout, len(found)) == (2, "", len(names))
    assert all(any(text.startswith(MISTAKES[name][1]) for text in found) for name in names)


def test_script_when_it_is_forgotten_then_told_with_what_else_is_wrong_and_its_flags_are_read(script):
    result = run(*flags(rollout_temperature="0"))
    assert told(result) == [
        "there is no script --rollout-url; the first argument names a Megatron pretrain script",
        "--rollout-temperature must be positive, got 0",
    ]


def test_checkpoint_when_its_folder_is_not_there_then_one_problem_though_more_would_read_it(script):
    result = run(script, *flags(rollout_hf_checkpoint="gone", rollout_kl_loss_coef="0.1"))
    assert told(result) == [
        "--rollout-hf-checkpoint: gone is not a Hugging Face model folder: it has no config.json"
    ]


def test_checkpoint_when_it_was_cut_or_lacks_a_file_then_told_and_a_check_lets_one_without_weights_pass(
    script, folder
):
    cut = folder / "cut"
    cut.mkdir()
    (cut / "config.json").write_text("{}")
    without = "--rollout-hf-checkpoint: cut has neither model.safetensors nor"
    assert told(run(script, *flags(rollout_hf_checkpoint="cut")))[0].startswith(without)
    whole = (folder / "model/model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[:-5])
    for check in ([], ["--rollout-corr-check", "4"]):
        [found] = told(run(*check, script, *flags(rollout_hf_checkpoint="cut")))
        assert found.startswith(
            "--rollout-hf-checkpoint cut: cut/model.safetensors can't be read as safetensors"
        )


RANKS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


def test_mistakes_when_all_ranks_are_on_one_host_then_all_end_and_the_first_alone_tells_them(script):
    words = flags(rollout_log_dir="reward.py/logs", rollout_prompts="gone")
    ended = [run(script, *words, rank=str(rank), LOCAL_RANK=str(rank), **RANKS) for rank in range(4)]
    assert [one.returncode for one in ended] == [2] * 4
    assert len(told(ended[0])) == 2 and [one.stderr for one in ended[1:]] == [""] * 3


def test_folder_when_the_last_rank_on_another_host_can_not_write_it_then_it_tells_that_alone(script):
    words = flags(rollout_log_dir="reward.py/logs", tensorboard_dir="reward.py/t", rollout_temperature="0")
    hosts = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    first = run(script, *words, rank="0", LOCAL_RANK="0", **hosts)
    third, last = (run(script, *words, rank=str(rank), LOCAL_RANK=str(rank - 2), **hosts) for rank in (2, 3))
    assert (first.returncode, third.returncode, last.returncode) == (2, 2, 2)
    assert told(first) == ["--rollout-temperature must be positive, got 0"] and third.stderr == ""
    assert [text.split(" ")[0] for text in told(last)] == ["--rollout-log-dir", "--tensorboard-dir"]
