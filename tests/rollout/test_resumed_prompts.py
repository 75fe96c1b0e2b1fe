"""Runs that go on from a checkpoint's cursor draw the same prompts, in the same order, whatever
data they are of.
"""

import json
import random
from dataclasses import asdict, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl_corr.data.prompt_files import open_prompts
from megatron_rl_corr.data.prompt_format import PromptFormat, PromptLimits
from megatron_rl_corr.rollout.cursor import Cursor, Drawn, GroupNumbers, SavedCursor
from megatron_rl_corr.rollout.failures import FailedPrompts, Failures
from megatron_rl_corr.rollout.group_sampler import GroupSampler

WEIGHTS = [1.0, 2.0, 0.5]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """JSON lines with bad rows and too long ones, Parquet, and JSON lines of one row."""
    folder = tmp_path_factory.mktemp("sources")
    lines = [
        "{" if i % 7 == 3 else json.dumps({"input_ids": [i] * (9 if i % 5 == 2 else 1)}) for i in range(50)
    ]
    (folder / "a").write_text("\n".join(lines))
    pq.write_table(pa.table({"input_ids": [[i] for i in range(50, 70)]}), folder / "b", row_group_size=6)
    (folder / "c").write_text('{"input_ids": [70]}')
    return [str(folder / name) for name in "abc"]


def opened(paths, weights=WEIGHTS, seed=3):
    form = PromptFormat(limits=PromptLimits(100, 8, "`max_prompt_tokens` 8"))
    return open_prompts(paths, form, seed=seed, weights=weights, warn=lambda line: None)


class Replica:
    """Draws as a leader does."""

    def __init__(self, paths, cursor, saved, rank, size, weights):
        self.prompts = opened(paths, weights)
        failed = FailedPrompts(len(self.prompts)) if saved is None else saved.failed_of(self.prompts)
        self.sampler = GroupSampler(
            None,
            self.prompts,
            GroupNumbers(cursor, rank, size),
            None,
            group_size=2,
            rewards=type("Rewards", (), {})(),
            failures=Failures(0.1),
            failed_prompts=failed,
            on_failed=None,
            episodes=None,
        )


@pytest.mark.parametrize("weights", [WEIGHTS, []], ids=["weights", "epochs"])
@pytest.mark.parametrize("seed", range(2))
def test_runs_when_they_go_on_with_other_replicas_then_together_they_train_what_one_run_does(
    paths, weights, seed
):
    choose = random.Random(seed)
    whole = opened(paths, weights)
    wanted = [number for number in range(1600) if whole.can_be_drawn(number)]
    assert len(wanted) < 1500  # some are skipped
    saved, trained = None, {}
    while len(trained) < 1000:
        size = choose.choice([1, 2, 3, 4])
        cursor = Cursor(0) if saved is None else saved.cursor_of(whole)
        replicas = [Replica(paths, cursor, saved, rank, size, weights) for rank in range(size)]
        open_numbers = []
        for replica in replicas:
            drawn = [replica.sampler.draw() for _ in range(choose.randint(20, 60))]
            running = choose.sample(drawn, choose.randint(0, 9))
            open_numbers.append(running)
            for number in set(drawn) - set(running):
                assert number not in trained
                trained[number] = replica.prompts.at(number).index
        places = [
            replica.sampler.drawn(running) for replica, running in zip(replicas, open_numbers, strict=True)
        ]
        kept = SavedCursor.of(places, whole, FailedPrompts(len(whole)), 1)
        saved = SavedCursor.parse(json.dumps(asdict(kept)))
        assert saved == kept and saved.difference(opened(paths, weights)) is None
        assert [saved.own_of(whole, rank, size) for rank in range(size)] == places
        assert saved.own_of(whole, 0, size + 1) is None
    assert saved.next < 1600
    undone = {number for number in wanted if number < saved.next} - set(trained)
    assert undone == {number for number in saved.again if whole.can_be_drawn(number)}
    assert trained == {number: whole.index_at(number) for number in trained}


def test_cursor_when_the_data_are_others_then_what_differs_is_named_and_open_numbers_are_not_drawn_again(
    paths,
):
    kept = SavedCursor.of([Drawn(90, (4, 8))], opened(paths), FailedPrompts(71), 5)
    same = "71", "50 + 20 + 1, shares 286:571:143"
    for others, difference in (
        (opened(paths, seed=4), "seed 3 there, 4 here"),
        (opened(paths[:2], [1, 2]), "rows 71 there, 70 here"),
        (opened(paths, [1, 2, 1]), f"sources {same[1]} there, 50 + 20 + 1, shares 250:500:250 here"),
        (opened(paths, []), f"sources {same[1]} there, 50 + 20 + 1 here"),
        (
            opened([paths[1], paths[0], paths[2]]),
            f"sources {same[1]} there, 20 + 50 + 1, shares 286:571:143 here",
        ),
    ):
        assert kept.difference(others) == difference and kept.cursor_of(others) == Cursor(90)
        assert kept.own_of(others, 0, 1) is None
    assert kept.cursor_of(opened(paths)) == Cursor(90, (4, 8))


def test_cursor_when_a_row_was_edited_then_the_contents_are_named_and_a_file_of_before_is_not_compared(
    tmp_path,
):
    path = tmp_path / "p"
    path.write_text('{"input_ids": [1]}\n{"input_ids": [2]}\n')
    kept = SavedCursor.of([Drawn(90, (4, 8))], opened([str(path)], []), FailedPrompts(2), 5)
    assert kept.difference(opened([str(path)], [])) is None
    path.write_text('{"input_ids": [1]}\n{"input_ids": [3]}\n')  # as many rows, as many bytes
    edited = opened([str(path)], [])
    assert kept.difference(edited) == f"contents {kept.digest} there, {edited.digest} here"
    assert (
        kept.digest.startswith("38:")
        and edited.digest.startswith("38:")
        and kept.cursor_of(edited) == Cursor(90)
    )
    assert replace(kept, digest="").difference(edited) is None


def test_draw_when_a_row_of_an_open_group_was_left_out_meanwhile_then_the_group_goes_on_and_later_ones_do_not(
    paths,
):
    prompts = opened(paths, [])
    usable = [number for number in range(71) if prompts.can_be_drawn(number)]
    waits, later = usable[0], usable[1]
    left_out = {prompts.index_at(number): 0 for number in (waits, later)}
    place = Drawn(base=waits + 1, waiting=(waits,))
    sampler = GroupSampler(
        None,
        prompts,
        GroupNumbers(Cursor(place.base, place.waiting), 0, 1, place),
        None,
        group_size=2,
        rewards=type("Rewards", (), {})(),
        failures=Failures(0.1),
        failed_prompts=FailedPrompts(len(prompts), left_out=left_out),
        on_failed=None,
        episodes=None,
    )
    assert [sampler.draw() for _ in range(3)] == [waits, usable[2], usable[3]]


def test_cursor_when_it_is_of_an_older_version_then_it_is_of_one_plain_source(paths):
    older = '{"seed": 3, "prompts": 50, "next": 9, "again": [2], "failed": {}, "left_out": {}}'
    saved, prompts = SavedCursor.parse(older), opened(paths[:1], [])
    assert saved.cursor_of(prompts) == Cursor(9, (2,)) and saved.own_of(prompts, 0, 1) is None
