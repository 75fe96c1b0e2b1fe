"""A run that samples ahead is killed and goes on on another number of replicas: groups that waited are
trained as they were, in the defined order, and the server is not asked for them again.

The server is a real SGLang server behind a door that notes each prompt it is asked for.
"""

import json
import shutil
import signal
from collections import Counter

import pyarrow.parquet as pq
import pytest

from megatron_rl_corr.rollout.cursor import dealt_order
from megatron_rl_corr.rollout.waiting_groups import FOLDER
from tests.conftest import ROOT
from tests.faults.door import Door
from tests.faults.drills import drill, long
from tests.faults.notes import events_of, notes_of
from tests.matrix.patched import unchanged
from tests.mcore.launched import launch, write_data

SCRIPT = ROOT / "tests/faults/waiting_pretrain.py"
SAVED, STEPS, GROUP, GROUPS = 2, 6, 4, 8
RUN = ["--global-batch-size", GROUP * GROUPS, "--save-interval", SAVED, "--train-iters", STEPS]
RUN += ["--moe-grouped-gemm", "--moe-permute-fusion", "--router-replay", "R3", "--rollout-max-lag", 3]
RUN += ["--rollout-save-routed-experts"]
# so slow that the routers of a random model choose as they did when a group was sampled, some versions before
RUN += ["--lr", 1e-5]


class NotingDoor(Door):
    """Keeps the prompts that were asked for."""

    def __init__(self, target):
        self.asked = []
        super().__init__(target, self._note)

    def _note(self, path, body):
        if path == "/generate":
            self.asked.append(tuple(json.loads(body)["input_ids"]))
        return body


def prompt_of(row):
    return [5 + row % 13, 20 + row // 13 % 13, 40 + row // 169]


def run(folder, name, url, model, *flags, processes, kill="none:0"):
    """The ended run of so many replicas, which writes into the folder `name`."""
    out = folder / name
    out.mkdir(exist_ok=True)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"input_ids": prompt_of(row)}) + "\n" for row in range(300))
    )
    return launch(
        folder,
        name,
        model,
        url,
        SCRIPT,
        *RUN,
        *["--rollout-save-trajectories", out / "samples", "--rollout-events", out / "events.jsonl"],
        *flags,
        processes=processes,
        KILL_AT=kill,
        NOTES=str(out / "notes.jsonl"),
    )


def waited(folder):
    """Of each replica the groups that waited at the save, (number, hash), in their order."""
    notes = [one for one in notes_of(folder, "waits") if one["saved"] == SAVED]
    found = {}
    for one in sorted(notes, key=lambda one: (one["rank"], one["place"])):
        found.setdefault(one["rank"], []).append((one["number"], one["sha256"]))
    return [found[rank] for rank in sorted(found)]


def rows_of(folder):
    """(group, sample) -> what a sample file has of it, but for its place in the batch."""
    rows = {}
    for path in sorted((folder / "samples").glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            for name in ("prompt_index", "train_logprobs", "advantages", "loss_mask"):
                del row[name]
            rows[row["group"], row["sample_index"]] = row
    return rows


@pytest.fixture(scope="module")
def door(keeping_server, tiny_moe_dir):
    with unchanged(keeping_server, tiny_moe_dir):
        door = NotingDoor(keeping_server.url)
        yield door
        door.close()


@pytest.fixture(scope="module")
def killed(door, tiny_moe_dir, tmp_path_factory):
    """The folder of a run of four replicas that was killed after its groups had been saved."""
    folder = tmp_path_factory.mktemp("waiting")
    write_data(folder)
    ended = run(folder, "killed", door.url, tiny_moe_dir, processes=4, kill=f"saved:{SAVED + 1}")
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-4000:]
    return folder


def copy_of(killed, name):
    """A run's folder that begins where the killed one ended."""
    shutil.copytree(killed / "killed/checkpoints", killed / name / "checkpoints")
    return killed / name


def load(folder, out, door, model, *flags, processes):
    """The run of this folder goes on, on so many replicas."""
    door.asked.clear()
    checkpoints = ["--load", out / "checkpoints"]
    ended = run(folder, out.name, door.url, model, *checkpoints, *flags, processes=processes)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended


def assert_each_trained_once(before, after):
    """All groups up to the last, each by one of the two attempts; what the first trained behind its
    checkpoint is done anew.
    """
    trained = [one["number"] for one in notes_of(before, "taken") if one["step"] < SAVED]
    trained += [one["number"] for one in notes_of(after, "taken")]
    assert sorted(trained) == list(range(STEPS * GROUPS))


def assert_restored(out, door, hashes):
    """These groups, number -> hash, were trained as they were, and nobody was asked for them."""
    taken = {one["number"]: one["sha256"] for one in notes_of(out, "taken")}
    assert {number: taken[number] for number in hashes} == hashes
    assert {one["number"] for one in notes_of(out, "sampled")}.isdisjoint(hashes)
    prompts = {group: tuple(row["prompt_ids"]) for (group, _), row in rows_of(out).items()}
    asked = Counter(door.asked)
    assert {asked[prompts[number]] for number in hashes} == {0}
    others = set(prompts) - set(hashes)  # and their number is what was asked for
    assert {asked[prompts[number]] for number in others} == {GROUP}
    restored = [n for one in events_of(out, "groups_restored") for n in one["groups"]]
    assert sorted(restored) == sorted(hashes)


