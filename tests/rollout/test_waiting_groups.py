"""Groups that wait at a checkpoint: every bit comes back, their order is defined, and what is damaged is
named.
"""

import itertools
import json
import random
from dataclasses import replace

import pytest
import torch

from megatron_rl_corr.rollout import SamplingParams
from megatron_rl_corr.rollout.cursor import Cursor, Drawn, SavedCursor, dealt_order
from megatron_rl_corr.rollout.groups import Group
from megatron_rl_corr.rollout.waiting_groups import (
    FOLDER,
    OpenGroups,
    SavedGroup,
    WaitingList,
    list_path,
    read_group,
    size_of,
    write_waiting,
)
from tests.rollout.test_sample_file import full, response

SETTINGS = {"group_size": 2, "temperature": 0.7}


def group_of(number, tokens=6, **options):
    """Two samples with all that a trajectory may have, and one without."""
    first = replace(full(tokens, number).trajectory, branch=1, began="edited", engine="sglang")
    plain = response(0, number)
    rewards, parts = [0.1, -0.0], [{"right": 0.1, "odd": float("nan")}, {}]
    return Group(number, [first, plain], rewards, parts, **options)


def bits(value):
    """A value with its tensors as types, shapes and bytes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {name: bits(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(one) for one in value]
    return bits(vars(value)) if hasattr(value, "__dict__") else value


def write(folder, groups, *, begun=(), max_bytes=1e9, replica=0):
    return write_waiting(
        folder,
        replica,
        OpenGroups(groups, begun, per_step=2),
        max_bytes=max_bytes,
        settings=SETTINGS,
        max_lag=3,
        sampling=SamplingParams(8),
        row_of=lambda number: number % 5,
    )


def read_list(folder, replica=0):
    return WaitingList.parse(list_path(folder, replica).read_text())


def test_groups_when_written_and_read_then_bit_for_bit_in_their_order(tmp_path):
    folder, groups = tmp_path / FOLDER, [group_of(12), group_of(3), group_of(1_000_007, tokens=1)]
    written = write(folder, groups)
    listed = read_list(folder)
    assert listed.waiting == written.groups == (12, 3, 1_000_007)
    assert (dict(listed.settings), listed.max_lag, written.beyond) == (SETTINGS, 3, ())
    assert listed.per_step == 2
    assert written.bytes == sum(path.stat().st_size for path in folder.glob("*.parquet"))
    for group, saved in zip(groups, listed.groups, strict=True):
        assert bits(read_group(folder, saved)) == bits(group)
    no_parts = replace(groups[0], reward_parts=[])  # the environment gave the reward
    write(folder, [no_parts], replica=1)
    assert bits(read_group(folder, read_list(folder, 1).groups[0])) == bits(no_parts)


def test_groups_when_above_the_bound_then_the_first_are_written(tmp_path):
    groups = [group_of(1), group_of(2, tokens=40), group_of(3)]
    sizes = [size_of(group.trajectories) for group in groups]
    assert sizes[0] == sizes[2] < sizes[1]
    written = write(tmp_path / FOLDER, groups, max_bytes=sizes[0] + sizes[1] - 1)
    assert (written.groups, written.beyond) == ((1,), (2, 3))  # not 3 in the place of 2
    listed = read_list(tmp_path / FOLDER)
    assert (listed.waiting, [one.number for one in listed.groups]) == ((1, 2, 3), [1])
    assert len(list((tmp_path / FOLDER).glob("*.parquet"))) == 1


def test_size_when_counted_then_that_of_all_tensors():
    # 2 prompt ids of 8 bytes; 3 of each output id (8) and log-prob (4); routes [4, 5, 2] of one byte
    sample = response(3, routed_experts=torch.zeros(4, 5, 2, dtype=torch.uint8))
    assert size_of([sample, sample]) == 2 * (2 * 8 + 3 * 12 + 40)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "error", "text"),
    [
        (flip, ValueError, "group_000007.parquet is damaged: its SHA-256"),
        (cut, ValueError, "group_000007.parquet has .* bytes, and had"),
        (lambda path: path.unlink(), OSError, "group_000007.parquet"),
    ],
)
def test_group_when_its_file_is_damaged_then_it_is_named_and_others_are_read(tmp_path, damage, error, text):
    folder, groups = tmp_path / FOLDER, [group_of(6), group_of(7)]
    write(folder, groups)
    damage(folder / "group_000007.parquet")
    whole, damaged = read_list(folder).groups
    assert bits(read_group(folder, whole)) == bits(groups[0])
    with pytest.raises(error, match=text):
        read_group(folder, damaged)


def test_group_when_each_bit_of_its_file_is_flipped_then_it_is_refused(tmp_path):
    folder = tmp_path / FOLDER
    write(folder, [group_of(7)])
    [saved] = read_list(folder).groups
    path = folder / saved.file_name
    content = path.read_bytes()
    for place in range(0, len(content), 97):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            read_group(folder, saved)


def test_group_when_its_file_holds_another_then_it_is_refused(tmp_path):
    folder = tmp_path / FOLDER
    write(folder, [group_of(6), group_of(7)])
    six = read_list(folder).groups[0]
    (folder / six.file_name).rename(folder / "group_000008.parquet")
    with pytest.raises(ValueError, match="holds another group"):
        read_group(folder, replace(six, number=8))


def test_list_when_any_bit_is_flipped_then_it_is_refused_or_the_same(tmp_path):
    folder = tmp_path / FOLDER
    write(folder, [group_of(7)])
    content, listed = list_path(folder, 0).read_bytes(), read_list(folder)
    for place, bit in itertools.product(range(len(content)), range(8)):
        changed = content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
        try:
            assert WaitingList.parse(changed.decode("latin1")) == listed
        except ValueError:
            continue
    with pytest.raises(ValueError, match="no list of groups"):
        WaitingList.parse("[]")
    with pytest.raises(ValueError, match="its checksum is another"):
        WaitingList.parse(json.dumps(json.loads(content) | {"max_lag": 4}))


def test_write_when_it_fails_then_there_is_no_list(tmp_path, monkeypatch):
    def full_disk(path, *others, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_rl_corr.rollout.waiting_groups.write_trajectories", full_disk)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / FOLDER, [group_of(1)])
    assert list((tmp_path / FOLDER).iterdir()) == []
    with pytest.raises(OSError):  # a checkpoint that was removed meanwhile is not made anew
        write(tmp_path / "removed" / FOLDER, [group_of(1)])


def test_order_when_by_hand_then_the_first_of_each_replica_the_second_of_each():
    assert dealt_order([(6, 4), (3,), (5, 2)]) == [6, 3, 5, 4, 2]
    assert dealt_order([]) == dealt_order([(), ()]) == []


@pytest.mark.parametrize("seed", range(20))
def test_order_when_dealt_to_other_replicas_then_each_step_takes_the_same_groups(seed):
    """The naive reference: steps of the old replicas take G each, those of the new ones R G / S each."""
    draw = random.Random(seed)
    replicas, share, steps = draw.choice([1, 2, 4, 6]), draw.choice([2, 4, 6]), draw.randint(1, 4)
    numbers = draw.sample(range(1000), replicas * share * steps)
    waiting = [numbers[rank::replicas] for rank in range(replicas)]
    each = replicas * share
    others = draw.choice([size for size in range(1, each + 1) if each % size == 0])
    dealt = [dealt_order(waiting)[rank::others] for rank in range(others)]
    for step in range(steps):
        old = {n for own in waiting for n in own[step * share : (step + 1) * share]}
        new = [n for own in dealt for n in own[step * each // others : (step + 1) * each // others]]
        assert len(new) == each and set(new) == old


class Prompts:
    seed, identity, digest = 1, "", "d"

    def __len__(self):
        return 100


def test_cursor_when_dealt_to_other_replicas_then_all_open_groups_once():
    replicas = (
        Drawn(12, waiting=(6, 4), running=(8, 10)),
        Drawn(12, waiting=(9, 3, 11), again=(5,)),
    )
    cursor = Cursor.merged(replicas)
    assert cursor == Cursor(12, (3, 4, 5, 6, 8, 9, 10, 11))
    saved = SavedCursor(1, 100, cursor.next, cursor.again, digest="d", replicas=replicas)
    assert saved.dealt_of(Prompts(), 0, 1) == Drawn(12, waiting=(6, 9, 4, 3, 11), again=(5, 8, 10))
    four = [saved.dealt_of(Prompts(), rank, 4) for rank in range(4)]
    assert [one.waiting for one in four] == [(6, 11), (9,), (4,), (3,)]
    assert [one.again for one in four] == [(5,), (8,), (10,), ()]
    assert replace(saved, digest="other").dealt_of(Prompts(), 0, 1) is None


def test_saved_group_when_named_then_by_its_number():
    assert SavedGroup(812, 1, "").file_name == "group_000812.parquet"
