"""Folders of weights on the disk: whole models, the newest two, nothing touched that is another's."""

import asyncio
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_rl_corr.engines.sglang.servers import remedy
from megatron_rl_corr.files import check_writable
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.hf_folder import MARKER, write_index
from megatron_rl_corr.weight_sync import update
from megatron_rl_corr.weight_sync.transports.disk import DiskTransport

LOOP = SimpleNamespace(call=asyncio.run)


class Loading:
    """Stands for the control of some servers: notes what they are told to load, and that it
    is whole by then.
    """

    def __init__(self):
        self.loaded = []

    async def update_weights_from_disk(self, path):
        self.loaded.append((path, sorted(HFCheckpoint(path).names)))


@pytest.fixture
def source(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "vocab.txt",
        "model.safetensors.index.json",
        "model.safetensors",
    ):
        (source / name).write_text("{}")
    return source


def push(stages, version, servers, *, cut_off=False):
    for stage in stages:
        stage.aim(servers)
    stages[0].start(version)
    for i, stage in enumerate(stages):
        stage.send([(f"a{i}", torch.full((2,), float(version)))])
        stage.send([(f"b{i}", torch.ones(2, 2)[:, :1])])
    if not cut_off:
        stages[0].deliver(version)


def test_push_when_two_stages_send_then_the_servers_load_one_whole_model_and_two_versions_stay(
    tmp_path, source
):
    folder, servers = tmp_path / "weights", Loading()
    check_writable(folder, "`weight_dir`")
    (folder / "version-of-mine").mkdir()  # no marker in it
    stages = [DiskTransport(folder, source, LOOP, stage=i) for i in range(2)]
    for version in ("7", "8", "9"):
        push(stages, version, servers)
    assert servers.loaded == [(str(folder / f"version-{v}"), ["a0", "a1", "b0", "b1"]) for v in (7, 8, 9)]
    assert {path.name for path in folder.iterdir()} == {"version-of-mine", "version-8", "version-9"}
    last = HFCheckpoint(folder / "version-9")
    assert last.tensor("a1").tolist() == [9, 9] and last.tensor("b0").shape == (2, 1)
    assert {p.stat().st_mode & 0o777 for p in last.path.iterdir()} == {
        (source / "vocab.txt").stat().st_mode & 0o777
    }
    # Each stage counts its files anew in each push.
    assert sorted(path.name for path in last.path.glob("model-*")) == [
        f"model-stage{stage:03d}-{file:05d}.safetensors" for stage in (0, 1) for file in (0, 1)
    ]
    copied = {p.name for p in last.path.iterdir() if p.suffix != ".safetensors"}
    assert copied == {"config.json", "tokenizer.json", "vocab.txt", "model.safetensors.index.json", MARKER}


def test_push_when_the_clock_is_set_back_then_the_two_versions_that_were_pushed_last_stay(tmp_path, source):
    folder, servers = tmp_path / "weights", Loading()
    earlier = DiskTransport(folder, source, LOOP, stage=0)
    push([earlier], "6", servers)
    stage = DiskTransport(folder, source, LOOP, stage=0)
    for number, version in enumerate(("7", "8", "9")):
        push([stage], version, servers)
        later = 4e9 - number  # each was made "before" the one that was pushed before it
        os.utime(folder / f"version-{version}", (later, later))
    push([stage], "10", servers)
    assert {path.name for path in folder.iterdir()} == {"version-9", "version-10"}


def test_push_when_an_earlier_runs_folders_look_newer_then_the_own_one_stays(tmp_path, source):
    folder, servers = tmp_path / "weights", Loading()
    for number in (1, 2, 3):
        push([DiskTransport(folder, source, LOOP, stage=0)], str(number), servers)
        os.utime(folder / f"version-{number}", (4e9 + number, 4e9 + number))
    push([DiskTransport(folder, source, LOOP, stage=0)], "4", servers)
    assert {path.name for path in folder.iterdir()} == {"version-3", "version-4"}


