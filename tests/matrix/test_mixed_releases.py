"""Which Megatron the launcher takes: a whole tree of a supported release, and nothing put
together from two.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import releases
from tests.matrix.releases import OVERLAID, release_environment
from tests.test_launch import flags, write_inputs
from tests.tiers import long

HERE = Path(__file__).resolve().parent


MEGATRONS_RL = [
    "--perform-rl-step",
    "--rl-inference-logprobs-is-correction",
    "--rollout-is",
    "token",
    "--rollout-is-threshold",
    "2",
]


def launch(tmp_path, environment, given=None):
    script = tmp_path / "pretrain.py"
    script.write_text("raise SystemExit('the script ran')\n")
    write_inputs(tmp_path)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_rl_corr.launch", script, *(given or flags())],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_launcher_when_core_is_of_one_release_and_training_of_another_then_both_are_named(tmp_path):
    run = launch(tmp_path, release_environment(OVERLAID[0]))
    assert run.returncode == 2 and "the script ran" not in run.stderr
    (told,) = [line for line in run.stderr.splitlines() if line.startswith("megatron_rl_corr.launch: ")]
    assert f"megatron.core {OVERLAID[0]} is of {releases.release_folder(OVERLAID[0]).resolve()}, " in told
    assert (
        "but megatron.training of " in told
        and "put one whole checkout of Megatron-LM first on PYTHONPATH" in told
    )


@pytest.mark.parametrize(
    ("version", "given"),
    [
        pytest.param("0.13.1", None, id="older"),
        pytest.param("0.21.0rc0", None, id="newer", marks=long),
        pytest.param("0.21.0rc0", MEGATRONS_RL, id="newer, with Megatron's own RL", marks=long),
    ],
)
def test_launcher_when_release_is_not_supported_then_the_supported_ones_are_named(tmp_path, version, given):
    core = tmp_path / "tree/megatron/core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text(f"__version__ = {version!r}\n")
    environment = release_environment(OVERLAID[-1], tmp_path / "tree")
    del environment["MEGATRON_RL_CORR_CPU"]  # its replacements are of a real Megatron
    run = launch(tmp_path, environment, given)
    assert run.returncode == 2, run.stderr
    assert run.stderr.endswith(
        f"megatron_rl_corr.launch: megatron-core {version} is not supported; supported are megatron-core "
        "0.14 to 0.20: install one of them\n"
    )


def test_release_when_the_index_does_not_answer_then_the_folder_and_pips_words_are_told(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MEGATRON_RL_CORR_ENVS", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        RuntimeError, match=r"(?s)megatron-core==0\.14\.0 could not be fetched into .*pip said"
    ):
        releases.release_folder("0.14.0")
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and "partial" not in path.name]
