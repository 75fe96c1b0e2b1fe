"""Whole runs that are distilled from the server of another model: no reward, one sample a prompt."""

import contextlib
import json

import pytest
import torch

from megatron_rl_corr.rollout.sample_file import read_trajectories
from tests.matrix.patched import unchanged
from tests.matrix.releases import OVERLAID, chosen
from tests.mcore.launched import launch, untimed_steps, write_data
from tests.mcore.test_runs import GROUPED, SCRIPT
from tests.preloaded import ROOT, PreloadedServer, run_preloaded
from tools.cpu import environment, sglang_arguments

pytestmark = pytest.mark.skipif(
    chosen() != OVERLAID, reason="make test-matrix runs it; tests/mcore has the gradients"
)
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
]
ALONE += [*GROUPED, "--lr", 3e-3, "--rollout-distill-coef", 1]
WAYS = {
    "sampled": ["--tensor-model-parallel-size", 2, "--sequence-parallel"],
    "top": ["--rollout-distill-top-k", 16, "--rollout-updates-per-batch", 2],
}


@contextlib.contextmanager
def served(folder, change=lambda model: None):
    """(the folder of a model of another seed, its server); change: of its files, before it is served."""
    made = run_preloaded(
        [ROOT / "examples/quickstart/make_model.py", folder / "model", "--seed", 1], engine="sglang"
    )
    assert made.returncode == 0, made.stderr
    change(folder / "model")
    with PreloadedServer(
        folder / "model",
        dtype="float32",
        log_path=folder / "server.log",
        extra_arguments=[*sglang_arguments(), "--random-seed", "1"],
        environment=environment("sglang"),
    ) as server:
        yield folder / "model", server


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    with served(tmp_path_factory.mktemp("teacher")) as made:
        yield made


def run(folder, model, server, teacher, *flags):
    write_data(folder)
    flags = [*ALONE, *flags, "--rollout-teacher-url", teacher.url]
    with unchanged(server, model):
        return launch(folder, "run", model, server.url, SCRIPT, *flags, processes=2, rewarded=False)


def scores(model, folder, out):
    """File name -> log-probs of each sample of the run under the model."""
    made = run_preloaded([ROOT / "tests/matrix/hf_scores.py", model, folder, out])
    assert made.returncode == 0, made.stderr
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("way", WAYS)
def test_run_when_a_teacher_alone_trains_then_the_reverse_kl_to_it_falls(
    way, teacher, tmp_path, tiny_moe_dir, sglang_server_fp32
):
    model, server = teacher
    saves = ["--rollout-save-trajectories", tmp_path / "samples"]
    done = run(tmp_path, tiny_moe_dir, sglang_server_fp32, server, *WAYS[way], *saves)
    assert done.returncode == 0, done.stderr[-6000:]
    steps = untimed_steps(tmp_path / "run")
    assert len(steps) == STEPS and all(step["loss/distill_missing"] == 0 for step in steps)
    assert all(step["grad_norm"] > 0 and step["skipped"] == 0 for step in steps)
    kl = [step["loss/distill_kl"] for step in steps]
    assert kl[0] > 0.08 and sum(kl[-3:]) / 3 < 0.4 * kl[0], kl
    if way == "top":
        exact = [step["loss/distill_top_kl"] for step in steps]
        assert exact[0] > 0.03 and exact[-1] < 0.4 * exact[0], exact
        assert all(0.25 < step["loss/distill_teacher_mass"] < 0.4 for step in steps)
        assert steps[-1]["loss/distill_student_mass"] > steps[0]["loss/distill_student_mass"] + 0.05
        flags = [*ALONE, *WAYS[way], "--rollout-teacher-url", server.url]
        flags += ["--rollout-replay", tmp_path / "samples", "--exit-interval", 4]
        again = launch(tmp_path, "again", tiny_moe_dir, None, SCRIPT, *flags, processes=2)
        assert again.returncode == 0, again.stderr[-6000:]
        replayed = untimed_steps(tmp_path / "again")
        assert len(replayed) == 4
        for one, other in zip(replayed, steps, strict=False):
            assert one["loss/distill_top_kl"] == pytest.approx(other["loss/distill_top_kl"], rel=1e-3)
        return
    # Before the first update the policy is the one that sampled, whose log-probs the samples have.
    files = sorted((tmp_path / "samples").iterdir())
    of_teacher = scores(model, tmp_path / "samples", tmp_path / "teacher.pt")
    first = [path for path in files if path.name.startswith(files[0].name[:11])]
    far = [
        one.trajectory.rollout_logprobs.double() - theirs
        for path in first
        for one, theirs in zip(read_trajectories(path), of_teacher[path.name])  # noqa: B905
    ]
    assert len(far) == 32 and kl[0] == pytest.approx(float(torch.cat(far).mean()), rel=1e-3)


def test_run_when_the_teacher_is_the_start_and_served_by_vllm_then_the_kl_begins_at_0(
    tmp_path, tiny_moe_dir, sglang_server_fp32, vllm_server_fp32
):
    flags = [*WAYS["top"][:2], "--train-iters", 1]
    done = run(tmp_path, tiny_moe_dir, sglang_server_fp32, vllm_server_fp32, *flags)
    assert done.returncode == 0, done.stderr[-6000:]
    [step] = untimed_steps(tmp_path / "run")
    assert step["loss/distill_missing"] == 0 and 0.1 < step["loss/distill_teacher_mass"] < 0.9
    assert step["loss/distill_student_mass"] == pytest.approx(step["loss/distill_teacher_mass"], abs=1e-5)
    assert abs(step["loss/distill_kl"]) < 1e-5 and abs(step["loss/distill_top_kl"]) < 1e-6


def other_tokenizer(model):
    """The same ids, but two of them mean each other's characters."""
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["e"], words["t"] = words["t"], words["e"]
    path.write_text(json.dumps(content))


def fewer_ids(model):
    """A model of fewer ids."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    made = run_preloaded([ROOT / "tests/matrix/cut_vocabulary.py", model, config["vocab_size"] - 16])
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize(
    "change, told",
    [
        (other_tokenizer, " has another tokenizer than --rollout-hf-checkpoint: of 'The 1st test"),
        (
            fewer_ids,
            " has another vocabulary than --rollout-hf-checkpoint, of 83 ids: it does not ",
        ),
    ],
)
def test_run_when_the_teacher_has_another_vocabulary_then_it_is_refused_by_name(
    change, told, tmp_path, tiny_moe_dir, sglang_server_fp32
):
    (tmp_path / "teacher").mkdir()
    with served(tmp_path / "teacher", change) as (_, server):
        done = run(tmp_path, tiny_moe_dir, sglang_server_fp32, server)
    assert done.returncode and f"--rollout-teacher-url {server.url}{told}" in done.stderr, done.stderr[-4000:]
    assert not (tmp_path / "run/log/metrics.jsonl").exists()
