"""`megatron-rl-corr incident`: writes a bundle of a step, and checks one."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from megatron_rl_corr import __version__
from megatron_rl_corr.commands.incident.bundle import MANIFEST, check_bundle, new_folder, write_manifest
from megatron_rl_corr.commands.incident.chosen_step import alerts_of, choose_step, ledger_of
from megatron_rl_corr.commands.incident.compare import compare_steps, comparison
from megatron_rl_corr.commands.incident.losses import Findings, changed_files, find_losses
from megatron_rl_corr.commands.incident.readme import readme
from megatron_rl_corr.commands.incident.recorded_run import Launch, RecordedRun
from megatron_rl_corr.commands.incident.replay_command import BUNDLE, ReplayCommand, make_command
from megatron_rl_corr.commands.incident.sample_files import BatchFiles, SampleFolder
from megatron_rl_corr.commands.incident.start_point import TRACKER, StartPoint, find_start
from megatron_rl_corr.engines.secrets import HIDDEN, json_without_secrets, without_lookalikes
from megatron_rl_corr.events import read_events
from megatron_rl_corr.files import CONFIG_NAME, METRICS_NAME
from megatron_rl_corr.observability.metrics_file import encode_line
from megatron_rl_corr.tables import one_message, visible

ROWS_BEFORE = 20
"""Steps before the first one that is replayed whose metrics and events are in the bundle."""
INCOMPLETE = 1
"""Exit status where something of the step cannot come back, or a replay differs."""


def run(arguments: argparse.Namespace, stream: TextIO) -> int:
    """Write or check a bundle; 1 where something cannot come back, or differs.

    Raises:
        OSError, ValueError: nothing was written, or the bundle is not as it was written.
    """
    if (arguments.run_dir is None) == (arguments.check is None):
        raise ValueError("give RUN_DIR to write a bundle, or --check BUNDLE to check one")
    if arguments.replayed is not None and arguments.check is None:
        raise ValueError("--replayed compares with a bundle; give --check BUNDLE too")
    if arguments.max_batches < 1:
        raise ValueError(f"--max-batches must be at least 1, got {arguments.max_batches}")
    if arguments.check is not None:
        return _check(Path(arguments.check), arguments.replayed, stream)
    return _write(arguments, stream)


def _check(bundle: Path, replayed: str | None, stream: TextIO) -> int:
    manifest = check_bundle(bundle)
    # a bundle may be somebody else's, who wrote what its manifest says
    say = partial(_say, stream)
    say(f"{len(manifest['files'])} files are as they were written: step {manifest['step']}")
    for line in manifest["cannot_come_back"]:
        say(f"cannot come back: {line}")
    for name, wanted in manifest["versions"].items():
        try:
            here = version(name)
        except PackageNotFoundError:
            continue
        if here != wanted:
            say(f"{name} is {here} here, and was {wanted} in the run")
    if replayed is None:
        return 0
    steps = compare_steps(bundle, manifest, Path(replayed))
    print(visible(comparison(steps)), file=stream)
    return INCOMPLETE if any(one.differ for one in steps) else 0


def _write(arguments: argparse.Namespace, stream: TextIO) -> int:
    recorded = RecordedRun.read(arguments.run_dir)
    if arguments.step is None:
        step, why = choose_step(recorded.rows)
    else:
        step, why = arguments.step, "it was asked for"
    launch = recorded.launch_of(step)
    samples = SampleFolder(recorded, launch)
    if arguments.step is None and samples.newest > recorded.rows[-1]["step"]:
        print(
            f"step {samples.newest} has samples and no metrics, as one that the run ended in: give --step "
            f"{samples.newest} for that",
            file=stream,
        )
    batch = samples.holding(step)
    start = _start(recorded, batch)
    batches = _batches(samples, start, batch, arguments.max_batches)
    for one in batches:
        one.check_rewards(recorded.row(one.first))
    found = find_losses(recorded, launch, start, batches, os.environ)
    command = _command(launch, start, batch, found, with_checkpoint=arguments.with_checkpoint)
    found.lost += changed_files(recorded, launch, [command.script, *command.arguments])
    out = Path(arguments.out or recorded.folder / f"incident_step_{step:06d}")
    row = recorded.row(step)
    facts = {
        "made_by": f"megatron_rl_corr {__version__}",
        "step": step,
        "why": why,
        "replayed_steps": [batches[0].first, batch.last],
        "alerts": [] if row is None else alerts_of(row),
        "ledger": ledger_of(recorded.rows, step),
        "cannot_come_back": found.lost,
        "command": command.as_json(),
        "start": {
            "iteration": start.iteration,
            "folder": None if start.checkpoint is None else str(start.checkpoint),
            "in_bundle": arguments.with_checkpoint and start.iteration > 0,
            "files": start.listing(),
        },
        "versions": launch.record["versions"],
    }
    facts = json_without_secrets(facts, os.environ)
    with new_folder(out) as folder:
        _copy(folder, recorded, batches, found, facts)
        if facts["start"]["in_bundle"]:
            _copy_checkpoint(folder, start)
        text = readme(facts, command, out.resolve())
        (folder / "README.txt").write_text(without_lookalikes(text, os.environ), encoding="utf-8")
        digest = write_manifest(folder, facts)
    _print(facts, batches, out, digest, stream)
    return INCOMPLETE if found.lost else 0


def _start(recorded: RecordedRun, batch: BatchFiles) -> StartPoint:
    start = find_start(recorded, batch.first)
    if start is None:
        raise ValueError(
            f"no checkpoint of before step {batch.first} is there, and the step can't be done again "
            "without one: train with --save DIR and --save-interval N (and a --save-retain-interval that "
            "keeps it)"
        )
    return start


def _batches(samples: SampleFolder, start: StartPoint, last: BatchFiles, most: int) -> list[BatchFiles]:
    """The batches from the checkpoint to the step, in order."""
    found, step = [], start.iteration + 1
    while step < last.first:
        if len(found) + 1 >= most:
            number = -(-(last.last - start.iteration) // last.batch.updates)
            raise ValueError(
                f"the nearest checkpoint before step {last.first} is of iteration {start.iteration}: "
                f"{number} batches would be done again, and at most {most} are; give --max-batches "
                f"{number}, or train with a smaller --save-interval"
            )
        found.append(samples.beginning(step))
        step = found[-1].last + 1
    if step != last.first:
        raise ValueError(
            f"{samples.folder}: the batch of step {last.first} does not begin behind another one"
        )
    return [*found, last]


def _command(
    launch: Launch, start: StartPoint, batch: BatchFiles, found: Findings, *, with_checkpoint: bool
) -> ReplayCommand:
    load = None if start.folder is None else str(start.folder.resolve())
    if with_checkpoint and any(HIDDEN in word for word in launch.arguments):
        raise ValueError(
            "--with-checkpoint: something secret was left out of the command line, and Megatron's "
            "checkpoint has all arguments (common.pt); leave the flag out, and hand the checkpoint on by "
            "itself"
        )
    if with_checkpoint and load is None:
        raise ValueError(
            "--with-checkpoint has no effect, as the step is done again from the run's own beginning; "
            "leave it out"
        )
    if with_checkpoint:
        load = f"{BUNDLE}/checkpoints"
    command = make_command(launch, start, batch.last, load=load, changes=found.changes)
    hidden = [word for word in command.arguments if HIDDEN in word]
    if hidden:
        found.lost.append(
            f"something secret was left out of {len(hidden)} words of the command ({hidden[0]}): put your "
            "own there"
        )
    return command


def _copy(
    folder: Path,
    recorded: RecordedRun,
    batches: Sequence[BatchFiles],
    found: Findings,
    facts: Mapping[str, Any],
) -> None:
    (folder / "samples").mkdir()
    for path in (path for one in batches for path in one.paths):
        shutil.copyfile(path, folder / "samples" / path.name)
    for name, path in found.copied.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    first, last = facts["replayed_steps"]
    kept = range(first - ROWS_BEFORE, last + 1)
    lines = [encode_line(row) for row in recorded.rows if row["step"] in kept]
    (folder / METRICS_NAME).write_text("".join(lines), encoding="ascii")
    settings = json.dumps(json_without_secrets(recorded.settings, os.environ), indent=2) + "\n"
    (folder / CONFIG_NAME).write_text(settings, encoding="utf-8")
    events = [event for event in _events(recorded) if event.get("step") in kept]
    if events:
        text = "".join(json.dumps(json_without_secrets(event, os.environ)) + "\n" for event in events)
        (folder / "events.jsonl").write_text(text, encoding="utf-8")


def _events(recorded: RecordedRun) -> list[dict[str, Any]]:
    named = {launch.value("--rollout-events"): launch for launch in recorded.launches}
    places = {recorded.located(path, launch) for path, launch in named.items() if path is not None}
    return [event for path in sorted(filter(None, places)) for event in read_events(path)]


def _copy_checkpoint(folder: Path, start: StartPoint) -> None:
    shutil.copytree(start.checkpoint, folder / "checkpoints" / start.checkpoint.name)
    (folder / "checkpoints" / TRACKER).write_text(str(start.iteration))


def _print(
    facts: Mapping[str, Any], batches: Sequence[BatchFiles], out: Path, digest: str, stream: TextIO
) -> None:
    say = partial(_say, stream)
    start, files = facts["start"], sum(len(one.paths) for one in batches)
    first, last = facts["replayed_steps"]
    where = (
        f"the checkpoint of iteration {start['iteration']}" if start["iteration"] else "the run's beginning"
    )
    say(f"step {facts['step']}: {facts['why']}")
    for alert in facts["alerts"]:
        say(f"alert: {alert}")
    say(f"replays the steps {first} to {last} from {where}, with {files} sample files")
    for line in facts["cannot_come_back"]:
        say(f"cannot come back: {line}")
    say(f"written: {out} ({MANIFEST} has SHA-256 {digest}); README.txt has the command")


def _say(stream: TextIO, text: str) -> None:
    print(one_message(text), file=stream)
