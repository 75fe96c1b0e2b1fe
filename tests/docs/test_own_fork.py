"""docs/guides/own_fork.md as a new user meets it: every command of the page, in its order, against a real
server; and the flags of slime_miles.md and megatron_rl.md.
"""

import argparse
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.integrations import megatron_rl_hooks
from tests.matrix.patched import copied_tree, cpu_flags, process_environment, unchanged
from tests.tiers import long, matrix
from tools import local_server

pytestmark = matrix

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs/guides"
PAGE = (GUIDES / "own_fork.md").read_text()
SHOWN = "[rl-corr]"
"""How a line of the page starts that is output."""


def lines(page=PAGE):
    """The indented lines of a page, continued ones joined."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL).replace("\\\n", " ")
    return [line for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE) if SHOWN not in line]


def blocks(language, page=PAGE):
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def shell_commands():
    """What the user's shell runs; the server has a fixture."""
    return [line for line in lines() if not line.startswith("python -m sglang.")]


def command(folder):
    """A folder that holds `megatron-rl-corr` for this checkout's package, installed or not."""
    folder.mkdir()
    program = folder / "megatron-rl-corr"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megatron_rl_corr.cli "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.fixture
def server(sglang_server_fp32, tiny_moe_dir):
    with unchanged(sglang_server_fp32, tiny_moe_dir):
        yield sglang_server_fp32


@long
def test_page_when_its_commands_are_run_in_order_then_a_fork_takes_corrected_steps(
    server, tiny_moe_dir, tmp_path
):
    fork, stock = (
        copied_tree(tmp_path / "fork"),
        (tmp_path / "fork/megatron/training/__init__.py").read_bytes(),
    )
    (tmp_path / "my_reward.py").write_text(blocks("python")[0])
    (tmp_path / "prompts.jsonl").write_text(blocks("json")[0])
    environment = process_environment() | {
        "PLUGIN": str(ROOT),
        "MEGATRON": str(fork),
        "SCRIPT": str(ROOT / "tests/matrix/pretrain_any.py"),
        "FLAGS": shlex.join(cpu_flags(tiny_moe_dir)),
        "MODEL": str(tiny_moe_dir),
        "SERVER": server.url,
        "PATH": os.pathsep.join(
            [str(command(tmp_path / "bin")), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "PET_MASTER_PORT": str(local_server.free_port()),  # torchrun's own would be everybody's
    }
    # The CPU's replacements are on the path before the page puts its own there.
    script = "\n".join(line.replace('="$PLUGIN', '="$PYTHONPATH:$PLUGIN') for line in shell_commands())
    done = subprocess.run(
        ["bash", "-ex", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    steps = [json.loads(line) for line in (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()]
    assert [step["weight_version"] for step in steps] == [1, 2]
    assert all(step["grad_norm"] > 0 and 0 <= step["rollout_corr/k3_kl"] < 1e-6 for step in steps)
    [header] = [line.strip() for line in PAGE.splitlines() if SHOWN in line]
    assert header.split() in [line.split() for line in done.stdout.splitlines()]
    assert (tmp_path / "runs/first/report.html").is_file()
    assert (fork / "megatron/training/__init__.py").read_bytes() == stock, (
        "the last command takes the lines away"
    )


def test_page_then_its_commands_are_all_there_are():
    assert len(shell_commands()) == 8 and len(lines()) == 9


def test_server_of_the_page_then_its_flags_are_those_that_tests_start_servers_with():
    [line] = [line for line in lines() if "sglang.launch_server" in line]
    started = inspect.getsource(local_server)
    for word in shlex.split(line):
        if word.startswith("--") or word == "sglang.launch_server":
            assert f'"{word}"' in started


def test_flags_for_megatrons_rl_on_the_page_then_they_are_taken():
    [line] = lines((GUIDES / "megatron_rl.md").read_text())
    words = shlex.split(line.replace("<its flags>", ""))
    config, folder = megatron_rl_hooks.parse(words[words.index("train_rl.py") + 1 :])
    assert config == RolloutCorrectionConfig.from_preset("decoupled_geo_rs_token_tis") and folder == "runs/rl"


def test_flags_for_slime_on_the_page_then_function_and_files_are_what_they_say(tmp_path):
    page = (GUIDES / "slime_miles.md").read_text()
    [line] = lines(page)
    parser = argparse.ArgumentParser()
    parser.add_argument("--use-tis", action="store_true")
    parser.add_argument("--custom-tis-function-path")
    parser.add_argument("--custom-config-path")
    path, _, name = parser.parse_args(shlex.split(line)).custom_tis_function_path.rpartition(".")
    slime = importlib.import_module(path)
    assert callable(getattr(slime, name))
    named, settings = blocks("yaml", page)
    assert named.split(":")[0] == slime.SETTINGS
    (tmp_path / "correction.yaml").write_text(settings)
    config = slime.read_settings(str(tmp_path / "correction.yaml"), "slime and miles")
    assert config.rollout_is == "token" and [rule.name for rule in config.rollout_rs] == ["seq_mean_ratio"]
