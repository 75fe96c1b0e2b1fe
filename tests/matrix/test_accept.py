"""`megatron-rl-corr accept` on real ranks and a real server: the tiny MoE is accepted, and not where its
trainer computes something else.
"""

import importlib.util
import json

import pytest

from megatron_rl_corr.cli import main
from tests.mcore.launched import run_command, run_environment, write_data
from tests.mcore.test_runs import SCRIPT
from tests.preloaded import PreloadedServer
from tests.tiers import long
from tools.cpu import environment, gpu_available, sglang_arguments

pytestmark = [
    long,
    pytest.mark.skipif(gpu_available(), reason="without a GPU only"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
LAYOUT = [
    *("--tensor-model-parallel-size", 2, "--sequence-parallel"),
    *("--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1),
]


@pytest.fixture(scope="module")
def server(tiny_moe_dir, tmp_path_factory):
    with PreloadedServer(
        tiny_moe_dir,
        dtype="float32",
        log_path=tmp_path_factory.mktemp("accept") / "server.log",
        extra_arguments=[*sglang_arguments(), "--enable-return-routed-experts", "--random-seed", "0"],
        environment=environment("sglang"),
    ) as running:
        yield running


@pytest.fixture
def accept(server, tiny_moe_dir, tmp_path, monkeypatch):
    """accept(*flags): (status, the rows that failed, the notes) of a run with these flags."""
    write_data(tmp_path)
    for name, value in run_environment().items():
        monkeypatch.setenv(name, value)

    def of(*flags):
        command = run_command(tmp_path, "run", tiny_moe_dir, server.url, SCRIPT, *LAYOUT, *flags, processes=2)
        status = main(["accept", "--out", str(tmp_path / "out"), "--steps", "4", "--", *map(str, command)])
        numbers = json.loads((tmp_path / "out/accept.json").read_text())
        return status, [row for row in numbers["rows"] if not row["passed"]], numbers["notes"]

    return of


def test_model_that_is_right_then_accepted_with_its_experts_compared_and_replayed(accept):
    status, failed, notes = accept()
    assert (status, failed) == (0, []), notes


def test_model_of_another_epsilon_then_not_accepted_and_the_reason_is_told(accept):
    wrong = ["--norm-epsilon", 1e-2, "--rollout-allow-model-differences"]
    status, failed, notes = accept(
        *wrong, "--rollout-max-probe-log-ratio", 10, "--rollout-max-first-step-kl", "inf"
    )
    assert status == 1
    assert {row["what"] for row in failed} >= {"largest |D| of a token", "mean k3 of a step"}, failed
    assert any("epsilon" in note for note in notes), notes