@drill(
    "SIGKILL of all ranks with groups sampled ahead, then --load on as many replicas or half of them",
    promised="trained as they were, not sampled again",
)
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=long)])
def test_groups_when_killed_and_loaded_then_trained_bit_for_bit_in_order(
    killed, door, tiny_moe_dir, seen, processes
):
    out = copy_of(killed, f"on{processes}")
    load(killed, out, door, tiny_moe_dir, processes=processes)
    waits = waited(killed / "killed")
    hashes = dict(pair for own in waits for pair in own)
    assert len(waits) == 4 and len(hashes) >= 20
    numbers = [[number for number, _ in own] for own in waits]
    order, share = dealt_order(numbers), GROUPS // processes
    taken = notes_of(out, "taken")
    for rank in range(processes):
        mine = order[rank::processes]
        assert processes != 4 or mine == numbers[rank]  # each has its own again
        for at in range(0, len(mine), share):  # a step takes them in this order, and has them by number
            step = [one for one in taken if one["rank"] == rank and one["step"] == SAVED + at // share]
            assert [one["number"] for one in step] == sorted(mine[at : at + share])
    for step in range(3):  # each batch has the groups of a run that was never killed
        batch = {one["number"] for one in taken if one["step"] == SAVED + step}
        assert batch == {n for own in numbers for n in own[2 * step : 2 * step + 2]}
    assert_restored(out, door, hashes)
    assert_each_trained_once(killed / "killed", out)
    assert events_of(out, "groups_sampled_again") == []
    seen(
        f"{len(hashes)} groups of 4 replicas on {processes}, bit for bit; the server got no prompt of theirs"
    )


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@long
@drill(
    "a bit flipped in one saved group, another cut, a third gone",
    promised="named, and these alone are sampled again",
)
def test_groups_when_files_are_damaged_then_named_and_sampled_again(killed, door, tiny_moe_dir, seen):
    out = copy_of(killed, "damaged")
    waits = waited(killed / "killed")
    hashes = dict(pair for own in waits for pair in own)
    numbers = [number for own in waits for number, _ in own]
    flipped, cut, gone = numbers[0], numbers[7], numbers[-1]
    folder = out / f"checkpoints/iter_{SAVED:07d}/{FOLDER}"
    paths = {number: folder / f"group_{number:06d}.parquet" for number in (flipped, cut, gone)}
    flip(paths[flipped])
    paths[cut].write_bytes(paths[cut].read_bytes()[:-100])
    paths[gone].unlink()
    load(killed, out, door, tiny_moe_dir, processes=2)
    events = {tuple(one["groups"]): one["reason"] for one in events_of(out, "groups_sampled_again")}
    assert set(events) == {(flipped,), (cut,), (gone,)}
    assert all(str(paths[number]) in events[number,] for number in paths)
    assert "SHA-256" in events[flipped,] and "bytes" in events[cut,]
    assert_restored(out, door, {n: one for n, one in hashes.items() if n not in paths})
    assert_each_trained_once(killed / "killed", out)
    # where they were in the order
    order = dealt_order([[number for number, _ in own] for own in waits])
    for step in range(3):
        batch = {one["number"] for one in notes_of(out, "taken") if one["step"] == SAVED + step}
        assert batch == set(order[step * GROUPS : (step + 1) * GROUPS])
    seen(f"3 of {len(hashes)} groups were sampled again, in their places")


@long
@drill(
    "SIGKILL while a replica writes its groups", promised="its groups are sampled again, the others' are not"
)
def test_groups_when_killed_in_the_write_then_that_replicas_are_sampled_again(
    door, tiny_moe_dir, tmp_path, seen
):
    write_data(tmp_path)
    before = tmp_path / "killed"
    ended = run(tmp_path, "killed", door.url, tiny_moe_dir, processes=4, kill=f"writing:{SAVED}")
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-4000:]
    folder = before / f"checkpoints/iter_{SAVED:07d}/{FOLDER}"
    assert sorted(path.name for path in folder.glob("replica*")) == [f"replica{n}.json" for n in (0, 2, 3)]
    waits = waited(before)
    hashes = {number: one for rank, own in enumerate(waits) if rank != 1 for number, one in own}
    assert len(hashes) == 18
    out = copy_of(tmp_path, "loaded")
    ended = load(tmp_path, out, door, tiny_moe_dir, processes=2)
    assert "replica1.json" in ended.stderr
    assert_restored(out, door, hashes)
    again = {n for one in events_of(out, "groups_sampled_again") for n in one["groups"]}
    assert again == {number for number, _ in waits[1]}
    assert_each_trained_once(before, out)
    seen(f"{len(again)} groups were sampled again, {len(hashes)} were not")


@long
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--rollout-temperature", 0.9], "--rollout-temperature 1.0 there, 0.9 here"),
        (["--rollout-max-lag", 1], "stale: it has samples of version 0"),
    ],
)
def test_groups_when_settings_changed_then_named_and_sampled_again(killed, door, tiny_moe_dir, flags, why):
    out = copy_of(killed, f"changed{flags[0]}")
    ended = load(killed, out, door, tiny_moe_dir, *flags, processes=4)
    assert why in ended.stderr
    hashes = dict(pair for own in waited(killed / "killed") for pair in own)
    again = {n for one in events_of(out, "groups_sampled_again") for n in one["groups"]}
    assert again and again <= set(hashes)
    if hashes.keys() - again:
        assert_restored(out, door, {n: one for n, one in hashes.items() if n not in again})
    assert_each_trained_once(killed / "killed", out)
