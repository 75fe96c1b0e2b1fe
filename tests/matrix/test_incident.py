"""Bundles of real runs: the step comes back bit for bit in its layout, and nearly in others."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl_corr import cli
from megatron_rl_corr.commands.incident.compare import compare_steps
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.observability.metrics_file import read_metrics
from megatron_rl_corr.rollout.sample_file import read_trajectories
from tests.forked_torchrun import forking
from tests.matrix.releases import OVERLAID, chosen, release_environment
from tests.mcore.launched import launch, replayed
from tests.mcore.test_runs import (
    GROUPED,
    SCRIPT,
    assert_nearly_same_weights,
    assert_same_weights,
    exported,
)
from tests.preloaded import run_preloaded
from tools.local_server import free_port

pytestmark = pytest.mark.skipif(chosen() != OVERLAID, reason="make test-matrix runs it")

ROOT = Path(__file__).resolve().parents[2]
RUN = ["--global-batch-size", 16, "--train-iters", 6, "--lr-decay-style", "cosine", "--lr-warmup-iters", 2]
REJECTS = ["--rollout-is", "token", "--rollout-is-threshold", 2, "--rollout-rs", "token_ratio"]
REJECTS += ["--rollout-rs-threshold", "0.9_1.1", "--rollout-loss", "gspo"]
AHEAD = ["--rollout-max-lag", 1, "--rollout-pause-mode", "in_place"]
"""Samples of the weights before: most have a mismatch, and some are rejected."""
ROUNDING = 1e-5
OF_SIGNS = ("rollout_corr/quadrant/", "rollout_corr/exact_fraction")
"""Whether D is above, below or exactly 0: chance, where all D are rounding."""
LAYERED = [*GROUPED, "--tensor-model-parallel-size", 2, "--sequence-parallel"]
LAYERED += ["--pipeline-model-parallel-size", 2]
"""Without expert-parallel ranks, whose optimizer Megatron saves apart: it loads in no other layout."""
SEVERAL = ["--rollout-updates-per-batch", 2, "--router-replay", "R3", "--rollout-save-routed-experts"]
EXACT = {
    "prompt_ids",
    "output_ids",
    "rollout_logprobs",
    "weight_versions",
    "loss_mask",
    "advantages",
    "reward",
}


@pytest.fixture(scope="module")
def runs(keeping_server, tiny_moe_dir, tmp_path_factory):
    """Folder of the runs: `one` process, ahead of training; `four`, several updates, R3; `auto`."""
    folder = tmp_path_factory.mktemp("a run")
    wanted = {
        "one": ([*GROUPED, *AHEAD, "--lr", 3e-3, "--save-interval", 1], REJECTS, 1),
        "four": (
            [*LAYERED, *SEVERAL, "--save-interval", 2],
            ["--rollout-correction-preset", "decoupled_token_is"],
            4,
        ),
        "auto": ([*GROUPED, "--save-interval", 2], ["--rollout-correction", "auto"], 1),
    }
    with replayed(keeping_server, tiny_moe_dir, folder) as door:
        for name, (flags, correction, processes) in wanted.items():
            door.replay()
            saves = ["--rollout-save-trajectories", folder / name / "samples"]
            saves += ["--rollout-events", folder / name / "events.jsonl"]
            done = launch(
                folder,
                name,
                tiny_moe_dir,
                door.url,
                SCRIPT,
                *RUN,
                *flags,
                *saves,
                processes=processes,
                mixed=True,
                correction=correction,
            )
            assert done.returncode == 0, done.stderr[-4000:]
    return folder


def bundled(folder, name, step, out, *flags):
    status = cli.main(
        ["incident", str(folder / name / "log"), "--step", str(step), "--out", str(out), *flags]
    )
    return status, json.loads((out / "manifest.json").read_text())


def replay(bundle, manifest, out, *flags, processes=None):
    """What the bundle's command ends with, in forks; out: in the place of BUNDLE.replayed."""
    command = manifest["command"]
    words = [
        word.replace("$BUNDLE.replayed", str(out)).replace("$BUNDLE", str(bundle))
        for word in command["arguments"]
    ]
    ranks = ["--nproc_per_node", str(processes or command["processes_of_host"])]
    ranks += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    started = [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", "megatron_rl_corr.launch"]
    variables = release_environment(OVERLAID[-1]) | command["environment"]
    variables |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_preloaded(forking([*started, command["script"], *words, *map(str, flags)])[1:], env=variables)
    assert done.returncode == 0, done.stderr[-4000:]


def samples_of(folder):
    """(group, sample) -> sample, of all files."""
    found = {}
    for path in sorted(folder.glob("*.parquet")):
        for one in read_trajectories(path):
            found[path.name[:11], one.origin.group, one.trajectory.sample_index] = one
    return found


def assert_same_batch(bundle, out):
    """All that the batch is made of is equal to the last bit, and what is rejected of it."""
    wanted, found = samples_of(bundle / "samples"), samples_of(out / "samples")
    assert set(wanted) <= set(found)
    for key, one in wanted.items():
        again = found[key]
        for name in EXACT:
            this, that = (
                getattr(sample if hasattr(sample, name) else sample.trajectory, name)
                for sample in (one, again)
            )
            assert this.tolist() == that.tolist() if hasattr(this, "tolist") else this == that, (key, name)
    return wanted


def hugging_face(checkpoints, iteration, model, out):
    assert exported(checkpoints / f"iter_{iteration:07d}", model, out) == 0
    return out


def test_step_when_replayed_in_its_layout_then_metrics_and_weights_bit_for_bit(
    runs, tiny_moe_dir, tmp_path, capsys
):
    bundle, out = tmp_path / "a bundle", tmp_path / "again"
    status, manifest = bundled(runs, "one", 4, bundle)
    assert status == 0 and manifest["replayed_steps"] == [4, 4] and manifest["start"]["iteration"] == 3
    row = next(row for row in read_metrics(bundle / "metrics.jsonl") if row["step"] == 4)
    assert 0.05 < row["rollout_corr/kept_fraction"] < 0.95 and row["grad_norm"] > 0 and row["weight_lag"] > 0
    replay(bundle, manifest, out)
    assert cli.main(["incident", "--check", str(bundle), "--replayed", str(out / "log")]) == 0
    [compared] = compare_steps(bundle, manifest, out / "log")
    assert compared.same > 80 and not compared.differ
    again = next(row for row in read_metrics(out / "log/metrics.jsonl") if row["step"] == 4)
    for name in row:
        if name.startswith(("rollout_corr/", "loss/")) or name == "grad_norm":
            assert again[name] == row[name] or row[name] != row[name], name
    assert_same_batch(bundle, out)
    weights = [
        hugging_face(folder / "checkpoints", 4, tiny_moe_dir, tmp_path / f"hf {place}")
        for place, folder in enumerate((out, runs / "one"))
    ]
    assert_same_weights(*weights)


def near(bundle, manifest, out, but=()):
    """All metrics to what float32 gives, but for the layout's own, and those whose names begin with `but`."""
    for compared in compare_steps(bundle, manifest, out / "log"):
        # the policy of a batch's later updates has been moved by Adam, which enlarges rounding
        rel = ROUNDING if compared.step == manifest["replayed_steps"][0] else 1e-3
        for name, (run, again) in compared.differ.items():
            if not name.startswith(("packing/", *but)):
                assert again == pytest.approx(run, rel=rel, abs=1e-6), (compared.step, name)


@pytest.mark.parametrize(
    "processes, flags",
    [
        (2, ["--tensor-model-parallel-size", 2, "--sequence-parallel"]),
        (2, ["--pipeline-model-parallel-size", 2]),
        (2, []),
    ],
    ids=["TP2", "PP2", "DP2"],
)
def test_step_of_one_process_when_replayed_in_another_layout_then_the_batch_is_the_same(
    processes, flags, runs, tiny_moe_dir, tmp_path
):
    bundle, out = tmp_path / "bundle", tmp_path / "again"
    _, manifest = bundled(runs, "one", 4, bundle, "--with-checkpoint")
    assert "$BUNDLE/checkpoints" in manifest["command"]["arguments"]
    moved = tmp_path / "elsewhere/moved"
    moved.parent.mkdir()
    shutil.move(bundle, moved)
    replay(moved, manifest, out, *flags, processes=processes)
    assert_same_batch(moved, out)
    near(moved, manifest, out)
    weights = [
        HFCheckpoint(hugging_face(folder / "checkpoints", 4, tiny_moe_dir, tmp_path / f"hf {place}"))
        for place, folder in enumerate((out, runs / "one"))
    ]
    assert_nearly_same_weights(*weights)


def test_batch_of_several_updates_when_replayed_in_its_layout_then_all_of_them_bit_for_bit(
    runs, tiny_moe_dir, tmp_path
):
    bundle, out = tmp_path / "bundle", tmp_path / "again"
    status, manifest = bundled(runs, "four", 4, bundle)
    assert status == 0 and manifest["replayed_steps"] == [3, 4] and manifest["start"]["iteration"] == 2
    replay(bundle, manifest, out)
    assert cli.main(["incident", "--check", str(bundle), "--replayed", str(out / "log")]) == 0
    assert_same_batch(bundle, out)
    checkpoints = [folder / "checkpoints" for folder in (out, runs / "four")]
    assert_same_weights(
        *(
            hugging_face(one, 4, tiny_moe_dir, tmp_path / f"hf {place}")
            for place, one in enumerate(checkpoints)
        )
    )


def test_batch_of_four_processes_when_replayed_in_one_then_nearly_the_same(runs, tiny_moe_dir, tmp_path):
    bundle, out = tmp_path / "bundle", tmp_path / "again"
    _, manifest = bundled(runs, "four", 4, bundle)
    flags = ["--tensor-model-parallel-size", 1, "--pipeline-model-parallel-size", 1]
    arguments = [word for word in manifest["command"]["arguments"] if word != "--sequence-parallel"]
    replay(
        bundle,
        {**manifest, "command": manifest["command"] | {"arguments": arguments}},
        out,
        *flags,
        processes=1,
    )
    assert_same_batch(bundle, out)
    near(bundle, manifest, out, but=OF_SIGNS)


def test_run_that_chose_its_weights_when_replayed_then_it_chooses_them_again(runs, tiny_moe_dir, tmp_path):
    bundle, out = tmp_path / "bundle", tmp_path / "again"
    status, manifest = bundled(runs, "auto", 4, bundle)
    rows = {row["step"]: row for row in read_metrics(bundle / "metrics.jsonl")}
    assert status == 0 and manifest["replayed_steps"] == [3, 4] and rows[3]["auto/level"] == 1
    replay(bundle, manifest, out)
    assert cli.main(["incident", "--check", str(bundle), "--replayed", str(out / "log")]) == 0
    again = {row["step"]: row for row in read_metrics(out / "log/metrics.jsonl")}
    assert [again[step]["auto/level"] for step in (3, 4)] == [rows[step]["auto/level"] for step in (3, 4)]
    # A replay's checkpoint does not know the weights: its own bundle takes them from the row, and says so.
    status, own = bundled_again(out, 4, tmp_path / "second")
    assert status == 1 and "--rollout-is sequence" in own["cannot_come_back"][0]
    replay(tmp_path / "second", own, tmp_path / "third")
    for compared in compare_steps(tmp_path / "second", own, tmp_path / "third/log"):
        assert compared.same > 20 and not compared.differ


def bundled_again(replayed, step, out):
    """A bundle of a replay, which began at the checkpoint that it loaded: that is taken away."""
    tracker = replayed / "checkpoints/latest_checkpointed_iteration.txt"
    assert tracker.read_text() == str(step)
    path = replayed / "log/run.json"
    settings = json.loads(path.read_text())
    loaded = Path(
        settings["launches"][-1]["arguments"][settings["launches"][-1]["arguments"].index("--load") + 1]
    )
    copy = out.parent / "without cursor"
    shutil.copytree(loaded / f"iter_{step - 2:07d}", copy / f"iter_{step - 2:07d}")
    (copy / f"iter_{step - 2:07d}/rollout_cursor.json").unlink()
    (copy / tracker.name).write_text(str(step - 2))
    settings["launches"][-1]["arguments"] = [
        str(copy) if word == str(loaded) else word for word in settings["launches"][-1]["arguments"]
    ]
    path.write_text(json.dumps(settings))
    status = cli.main(["incident", str(replayed / "log"), "--step", str(step), "--out", str(out)])
    return status, json.loads((out / "manifest.json").read_text())


def test_run_whose_routes_were_not_saved_when_replayed_then_told_and_done_without_them(
    runs, tiny_moe_dir, tmp_path
):
    bundle, out = tmp_path / "bundle", tmp_path / "again"
    shutil.copytree(runs / "four", tmp_path / "four")
    for path in (tmp_path / "four/samples").iterdir():
        table = pq.read_table(path)
        for name in ("routed_experts", "routed_experts_shape", "routed_experts_bytes"):
            place = table.schema.get_field_index(name)
            field = table.schema.field(place)
            table = table.set_column(place, field, pa.nulls(len(table), field.type))
        pq.write_table(table, path)
    status, manifest = bundled(tmp_path, "four", 4, bundle)
    assert status == 1 and "--rollout-save-routed-experts does" in manifest["cannot_come_back"][0]
    replay(bundle, manifest, out)
    assert cli.main(["incident", "--check", str(bundle), "--replayed", str(out / "log")]) == 1
