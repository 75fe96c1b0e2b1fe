"""Which of a checkpoint's waiting groups a run can train, and what it says of the others. Runs of real ranks
are in tests/faults/test_waiting.py.
"""

import json
import math
from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from megatron_rl_corr.config.flags import parse
from megatron_rl_corr.data.rewards import Score
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.mcore import checkpoint_groups
from megatron_rl_corr.mcore.checkpoint_groups import SavedGroups, WaitingWriter, settings_of
from megatron_rl_corr.mcore.first_step import FirstStep
from megatron_rl_corr.rollout import SamplingParams, Trajectory, VersionSpan
from megatron_rl_corr.rollout.begun_groups import BegunGroup, FinishedSample
from megatron_rl_corr.rollout.cursor import Drawn, SavedCursor
from megatron_rl_corr.rollout.groups import Group
from megatron_rl_corr.rollout.waiting_groups import FOLDER, OpenGroups

FLAGS = ["--rollout-url", "http://127.0.0.1:1", "--rollout-prompts", "p", "--rollout-group-size", "2"]
FLAGS += ["--rollout-max-new-tokens", "4", "--rollout-correction-preset", "decoupled_token_is"]


def group_of(number, version=2, tokens=3):
    sample = Trajectory(
        0,
        0,
        torch.tensor([1, 2]),
        torch.arange(tokens),
        torch.full((tokens,), -0.5),
        "stop",
        (VersionSpan(f"5f2c91ab-{version}", 0, tokens),),
        0,
        "http://a",
    )
    return Group(number, [sample, replace(sample, sample_index=1)], [1.0, 0.5], [{}, {}])


@pytest.fixture
def told(monkeypatch):
    """The events: (kind, reason, groups)."""
    found = []
    monkeypatch.setattr(EVENTS, "tell", lambda kind, why, **facts: found.append((kind, why, facts["groups"])))
    return found


@pytest.fixture
def options(tmp_path):
    reward, model = tmp_path / "reward.py", tmp_path / "model"
    reward.write_text("def reward(sample):\n    return 1.0\n")
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    given = ["--rollout-hf-checkpoint", str(model), "--rollout-reward-function", f"{reward}:reward"]
    return lambda *more: parse([*FLAGS, *given, *more])[1]


def write(folder, groups, options, replica=0, begun=(), per_step=4, lacks=()):
    """As the writer of a replica does in its thread, of a version that lacks these options."""
    layout = Namespace(dp_rank=replica, is_data_leader=True)
    settings = {name: value for name, value in settings_of(options).items() if name not in lacks}
    writer = WaitingWriter(layout, options, settings, SamplingParams(4), lambda number: number)
    writer._write(folder / FOLDER, OpenGroups(groups, begun, per_step))
    writer.close()


def read(
    folder, waiting, options, *, monkeypatch, version=3, longest=100, max_lag=None, replicas=None, per_step=4
):
    """The groups that the leader of the first of these replicas reads."""
    monkeypatch.setattr(checkpoint_groups, "folders_to_load", lambda args: [folder])
    replicas = replicas or (Drawn(20, waiting=waiting),)
    saved = SavedCursor(1, 9, 20, (), replicas=replicas)
    found = checkpoint_groups._read(None, saved, settings_of(options))
    lag = options.max_lag if max_lag is None else max_lag
    return found and found.read(waiting, version=version, max_lag=lag, longest=longest, per_step=per_step)


def test_groups_when_nothing_changed_then_all_in_their_order(tmp_path, options, told, monkeypatch):
    run = options("--rollout-max-lag", "2")
    write(tmp_path, [group_of(6, version=0), group_of(4)], run)
    found = read(tmp_path, (6, 4), run, monkeypatch=monkeypatch)
    assert [group.number for group in found] == [6, 4]  # the first is older than the lag, as it was
    assert [(kind, groups) for kind, _, groups in told] == [
        ("groups_saved", [6, 4]),
        ("groups_restored", [6, 4]),
    ]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--rollout-temperature", "0.5"], "--rollout-temperature 1.0 there, 0.5 here"),
        (["--rollout-group-size", "4"], "--rollout-group-size 2 there, 4 here"),
        (["--rollout-reward-weights", "2"], "--rollout-reward-weights [] there, [2.0] here"),
        (["--rollout-group-filter", "spread"], "--rollout-group-filter None there, 'spread' here"),
        (["--rollout-system-prompt", "hi"], "--rollout-system-prompt None there, 'hi' here"),
        (["--router-replay", "R3"], "--router-replay 'off' there, 'R3' here"),
    ],
)
def test_groups_when_a_setting_changed_then_it_is_named(tmp_path, options, told, monkeypatch, flags, name):
    write(tmp_path, [group_of(6)], options())
    assert read(tmp_path, (6,), options(*flags), monkeypatch=monkeypatch) == []
    kind, why, groups = told[-1]
    assert (kind, groups) == ("groups_sampled_again", [6]) and name in why