def test_push_when_one_was_cut_off_then_its_files_are_not_in_the_next(tmp_path, source):
    folder, servers = tmp_path / "weights", Loading()
    three, one = ([DiskTransport(folder, source, LOOP, stage=i) for i in range(n)] for n in (3, 1))
    push(three, "1", servers, cut_off=True)
    push(one, "1", servers)
    assert servers.loaded[-1][1] == ["a0", "b0"]
    push(one, "1", servers)  # a resumed run names its first version as the last run did
    assert [path.name for path in folder.iterdir()] == ["version-1"]


def test_push_when_a_folder_of_that_name_is_anothers_then_refused_and_left(tmp_path, source):
    folder = tmp_path / "weights"
    (folder / "version-1").mkdir(parents=True)
    (folder / "version-1" / "thesis.tex").write_text("dear")
    with pytest.raises(FileExistsError, match="`weight_dir`: .*version-1 has no .* not made by this program"):
        push([DiskTransport(folder, source, LOOP, stage=0)], "1", Loading())
    assert (folder / "version-1" / "thesis.tex").read_text() == "dear"


def test_push_when_a_removal_was_cut_off_anywhere_then_the_next_run_still_knows_the_folder(
    tmp_path, source, monkeypatch
):
    folder, stage = tmp_path / "weights", DiskTransport(tmp_path / "weights", source, LOOP, stage=0)
    unlink, rmdir = Path.unlink, Path.rmdir

    class Killed(BaseException):
        pass

    def removing(path, *arguments):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        (rmdir if path.is_dir() else unlink)(path)

    for before_the_kill in range(9):
        push([stage], "1", Loading(), cut_off=True)
        left = before_the_kill
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", removing)
            patch.setattr(Path, "rmdir", removing)
            patch.setattr(
                "shutil.rmtree", lambda path: [removing(p) for p in (*sorted(path.iterdir()), path)]
            )
            try:
                stage.close()
            except Killed:
                assert before_the_kill < 4  # two buckets, the marker, the folder
        push([stage], "1", Loading())
        assert {path.name for path in folder.iterdir()} == {"version-1"}


def test_close_when_a_push_was_cut_off_then_nothing_unfinished_stays(tmp_path, source):
    stage = DiskTransport(tmp_path / "weights", source, LOOP, stage=0)
    push([stage], "1", Loading(), cut_off=True)
    stage.close()
    assert list((tmp_path / "weights").iterdir()) == []


def test_index_when_two_files_hold_one_tensor_then_error(tmp_path, source):
    stages = [DiskTransport(tmp_path / "weights", source, LOOP, stage=i) for i in range(2)]
    stages[0].start("1")
    for stage in stages:
        stage.send([("x", torch.ones(1))])
    with pytest.raises(
        OSError, match=r"\['x'\] of model-stage001-00000.safetensors in .* are in another file too"
    ):
        write_index(tmp_path / "weights" / ".unfinished")


def test_folder_when_a_file_is_in_its_place_then_refused(tmp_path):
    (tmp_path / "file").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="`weight_dir` .*file can't be made: File exists"):
        check_writable(tmp_path / "file", "`weight_dir`")


def test_error_when_a_server_cannot_read_the_folder_then_the_flag_and_the_remedy():
    what = remedy("/update_weights_from_disk", 400, "Failed to get weights iterator")
    assert what.endswith("`weight_dir` under the same path, and may the server read it?")


class Writing:
    """Stands for the servers of a push over disk, whose folder takes `took_s` to write."""

    took_s = 0.3

    def __init__(self):
        self.calls, self.transport, self.coverage, self.planned = [], self, None, None
        self.in_session, self.verifiers, self.drafts = False, {}, self
        self.rounding, self.quantization = "none", None

    def without_unsent(self, units):
        return units

    def send(self, bucket, version):
        time.sleep(self.took_s)

    def note_written(self, seconds):
        self.calls.append(("note_written", seconds >= self.took_s))

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name)


def test_push_then_the_time_that_a_folder_takes_is_none_of_what_servers_have():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    servers, named = Writing(), ("w", torch.ones(2))
    exporter = SimpleNamespace(leads=True, sends=True, stage=0, num_stages=1, units=lambda meet: [[named]])
    try:
        update._push_once(exporter, servers, "7", 1000)
    finally:
        dist.destroy_process_group()
    names = ["start", "finish", ("note_written", True), "begin", "deliver", "end", "expect", "resume"]
    assert servers.calls == names
