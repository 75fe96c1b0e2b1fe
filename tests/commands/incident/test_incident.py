"""Bundles of hand-made runs: what is chosen, what is in them, what is refused, what no bundle may hold."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr import cli
from megatron_rl_corr.commands.incident.readme import BEGIN, END
from megatron_rl_corr.observability.metrics_file import MetricsFile
from tests.commands.incident.made_run import KL, SECRET, HandMadeRun


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    monkeypatch.setenv("PLANTED_API_KEY", "planted-in-the-environment")


@pytest.fixture
def made(tmp_path):
    return HandMadeRun(tmp_path)


def command_of(manifest):
    """Flag -> values."""
    found = {}
    for word in manifest["command"]["arguments"]:
        if word.startswith("--"):
            values = found[word] = []
        else:
            values.append(word)
    return found


def everything(out):
    return b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())


def test_bundle_of_a_run_then_it_holds_the_step_and_the_command_does_exactly_it(made, capsys):
    made.events = [{"step": 5, "reason": "slow"}, {"step": 99, "reason": "later"}]
    status, out, manifest = made.write().bundle("--step", "5")
    assert status == 0 and manifest["cannot_come_back"] == []
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()) == [
        "README.txt",
        "events.jsonl",
        "manifest.json",
        "metrics.jsonl",
        "run.json",
        "samples/step_000005_replica0.parquet",
    ]
    assert "slow" in (out / "events.jsonl").read_text() and "later" not in (out / "events.jsonl").read_text()
    checkpoints = str(made.root / "checkpoints")
    assert command_of(manifest) == {
        "--lr": ["1e-6"],
        "--train-iters": ["100"],
        "--rollout-hf-checkpoint": ["my models/tiny"],
        "--rollout-group-size": ["2"],
        "--load": [checkpoints],
        "--ckpt-step": ["4"],
        "--save": ["$BUNDLE.replayed/checkpoints"],
        "--save-interval": ["5"],
        "--exit-interval": ["5"],
        "--rollout-replay": ["$BUNDLE/samples"],
        "--rollout-max-first-step-kl": ["inf"],
        "--rollout-save-trajectories": ["$BUNDLE.replayed/samples"],
        "--rollout-log-dir": ["$BUNDLE.replayed/log"],
    }
    files = manifest["start"]["files"]
    assert files["__0_0.distcp"] == {"bytes": 2**20 + 1} and len(files["metadata.json"]["sha256"]) == 64
    told = capsys.readouterr().out
    assert "step 5: it was asked for" in told and "from the checkpoint of iteration 4" in told


def test_readme_when_a_shell_reads_its_command_then_words_are_whole(made, tmp_path):
    _, out, manifest = made.write().bundle("--step", "5")
    text = (out / "README.txt").read_text().split(BEGIN)[1].split(END)[0]
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "torchrun").write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@"\n')
    (tools / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, env=environment, check=True)
    words = [word.replace("$BUNDLE", str(out)) for word in manifest["command"]["arguments"]]
    first = [str(made.root), "1", "--nproc_per_node", "4", "-m", "megatron_rl_corr.launch", "pretrain_gpt.py"]
    assert done.stdout.splitlines() == [*first, *words]


@pytest.mark.parametrize(
    ("changes", "step", "why"),
    [
        ({}, 6, f"no step has an alert, and its {KL} 0.0006 is the largest"),
        ({3: {KL: 5.0}, 2: {KL: 6.0}}, 3, f"the last step with an alert: {KL}"),
        ({4: {"grad_norm": float("nan")}}, 4, "the last step with an alert: grad_norm"),
        # A solved task makes no update at its end.
        ({3: {KL: 5.0}, 4: {"skipped": 1.0}}, 3, f"the last step with an alert: {KL}"),
        ({4: {"skipped": 1.0}}, 4, "the last step with an alert: skipped"),
    ],
)
def test_step_when_not_given_then_the_last_alert_or_the_largest_kl(changes, step, why, made):
    for number, values in changes.items():
        made.rows[number - 1] |= values
    _, out, manifest = made.write().bundle()
    assert (manifest["step"], manifest["why"]) == (step, why)
    assert bool(manifest["alerts"]) == bool(changes)
    assert why in (out / "README.txt").read_text()


def test_bundle_when_the_checkpoint_is_older_then_the_batches_between_are_in_it(made):
    made.checkpoints = [2]
    _, out, manifest = made.write().bundle("--step", "5")
    assert manifest["replayed_steps"] == [3, 5]
    names = [f"step_{step:06d}_replica0.parquet" for step in (3, 4, 5)]
    assert sorted(path.name for path in (out / "samples").iterdir()) == names
    assert command_of(manifest)["--exit-interval"] == ["5"] and command_of(manifest)["--ckpt-step"] == ["2"]


def test_bundle_when_the_step_is_within_a_batch_then_the_whole_batch_is_done(made):
    made.updates, made.samples, made.checkpoints = 2, dict.fromkeys((1, 3, 5)), [4]
    _, _, manifest = made.write().bundle("--step", "6")
    assert manifest["replayed_steps"] == [5, 6] and command_of(manifest)["--exit-interval"] == ["6"]


def test_bundle_when_no_step_was_saved_before_then_it_begins_where_the_run_began(made):
    made.checkpoints = []
    made.arguments["--pretrained-checkpoint"] = ["sft"]
    _, _, manifest = made.write().bundle("--step", "1")
    command = command_of(manifest)
    assert "--load" not in command and command["--pretrained-checkpoint"] == ["sft"]
    assert manifest["start"] == {"iteration": 0, "folder": None, "in_bundle": False, "files": {}}


def test_bundle_with_the_checkpoint_then_the_command_loads_it_from_there(made, tmp_path):
    _, out, manifest = made.write().bundle("--step", "5", "--with-checkpoint")
    assert command_of(manifest)["--load"] == ["$BUNDLE/checkpoints"]
    assert (out / "checkpoints/iter_0000004/__0_0.distcp").stat().st_size == 2**20 + 1
    assert (out / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "4"
    assert "checkpoints/iter_0000004/__0_0.distcp" in manifest["files"]


def test_run_when_its_folder_was_moved_then_all_is_found_beside_it(made, tmp_path):
    made.write()
    moved = tmp_path / "moved elsewhere"
    shutil.move(made.root, moved)
    # Another run at the old place has other samples.
    (made.root / "samples").mkdir(parents=True)
    status, out, manifest = made.bundle("--step", "5", log=moved / "log")
    assert status == 0 and manifest["start"]["folder"] == str(moved / "checkpoints/iter_0000004")
    assert (out / "samples/step_000005_replica0.parquet").is_file()


def test_checkpoint_when_older_than_the_launch_that_would_have_made_it_then_it_is_not_taken(made):
    made.launches = [made.launch | {"arguments": ["--save", str(made.root / "checkpoints")]}]
    made.launch |= {
        "first_step": 3,
        "time": 4e9,
    }  # newer than any file: iteration 4 is of an attempt given up
    _, _, manifest = made.write().bundle("--step", "5")
    assert manifest["start"]["iteration"] == 2


def refused(made, capsys, *words, flags=("--step", "5")):
    status, out, _ = made.write().bundle(*flags)
    told = capsys.readouterr().err
    assert status == 2 and not out.exists(), told
    assert list(out.parent.glob("*")) == [] if out.parent.exists() else True
    for word in words:
        assert word in told, told


def test_run_when_it_saved_no_samples_then_refused_with_the_flag(made, capsys):
    del made.arguments["--rollout-save-trajectories"]
    refused(made, capsys, "train with --rollout-save-trajectories DIR")


def test_run_when_the_step_has_no_samples_then_refused(made, capsys):
    del made.samples[5]
    refused(made, capsys, "has no samples of step 5")


def test_run_when_samples_between_are_missing_then_refused(made, capsys):
    made.checkpoints = [2]
    del made.samples[4]
    refused(made, capsys, "has no samples of step 4")


def test_run_when_a_batch_lacks_a_replica_then_refused(made, capsys):
    made.write()
    path = made.root / "samples/step_000005_replica0.parquet"
    path.rename(path.with_name("step_000005_replica1.parquet"))
    assert made.bundle("--step", "5")[0] == 2
    assert "files of step 5, which are not one of each" in capsys.readouterr().err


def test_run_when_no_checkpoint_is_near_then_refused_with_the_flags(made, capsys):
    made.checkpoints = []
    refused(
        made,
        capsys,
        "6 batches would be done again",
        "--max-batches 6",
        "--save-interval",
        flags=["--max-batches", "5"],
    )


def test_run_when_it_was_begun_elsewhere_and_nothing_is_left_then_refused(made, capsys):
    made.launch["first_step"], made.checkpoints = 3, []
    refused(made, capsys, "no checkpoint of before step 5", "--save-interval")


def test_run_when_the_samples_are_of_another_run_then_refused(made, capsys):
    made.rows[4]["reward/mean"] = 0.7
    refused(made, capsys, "a mean reward of 0.5, and step 5 of the run 0.7")


def test_run_when_an_earlier_version_made_it_then_refused_with_what_to_do(made, capsys):
    made.write()
    (made.log / "run.json").write_text(json.dumps({"rollout": {}}))
    assert made.bundle()[0] == 2
    assert "does not say how the run was started" in capsys.readouterr().err


def test_run_when_truncated_sampling_kept_no_masks_then_refused(made, capsys):
    made.arguments["--rollout-top-k"] = ["20"]
    refused(made, capsys, "has no support_ids", "--rollout-top-k")


def test_out_when_it_is_there_then_refused_and_untouched(made, capsys):
    _, out, _ = made.write().bundle("--step", "5")
    before = everything(out)
    assert made.bundle("--step", "4")[0] == 2 and everything(out) == before
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words", "gone", "kept"),
    [
        (
            {"--router-replay": ["R3"], "--router-replay-min-agreement": ["0.5"]},
            "servers' experts were not saved",
            1,
            0,
        ),
        ({"--router-replay": ["compare"]}, "metrics of their agreement can't come back", 1, 0),
        (
            {"--rollout-reference-url": ["http://b:1"], "--rollout-kl-coef": ["0.1"]},
            "asks http://b:1 for them",
            0,
            1,
        ),
        ({"--no-save-optim": []}, "saved without the optimizer's state", 0, 1),
    ],
    ids=["R3", "compare", "reference", "optimizer"],
)
def test_what_cannot_come_back_then_status_manifest_and_readme_say_it(
    arguments, words, gone, kept, made, capsys
):
    made.arguments |= arguments
    status, out, manifest = made.write().bundle("--step", "5")
    assert status == 1 and words in manifest["cannot_come_back"][0]
    assert words in (out / "README.txt").read_text() and words in capsys.readouterr().out
    command = command_of(manifest)
    assert (
        all(flag not in command for flag in arguments) if gone else all(flag in command for flag in arguments)
    )
    assert ("--no-load-optim" in command) == ("--no-save-optim" in arguments)


@pytest.mark.parametrize("known", [True, False])
def test_auto_when_the_checkpoint_does_not_know_the_weights_then_the_rows_are_frozen(known, made):
    made.arguments |= {"--rollout-correction": ["auto"], "--rollout-advantage": ["raw"]}
    made.settings |= {"rollout_correction": {"advantage": "batch_mean"}}  # what auto took in its place
    for row in made.rows:
        row |= {"auto/level": 1, "auto/upper": 8.25}
    made.write()
    if known:
        (made.root / "checkpoints/iter_0000004/rollout_cursor.json").write_text('{"auto_level": "sequence"}')
    status, _, manifest = made.bundle("--step", "5")
    command = command_of(manifest)
    assert status == (0 if known else 1)
    if known:
        assert command["--rollout-correction"] == ["auto"] and command["--rollout-advantage"] == ["raw"]
    else:
        assert (
            "--rollout-correction" not in command
            and "--rollout-is sequence" in manifest["cannot_come_back"][0]
        )
        assert command["--rollout-is"] == ["sequence"] and command["--rollout-is-threshold"] == ["8.25"]
        assert command["--rollout-advantage"] == ["batch_mean"]


def test_launches_when_the_command_changed_between_then_it_is_told(made):
    other = {"arguments": ["--lr", "1", "--save", str(made.root / "checkpoints")]}
    made.launches, made.checkpoints = [made.launch | other], [2]
    made.launch["first_step"] = 5
    status, _, manifest = made.write().bundle("--step", "5")
    assert status == 1 and "another command, ranks or versions at step 5" in manifest["cannot_come_back"][0]


def test_step_when_the_run_ended_in_it_then_it_is_told(made, capsys):
    made.rows.pop()
    status, out, manifest = made.write().bundle()
    assert status == 0 and manifest["step"] == 5 and "give --step 6 for that" in capsys.readouterr().out
    shutil.rmtree(out)
    status, _, manifest = made.bundle("--step", "6")
    assert status == 1 and "step 6 has no row in metrics.jsonl" in manifest["cannot_come_back"][0]


@pytest.mark.parametrize("change", ["none", "changed", "gone", "secret"])
def test_correction_file_when_it_is_the_runs_then_it_is_in_the_bundle(change, made):
    import hashlib

    made.root.mkdir()
    path = made.root / "mine.yaml"
    path.write_text("rollout_is: token\n" + (f"# {SECRET}\n" if change == "secret" else ""))
    made.arguments["--rollout-correction-config"] = ["mine.yaml"]
    made.launch["files"] = {"mine.yaml": hashlib.sha256(path.read_bytes()).hexdigest()}
    made.write()
    if change == "changed":
        path.write_text("rollout_is: sequence\n")
    if change == "gone":
        path.unlink()
    status, out, manifest = made.bundle("--step", "5")
    words = {
        "changed": "has changed since",
        "gone": "is not there any more",
        "secret": "holds something secret",
    }
    if change == "none":
        assert status == 0 and (out / "files/correction.yaml").read_text() == "rollout_is: token\n"
        assert command_of(manifest)["--rollout-correction-config"] == ["$BUNDLE/files/correction.yaml"]
    else:
        assert status == 1 and words[change] in manifest["cannot_come_back"][0]
        assert not (out / "files").exists()


def test_secrets_when_planted_everywhere_then_the_bundle_has_none(made, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hidden-in-my-environment")
    made.arguments |= {
        "--my-api-key": ["of-no-known-form"],
        "--tracker": [f"https://me:{SECRET}@tracker/x?token={SECRET}"],
        "--header": [f"Bearer {SECRET}", "hidden-in-my-environment"],
        "--rollout-reward-url": [f"http://a/score?key={SECRET}"],
    }
    made.launch["environment"] = {"NVTE_X": SECRET}
    made.events = [{"step": 5, "reason": f"refused: password={SECRET}", "server": f"http://u:{SECRET}@a"}]
    status, out, manifest = made.write().bundle("--step", "5")
    found = everything(out)
    assert SECRET.encode() not in found and b"of-no-known-form" not in found
    assert b"hidden-in-my-environment" not in found
    assert status == 1 and "something secret was left out" in manifest["cannot_come_back"][0]


def test_checkpoint_when_arguments_had_secrets_then_it_is_not_copied(made, capsys):
    made.arguments["--tracker"] = ["https://***@tracker"]
    refused(made, capsys, "common.pt", flags=["--step", "5", "--with-checkpoint"])


def test_check_when_nothing_changed_then_0(made, capsys):
    _, out, _ = made.write().bundle("--step", "5")
    moved = out.parent / "moved"
    out.rename(moved)
    capsys.readouterr()
    assert cli.main(["incident", "--check", str(moved)]) == 0
    assert "4 files are as they were written: step 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("samples/step_000005_replica0.parquet", "changed"),
        ("README.txt", "missing"),
        ("metrics.jsonl", "not a plain file"),
        ("more.txt", "not in the manifest"),
    ],
)
def test_check_when_a_file_is_not_as_it_was_then_it_is_named(name, words, made, capsys):
    _, out, _ = made.write().bundle("--step", "5")
    path = out / name
    if words == "changed":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif words == "missing":
        path.unlink()
    elif words == "not a plain file":
        path.rename(out.parent / "elsewhere")
        path.symlink_to(out.parent / "elsewhere")
    else:
        path.write_text("more")
    assert cli.main(["incident", "--check", str(out)]) == 2
    assert f"{name}: {words}" in capsys.readouterr().err


def test_check_when_the_manifest_names_files_elsewhere_then_refused(made, capsys):
    _, out, manifest = made.write().bundle("--step", "5")
    manifest["files"]["../../secret"] = {"bytes": 1, "sha256": "0" * 64}
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert cli.main(["incident", "--check", str(out)]) == 2
    assert "../../secret: a path out of the bundle" in capsys.readouterr().err


def test_check_when_there_is_no_manifest_then_refused(tmp_path, capsys):
    assert cli.main(["incident", "--check", str(tmp_path)]) == 2
    assert "no manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "status"), [({}, 0), ({"grad_norm": 0.1 + 1e-16}, 1), ({"time/x": 9.0}, 0)]
)
def test_replay_when_compared_then_the_last_bit_counts(changed, status, made, tmp_path, capsys):
    made.rows[4] |= {"grad_norm": 0.1, "time/x": 1.0}
    _, out, _ = made.write().bundle("--step", "5")
    replayed = MetricsFile(tmp_path / "replayed/metrics.jsonl")
    replayed.write(made.rows[4] | changed)
    assert cli.main(["incident", "--check", str(out), "--replayed", str(tmp_path / "replayed")]) == status
    told = capsys.readouterr().out
    assert f"{4 if status == 0 else 3} of 4 metrics are the same" in told
    assert ("0.1000000000000001" in told) == (status == 1)


def test_command_when_run_then_no_plots_nor_megatron_and_a_check_without_torch(made):
    made.write()
    out = made.log / "incident_step_000006"
    code = (
        "import sys; from megatron_rl_corr import cli; "
        "assert cli.main(['incident', *{words}]) == 0; "
        "assert not {modules} & set(sys.modules)"
    )
    for words, modules in (
        ([str(made.log)], {"matplotlib", "jinja2", "megatron.core"}),
        (["--check", str(out)], {"matplotlib", "jinja2", "megatron.core", "torch"}),
    ):
        program = code.format(words=words, modules=modules)
        subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize(
    "words", [[], ["--check", "x", "run"], ["run", "--replayed", "x"], ["run", "--max-batches", "0"]]
)
def test_arguments_when_they_do_not_fit_then_refused(words, capsys):
    assert cli.main(["incident", *words]) == 2
    assert capsys.readouterr().err.startswith("megatron-rl-corr incident: error: ")


def test_arguments_of_the_command_when_read_by_a_shell_then_quoted():
    from megatron_rl_corr.commands.incident.replay_command import ReplayCommand

    hostile = ReplayCommand(
        "a b.py", ("--x", "$(touch /tmp/y)", "--z", "$BUNDLE/$(y)"), False, "/w w", 16, 8, {}
    )
    text = hostile.as_text(Path("/a'b"))
    words = shlex.split(text.splitlines()[-1].replace("\\", "") or "")
    assert "'$(touch /tmp/y)'" in text and "'$BUNDLE/$(y)'" in text and "--nnodes 2" in text
    assert "megatron_rl_corr.launch" not in text and words


def test_auto_when_batches_had_other_weights_then_the_policy_of_the_step_is_told_to_be_another(made):
    made.arguments["--rollout-correction"], made.checkpoints = ["auto"], [2]
    for row, level in zip(made.rows, (0, 0, 1, 0, 1, 1), strict=True):
        row |= {"auto/level": level, "auto/upper": 2.0}
    status, _, manifest = made.write().bundle("--step", "5")
    assert status == 1 and "steps before 5 had other weights than these" in manifest["cannot_come_back"][1]


def test_readme_when_a_runs_record_is_hostile_then_its_command_is_one_and_runs_nothing_else(made):
    spoof = f"1\n{BEGIN}\ntouch spoofed\n{END}\x1b[2J"
    made.launch["environment"] = {"A; touch named #": "$(touch value)", "B": "`touch b`"}
    made.launch["folder"] = str(made.root / "$(touch folder)")
    made.launch["versions"] = {f"torch{spoof}": spoof}
    made.arguments["--seed"] = ["$(touch argument)", "; touch other"]
    (made.root / "$(touch folder)").mkdir(parents=True)
    _, out, _ = made.write().bundle("--step", "5")
    lines = (out / "README.txt").read_text().splitlines()
    assert lines.count(BEGIN) == lines.count(END) == 1 and "\x1b" not in "".join(lines)
    command = "\n".join(lines[lines.index(BEGIN) + 1 : lines.index(END)])
    bin = made.root / "bin"
    bin.mkdir()
    (bin / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$OUT"\n')
    (bin / "torchrun").chmod(0o755)
    environment = {"PATH": f"{bin}:{os.environ['PATH']}", "OUT": str(made.root / "given")}
    subprocess.run(["bash", "-c", command], cwd=made.root, env=environment, capture_output=True)
    names = {"named", "value", "b", "folder", "argument", "other", "spoofed"}
    assert not [path for path in made.root.rglob("*") if path.name in names]
    given = (made.root / "given").read_text().splitlines()
    assert "$(touch argument)" in given and "; touch other" in given
