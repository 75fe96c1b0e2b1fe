"""docs/get_started/first_gpu_run.md: its commands run in order, as one script, with recorders for
what needs GPUs.

The flags that the recipes give to servers and trainer are parsed by every parser in
tests/examples/test_recipes.py.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.recipe_inputs import CONFIGS, write_dapo, write_gsm8k, write_model
from tools.local_server import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/get_started/first_gpu_run.md").read_text()
COMMANDS = re.findall(r"^    (\S.*)$", PAGE, re.MULTILINE)
RECORDING = ROOT / "tests/examples/recording_python.py"
STUBS = {
    # The files that a download brings.
    "hf": """
import os, shutil, sys
words, folder = sys.argv[1:], sys.argv[sys.argv.index("--local-dir") + 1]
record("hf", words)
source = os.environ["INPUTS"] + "/" + ("data" if "dataset" in words else os.path.basename(words[1]))
target = os.path.join(folder, words[2]) if "dataset" in words else folder
os.makedirs(os.path.dirname(target), exist_ok=True)
if "dataset" in words:
    shutil.copy(source + ("/gsm8k" if "gsm8k" in words[1] else "/dapo"), target)
else:
    shutil.copytree(source, target)
""",
    # The doctor asks live servers, and a report is of a run: their options are parsed.
    "megatron-rl-corr": """
import sys
from megatron_rl_corr import cli
record("megatron-rl-corr", sys.argv[1:])
cli._parser().parse_args(sys.argv[1:]) if sys.argv[1] in ("doctor", "report") else sys.exit(cli.main())
""",
    "git": "record('git', sys.argv[1:])",
    "make": "record('make', sys.argv[1:])",
}
HEAD = """#!{python}
import json, os, sys
def record(*call):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(call) + "\\n")
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """(what the page's programs were called with, what the recipes asked python to run, the run itself)."""
    folder = tmp_path_factory.mktemp("first_gpu_run")
    inputs, checkout = folder / "inputs", folder / "megatron_rl_corr"
    for name, config in {"Qwen3-4B": "qwen3_4b", "Qwen3-30B-A3B": "qwen3_30b_a3b"}.items():
        (inputs / name).mkdir(parents=True)
        write_model(inputs / name, CONFIGS[config])
    (inputs / "data").mkdir()
    write_gsm8k(inputs / "data/gsm8k")
    write_dapo(inputs / "data/dapo")
    binaries = checkout / ".venv/bin"
    binaries.mkdir(parents=True)
    (checkout / ".venv/cuda").mkdir()  # as `make setup` leaves it on a machine with GPUs
    (checkout / "examples").symlink_to(ROOT / "examples")
    stubs = {name: HEAD.format(python=sys.executable) + text for name, text in STUBS.items()}
    stubs["python"] = f'#!/bin/sh\nexec {sys.executable} {RECORDING} "$@"\n'
    for name, text in stubs.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    script = "set -eu\n" + "\n".join(re.sub("<[^>]*>", "checkout", command) for command in COMMANDS)
    variables = {
        # The first commands come before the page's own PATH.
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHON": str(binaries / "python"),
        "CALLS": str(folder / "calls"),
        "RECORD": str(folder / "record"),
        "INPUTS": str(inputs),
        "SKIP_PLAN": "1",
        "PORT": str(free_port(4)),
    }
    run = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    lines = {name: (folder / name).read_text().splitlines() for name in ("calls", "record")}
    return [json.loads(line) for line in lines["calls"]], [json.loads(line) for line in lines["record"]], run


def test_commands_of_the_page_when_run_in_their_order_then_every_one_succeeds(calls):
    asked, recorded, run = calls
    programs = [shlex.split(re.sub("<[^>]*>", "", command))[0] for command in COMMANDS]
    assert set(programs) <= {
        "git",
        "make",
        "export",
        "hf",
        "megatron-rl-corr",
        "examples/qwen3_4b/run.sh",
        "examples/qwen3_30b_a3b/run.sh",
        "NODES=2",
    }
    for name in ("git", "make", "hf", "megatron-rl-corr"):
        assert [call[0] for call in asked].count(name) == programs.count(name)
    # the page's own plans; the recipes' are left out
    assert run.stdout.count("The best layout that fits") == 2


def test_recipes_of_the_page_then_both_models_are_checked_and_trained_with_their_data(calls):
    _, recorded, _ = calls
    trained = [call["words"] for call in recorded if "torch.distributed.run" in call["words"]]
    dry_runs = [call["words"] for call in recorded if call["words"][0].endswith("dry_run.py")]
    checked = [words for words in dry_runs if words[1] == "train"]
    flags = ("--rollout-hf-checkpoint", "--rollout-prompts", "--rollout-label-key")
    values = [[words[words.index(flag) + 1] for flag in flags] for words in [*trained, *checked]]
    small = ["models/Qwen3-4B", "data/gsm8k/main/train-00000-of-00001.parquet", "answer"]
    sparse = ["models/Qwen3-30B-A3B", "data/dapo/data/dapo-math-17k.parquet", "reward_model.ground_truth"]
    assert values == [small, small, sparse, small, sparse, sparse]
    assert trained[0][-4:] == ["--train-iters", "10", "--rollout-save-trajectories", "runs/qwen3_4b/samples"]
    assert [words[2] for words in checked] == ["4", "4", "16"]


def test_plans_of_the_page_then_the_memory_that_it_states(calls):
    *_, run = calls
    stated = re.findall(r"(\d+) GiB a GPU", PAGE)
    found = [line.split() for line in run.stdout.splitlines() if line.startswith("0  ")]
    assert [f"{float(row[-2]):.0f}" for row in found] == stated == ["45", "64"]
    assert "takes 455 GiB of the hosts' memory" in run.stdout and "455 GiB" in PAGE


def test_downloads_of_the_page_then_huggingface_hubs_command_has_their_flags(calls):
    help_text = subprocess.run(
        [Path(sys.executable).parent / "hf", "download", "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"},
    ).stdout
    used = {word for call in calls[0] if call[0] == "hf" for word in call[1] if word.startswith("--")}
    assert used and all(flag in help_text for flag in used)


def test_recipes_then_every_line_of_flags_has_a_comment():
    for name in CONFIGS:
        script = (ROOT / "examples" / name / "run.sh").read_text()
        arrays = re.findall(r"^(?:SERVER|MEGATRON|RUN)_FLAGS=\(\n(.*?)^\)", script, re.MULTILINE | re.DOTALL)
        assert len(arrays) == 3
        assert [line for array in arrays for line in array.splitlines() if " # " not in line] == []