def test_groups_when_a_failed_reward_was_a_0_and_drops_now_then_it_is_named(
    tmp_path, options, told, monkeypatch
):
    write(tmp_path, [group_of(6)], options("--rollout-on-failed-reward", "0"))
    run = options("--rollout-on-failed-reward", "drop")
    assert read(tmp_path, (6,), run, monkeypatch=monkeypatch) == []
    assert "--rollout-on-failed-reward 0.0 there, None here" in told[-1][1]


@pytest.mark.parametrize(("flags", "numbers"), [([], [6]), (["--rollout-indexer-replay"], [])])
def test_groups_when_an_option_came_later_then_they_are_read_unless_it_is_on(
    tmp_path, options, told, monkeypatch, flags, numbers
):
    write(tmp_path, [group_of(6)], options(), lacks=["indexer_replay"])
    found = read(tmp_path, (6,), options(*flags), monkeypatch=monkeypatch)
    assert [group.number for group in found] == numbers


@pytest.mark.parametrize("flag", ["--rollout-agent-reasoning separate", "--rollout-agent-tool-parser qwen"])
def test_groups_when_an_agent_is_answered_otherwise_then_it_is_named(
    tmp_path, options, told, monkeypatch, flag
):
    agent = ["--rollout-agent-command", "python agent.py"]
    write(tmp_path, [group_of(6)], options(*agent))
    assert read(tmp_path, (6,), options(*agent, *flag.split()), monkeypatch=monkeypatch) == []
    assert flag.split()[0] in told[-1][1]


@pytest.mark.parametrize("file", ["reward.py", "model/tokenizer.json"])
def test_groups_when_a_file_changed_then_it_is_named(tmp_path, options, told, monkeypatch, file):
    write(tmp_path, [group_of(6)], options())
    (tmp_path / file).write_text("[]")
    assert read(tmp_path, (6,), options(), monkeypatch=monkeypatch) == []
    assert ("tokenizer" if "tokenizer" in file else file) in told[-1][1]


def test_groups_when_the_lag_is_smaller_then_older_ones_are_stale(tmp_path, options, told, monkeypatch):
    write(tmp_path, [group_of(6, 1), group_of(4, 2), group_of(5, 3)], options("--rollout-max-lag", "2"))
    found = read(tmp_path, (6, 4, 5), options("--rollout-max-lag", "1"), monkeypatch=monkeypatch)
    assert [group.number for group in found] == [4, 5]
    assert told[-1][0] == "groups_sampled_again" and told[-1][1].startswith("stale") and told[-1][2] == [6]


def test_groups_when_the_lag_is_smaller_then_stale_is_what_their_own_step_takes_too_late(
    tmp_path, options, told, monkeypatch
):
    old, groups = options("--rollout-max-lag", "2"), [group_of(6, 2), group_of(4, 2), group_of(5, 3)]
    write(tmp_path, groups, old, per_step=1)
    how = {"monkeypatch": monkeypatch, "per_step": 1}  # 6 is taken at version 3, 4 at 4, 5 at 5
    run = options("--rollout-max-lag", "1")
    assert [group.number for group in read(tmp_path, (6, 4, 5), run, **how)] == [6]
    stale = [(why, numbers) for kind, why, numbers in told if kind == "groups_sampled_again"]
    assert [numbers for _, numbers in stale] == [[4], [5]]
    assert "version 2" in stale[0][0] and "3 is the oldest" in stale[0][0] and "4 is the" in stale[1][0]
    # with as much lag as then they are as old as ever
    assert [group.number for group in read(tmp_path, (6, 4, 5), old, **how)] == [6, 4, 5]


