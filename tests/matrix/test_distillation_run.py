"""Whole runs that are distilled from the server of another model: no reward, one sample a prompt."""

import json

import pytest

from tests.matrix.patched import unchanged
from tests.matrix.releases import OVERLAID, chosen
from tests.mcore.launched import launch, untimed_steps, write_data
from tests.mcore.test_runs import GROUPED, SCRIPT
from tests.preloaded import ROOT, PreloadedServer, run_preloaded
from tools.cpu import environment, sglang_arguments

pytestmark = pytest.mark.skipif(chosen() != OVERLAID, reason="make test-matrix runs it")
STEPS = 12
ALONE = [
    "--rollout-group-size",
    1,
    "--global-batch-size",
    32,
    "--train-iters",
    STEPS,
    "--save-interval",
    STEPS,
    *GROUPED,
    "--lr",
    3e-3,
]
WAYS = {
    "sampled": ["--rollout-distill-coef", 1, "--tensor-model-parallel-size", 2, "--sequence-parallel"],
    "top": ["--rollout-distill-coef", 1, "--rollout-distill-top-k", 16, "--rollout-updates-per-batch", 2],
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """(the folder of a model of another seed, its server)."""
    folder = tmp_path_factory.mktemp("teacher")
    made = run_preloaded(
        [ROOT / "examples/quickstart/make_model.py", folder / "model", "--seed", 1], engine="sglang"
    )
    assert made.returncode == 0, made.stderr
    arguments = [*sglang_arguments(), "--random-seed", "1"]
    with PreloadedServer(
        folder / "model",
        dtype="float32",
        log_path=folder / "server.log",
        extra_arguments=arguments,
        environment=environment("sglang"),
    ) as server:
        yield folder / "model", server


@pytest.mark.parametrize("way", WAYS)
def test_run_when_a_teacher_alone_trains_then_the_reverse_kl_to_it_falls(
    way, teacher, tmp_path, tiny_moe_dir, sglang_server_fp32
):
    write_data(tmp_path)
    flags = [*ALONE, *WAYS[way], "--rollout-teacher-url", teacher[1].url]
    with unchanged(sglang_server_fp32, tiny_moe_dir):
        done = launch(
            tmp_path,
            "run",
            tiny_moe_dir,
            sglang_server_fp32.url,
            SCRIPT,
            *flags,
            processes=2,
            rewarded=False,
        )
    assert done.returncode == 0, done.stderr[-6000:]
    steps = untimed_steps(tmp_path / "run")
    print(
        json.dumps(
            [
                {k: v for k, v in s.items() if "distill" in k or k in ("grad_norm", "reward/mean", "skipped")}
                for s in steps
            ],
            indent=0,
        )
    )
