"""Nothing is written through a link: of every writer, one that somebody planted in the place
of what it writes.
"""

import asyncio
import json
import os
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.events import Events
from megatron_rl_corr.files import check_writable, open_to_append, write_atomically
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.hf_folder import MARKER, UnfinishedFolder, remove
from megatron_rl_corr.moe.statistics import ExpertLog
from megatron_rl_corr.observability.metrics_file import MetricsFile
from megatron_rl_corr.observability.run_log import RunLog
from megatron_rl_corr.rollout.sample_file import write_trajectories
from megatron_rl_corr.rollout.trace_file import write_trace
from megatron_rl_corr.weight_sync.transports.disk import DiskTransport
from tests.faults.drills import drill

LOOP = SimpleNamespace(call=asyncio.run)
VERSION = "7"


@pytest.fixture
def victim(tmp_path):
    """Somebody's folder, which looks like ours, with a file; and whether it is as it was."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_text("theirs")
    (folder / MARKER).write_text("{}")

    def untouched():
        names = sorted(path.name for path in folder.iterdir())
        return names == ["file", MARKER] and (folder / "file").read_text() == "theirs"

    return folder, untouched


@pytest.fixture
def out(tmp_path):
    """The folder that the user names."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def disk(out):
    source = out.parent / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    transport = DiskTransport(out, source, LOOP, stage=0)
    transport.aim(SimpleNamespace(update_weights_from_disk=None))
    transport.start(VERSION)
    transport.send([("a", torch.ones(1))])
    transport.deliver(VERSION)


def experts(out):
    ExpertLog(str(out), lambda: None).write(1, (0,), {"load": torch.ones(1, 2)})


ADDED = {
    "metrics.jsonl": lambda out: MetricsFile(out / "metrics.jsonl").write({"step": 1}),
    "experts.jsonl": experts,
    "events.jsonl": lambda out: Events().open(out / "events.jsonl"),
    "any.log": lambda out: open_to_append(out / "any.log").write("x"),
}
"""File in the folder -> what adds to it."""
REPLACED = {
    "run.json": lambda out: RunLog(str(out), {}, writer=SimpleNamespace()),
    "any.json": lambda out: write_atomically(out / "any.json", b"ours"),
    "step_000001_replica0.parquet": lambda out: write_trajectories(out / "step_000001_replica0.parquet", []),
    "step_000001_replica0.json": lambda out: write_trace(
        out / "step_000001_replica0.json", [], {}, taken=None, base=0.0, facts={}
    ),
}
"""File -> what puts a new one in its place."""
FOLDERS = {
    "tensorboard": lambda out: RunLog(str(out), {}),
    ".iter_0000004.unfinished": lambda out: UnfinishedFolder(out / "iter_0000004", {}).begin(),
    ".iter_0000004.old": lambda out: UnfinishedFolder(out / "iter_0000004", {}).begin(),
    ".unfinished": disk,
    f"version-{VERSION}": disk,
}
"""Folder -> what would write into it, or remove it."""


@drill(
    "a link to somebody's file or folder in the place of what a run writes",
    promised="nothing goes through it",
)
@pytest.mark.parametrize("name", [*ADDED, *FOLDERS])
def test_writer_when_a_link_is_in_its_place_then_refused_and_what_it_leads_to_is_as_it_was(
    name, out, victim, seen
):
    folder, untouched = victim
    (out / name).symlink_to(folder / "file" if name in ADDED else folder)
    with pytest.raises(OSError):
        (ADDED | FOLDERS)[name](out)
    assert untouched() and (out / name).is_symlink()
    seen("refused by name")


@pytest.mark.parametrize("name", ADDED)
def test_writer_when_a_link_leads_to_a_file_that_is_not_there_then_none_is_made(name, out, victim):
    folder, untouched = victim
    (out / name).symlink_to(folder / "new")
    with pytest.raises(OSError):
        ADDED[name](out)
    assert untouched()


@drill(
    "a link to somebody's file under the name of a file that a run replaces", promised="the link is replaced"
)
@pytest.mark.parametrize("name", REPLACED)
def test_writer_when_it_replaces_a_file_then_the_link_itself_is_replaced(name, out, victim, seen):
    folder, untouched = victim
    (out / name).symlink_to(folder / "file")
    REPLACED[name](out)
    assert untouched() and (out / name).is_file() and not (out / name).is_symlink()
    seen("replaced")


def test_writer_when_a_link_has_its_temporary_name_then_it_takes_another(out, victim, monkeypatch):
    folder, untouched = victim
    (out / ".a.guessed.tmp").symlink_to(folder / "file")
    (out / ".probe.guessed").symlink_to(folder / "file")
    for write in (lambda: write_atomically(out / "a", b"ours"), lambda: check_writable(out, "`log_dir`")):
        monkeypatch.setattr("tempfile._get_candidate_names", lambda: iter(["guessed", "free"]))
        write()
        assert untouched()
    # a probe leaves nothing behind
    assert sorted(os.listdir(out)) == [".a.guessed.tmp", ".probe.guessed", "a"]


def test_folder_when_a_link_in_it_leads_elsewhere_then_only_the_link_goes_with_it(out, victim):
    folder, untouched = victim
    (out / MARKER).write_text("{}")
    (out / "link").symlink_to(folder)
    remove(out)
    assert untouched() and not out.exists()


def test_push_by_disk_when_another_version_is_a_link_then_it_is_left_alone(out, victim, tmp_path):
    folder, untouched = victim
    for name in ("version-1", "version-2", "version-3"):
        (out / name).symlink_to(folder)

    async def load(path):
        assert HFCheckpoint(path).names

    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({}))
    transport = DiskTransport(out, source, LOOP, stage=0)
    transport.aim(SimpleNamespace(update_weights_from_disk=load))
    transport.start(VERSION)
    transport.send([("a", torch.ones(1))])
    transport.deliver(VERSION)
    assert untouched() and sorted(os.listdir(out)) == [
        "version-1",
        "version-2",
        "version-3",
        f"version-{VERSION}",
    ]