def test_groups_when_steps_take_fewer_then_stale_is_what_its_later_step_takes_too_late(
    tmp_path, options, told, monkeypatch
):
    run, groups = options("--rollout-max-lag", "1"), [group_of(6, 1), group_of(4, 2), group_of(5, 2)]
    write(tmp_path, groups, run, per_step=2)  # 6 and 4 would have been trained at version 3, 5 at 4
    how = {"monkeypatch": monkeypatch, "per_step": 1}  # now 6 at version 3, 4 at 4, 5 at 5
    # 6 is older than the lag, as it was; 4 is trained a version later than then, and 5 too
    assert [group.number for group in read(tmp_path, (6, 4, 5), run, **how)] == [6]
    stale = [(why, numbers) for kind, why, numbers in told if kind == "groups_sampled_again"]
    assert [numbers for _, numbers in stale] == [[4], [5]]
    assert "version 2, and 3 is the oldest" in stale[0][0] and "a batch is smaller" in stale[0][0]
    assert "version 2, and 4 is the oldest" in stale[1][0]
    # a lag that allows it trains them all the same
    longer = options("--rollout-max-lag", "3")
    assert [group.number for group in read(tmp_path, (6, 4, 5), longer, **how)] == [6, 4, 5]
    # steps of as many, and of more, take none of them later
    for per_step in (2, 3):
        how["per_step"] = per_step
        assert [group.number for group in read(tmp_path, (6, 4, 5), run, **how)] == [6, 4, 5]


def test_groups_when_an_older_version_saved_their_list_then_as_old_as_they_were(
    tmp_path, options, told, monkeypatch
):
    run = options("--rollout-max-lag", "1")
    write(tmp_path, [group_of(6), group_of(4, 1)], run, per_step=None)
    found = read(tmp_path, (6, 4), run, monkeypatch=monkeypatch, per_step=1)
    assert [group.number for group in found] == [6, 4]


def test_groups_when_too_long_missing_or_of_another_save_then_named(tmp_path, options, told, monkeypatch):
    run = options()
    write(tmp_path, [group_of(6), group_of(4, tokens=9)], run)
    assert [g.number for g in read(tmp_path, (6, 4), run, longest=10, monkeypatch=monkeypatch)] == [6]
    assert "too long: it has 11 tokens, and --seq-length takes 10" in told[-1][1]
    assert read(tmp_path, (4, 6), run, monkeypatch=monkeypatch) == []
    assert "it is of another save" in told[-1][1] and told[-1][2] == [4, 6]
    replicas = (Drawn(20, waiting=(6, 4)), Drawn(20, waiting=(9,)))
    assert read(tmp_path, (6, 9), run, monkeypatch=monkeypatch, replicas=replicas)[0].number == 6
    assert "replica1.json is not used" in told[-1][1] and told[-1][2] == [9]
    assert read(tmp_path / "older", (6,), run, monkeypatch=monkeypatch) is None
    assert f"has no {FOLDER}" in told[-1][1] and told[-1][2] == [6]


def test_writer_when_the_bound_is_reached_or_the_folder_gone_then_told(tmp_path, options, told, monkeypatch):
    # 2 samples of 2 prompt ids and 3 tokens: 2 x (16 + 36) bytes
    bound = f"{150 / 2**30:.12f}"
    run = options("--rollout-save-waiting-gib", bound)
    write(tmp_path, [group_of(6), group_of(4)], run)
    saved, left = told
    assert saved[0::2] == ("groups_saved", [6]) and left[0::2] == ("groups_not_saved", [4])
    assert [group.number for group in read(tmp_path, (6, 4), run, monkeypatch=monkeypatch)] == [6]
    assert "above --rollout-save-waiting-gib" in told[-1][1] and told[-1][2] == [4]
    write(tmp_path / "gone", [group_of(6)], run)
    assert told[-1][0::2] == ("groups_not_saved", [6]) and "can't be written" in told[-1][1]


def begun_of(number, version=2, tokens=3):
    """A group of which sample 0 is done and scored."""
    sample = group_of(number, version, tokens).trajectories[0]
    return BegunGroup(number, {0: FinishedSample([sample])}, {0: Score(0.5)})


def read_begun(folder, numbers, options, *, monkeypatch, replicas, version=3, longest=100):
    """What the leader of the first of these replicas reads of groups that were being sampled."""
    monkeypatch.setattr(checkpoint_groups, "folders_to_load", lambda args: [folder])
    saved = SavedCursor(1, 9, 20, (), replicas=replicas)
    found = checkpoint_groups._read(None, saved, settings_of(options))
    how = {"version": version, "max_lag": options.max_lag, "longest": longest}
    return found and found.read_begun(numbers, **how)


def test_begun_groups_when_nothing_changed_then_their_samples_go_on(tmp_path, options, told, monkeypatch):
    run = options("--rollout-max-lag", "2")
    write(tmp_path, [], run, begun=[begun_of(8, version=0), begun_of(5)])
    where = {"monkeypatch": monkeypatch, "replicas": (Drawn(20, running=(8, 3), again=(5,)),)}
    found = read_begun(tmp_path, (8, 3, 5), run, **where)
    assert list(found) == [8, 5] and found[5].scores == {0: Score(0.5)}
    assert [(kind, groups) for kind, _, groups in told] == [
        ("groups_saved", []),
        ("samples_saved", [8, 5]),
        ("samples_restored", [8, 5]),
    ]
    # they were in another replica, and only those of this leader are read
    assert list(read_begun(tmp_path, (5, 9), run, **where)) == [5]


def test_begun_groups_when_they_cannot_be_used_then_named(tmp_path, options, told, monkeypatch):
    old = options("--rollout-max-lag", "2")
    write(tmp_path, [], old, begun=[begun_of(8, version=1), begun_of(5, tokens=9), begun_of(4)])
    where = {"monkeypatch": monkeypatch, "replicas": (Drawn(20, running=(8, 5, 4)),)}
    found = read_begun(tmp_path, (8, 5, 4), options("--rollout-max-lag", "1"), **where, longest=10)
    assert list(found) == [4]
    stale, long = [(why, groups) for kind, why, groups in told if kind == "groups_sampled_again"]
    assert "stale: it has samples of version 1" in stale[0] and stale[1] == [8]
    assert "too long: it has 11 tokens" in long[0] and long[1] == [5]
    hot = options("--rollout-max-lag", "2", "--rollout-temperature", "0.5")
    assert read_begun(tmp_path, (8, 5, 4), hot, **where) == {}
    assert "--rollout-temperature 1.0 there, 0.5 here" in told[-1][1] and told[-1][2] == [8, 5, 4]
    (tmp_path / FOLDER / "group_000004.parquet").unlink()
    assert list(read_begun(tmp_path, (8, 4), old, **where)) == [8]
    assert "group_000004.parquet" in told[-1][1] and told[-1][2] == [4]


def test_begun_groups_when_the_cursor_has_others_or_there_is_no_list_then_none(
    tmp_path, options, told, monkeypatch
):
    run = options("--rollout-max-lag", "2")
    write(tmp_path, [], run, begun=[begun_of(8)])
    replicas = (Drawn(20, running=(6,)),)
    assert read_begun(tmp_path, (6,), run, monkeypatch=monkeypatch, replicas=replicas) == {}
    assert "it is of another save" in told[-1][1] and told[-1][2] == [6]
    del told[:]
    replicas = (Drawn(20, running=(8,)), Drawn(20, running=(7,)))
    assert list(read_begun(tmp_path, (8, 7), run, monkeypatch=monkeypatch, replicas=replicas)) == [8]
    assert [kind for kind, *_ in told] == ["samples_restored"]  # of replica 1 nothing had been sampled
    assert read_begun(tmp_path / "older", (8,), run, monkeypatch=monkeypatch, replicas=replicas) is None
    assert len(told) == 1


def test_writer_when_the_bound_leaves_begun_groups_out_then_told(tmp_path, options, told, monkeypatch):
    run = options("--rollout-save-waiting-gib", f"{150 / 2**30:.12f}")  # group 6 has 104 bytes, group 8 52
    write(tmp_path, [group_of(6)], run, begun=[begun_of(8)])
    assert [(kind, groups) for kind, _, groups in told] == [("groups_saved", [6]), ("groups_not_saved", [8])]
    write(tmp_path / "gone", [], run, begun=[begun_of(8)])
    assert told[-1][0::2] == ("groups_not_saved", [8]) and "can't be written" in told[-1][1]


def test_settings_when_made_then_json_keeps_them(options):
    settings = settings_of(options())
    assert json.loads(json.dumps(settings)) == settings
    assert sum(name.startswith("the file ") for name in settings) == 1


def test_first_step_when_all_its_samples_are_a_checkpoints_then_left_to_the_next():
    judged, restored = FirstStep(4, 1e-2), FirstStep(4, 1e-2, restored=True)
    assert not judged.is_left_to_next(math.nan) and restored.is_left_to_next(math.nan)
    assert not restored.is_left_to_next(0.5) and restored.judge(0.5) is not None


def test_saved_groups_when_empty_then_none_is_read(tmp_path, told):
    found = SavedGroups(tmp_path).read((3,), version=1, max_lag=1, longest=9, per_step=1)
    assert found == [] and told[-1][0] == "groups_sampled_again"
