"""Which numbers replicas draw, and that a run that goes on draws what is left, once each,
with any replicas.
"""

import random

import pytest

from megatron_rl_corr.rollout.cursor import Cursor, Drawn, GroupNumbers


def test_draw_when_a_run_begins_then_steps_take_slices_of_the_sequence():
    replicas = [GroupNumbers(Cursor(12), rank, 3) for rank in range(3)]
    steps = [sorted(replica.draw() for replica in replicas for _ in range(2)) for _ in range(2)]
    assert steps == [[12, 13, 14, 15, 16, 17], [18, 19, 20, 21, 22, 23]]


def test_cursor_when_a_replica_is_ahead_then_the_others_have_still_to_draw_theirs():
    # By hand: 0, 1, 2, ... over three replicas, two steps of a group each; replica 1 replaced 1 and is at 10.
    replicas = [GroupNumbers(Cursor(0), rank, 3) for rank in range(3)]
    drawn = [[replica.draw() for _ in range(n)] for replica, n in zip(replicas, (2, 3, 2), strict=True)]
    assert drawn == [[0, 3], [1, 4, 7], [2, 5]]
    cursor = Cursor.merged([replicas[0].drawn([]), replicas[1].drawn([4]), replicas[2].drawn([])])
    assert cursor == Cursor(9, (4, 6, 8))


def test_cursor_when_no_replica_is_ahead_then_it_is_one_number():
    replicas = [GroupNumbers(Cursor(0), rank, 4) for rank in range(4)]
    for replica in replicas:
        replica.draw(), replica.draw()
    assert Cursor.merged([replica.drawn([]) for replica in replicas]) == Cursor(8)


@pytest.mark.parametrize("seed", range(20))
def test_cursor_when_runs_of_other_sizes_go_on_then_every_number_is_trained_or_replaced_once(seed):
    """Runs end at random places; what they trained or gave up, and what the last one has open,
    is the sequence.
    """
    choose = random.Random(seed)
    cursor, done = Cursor(choose.randrange(5)), []
    first = cursor.next
    for _ in range(6):
        size = choose.randint(1, 5)
        replicas, untrained = [GroupNumbers(cursor, rank, size) for rank in range(size)], []
        for replica in replicas:
            drawn = [replica.draw() for _ in range(choose.randint(0, 8))]
            left = choose.sample(drawn, choose.randint(0, len(drawn)))
            untrained.append(left)
            done += [number for number in drawn if number not in left]
        cursor = Cursor.merged(
            [replica.drawn(left) for replica, left in zip(replicas, untrained, strict=True)]
        )
    assert len(done) == len(set(done))
    assert sorted([*done, *cursor.again]) == list(range(first, cursor.next))


def test_merged_when_replicas_have_open_numbers_then_all_are_asked_again():
    assert Cursor.merged([Drawn(4, (0, 2)), Drawn(4, (1,))]) == Cursor(4, (0, 1, 2))


def test_numbers_when_as_many_replicas_go_on_then_each_draws_its_own_open_ones_first():
    # Replica 1 has replaced groups and is ahead; by the cursor alone, replica 0 would draw 4 and
    # replica 2 the 6.
    places = [Drawn(6), Drawn(9, waiting=(7,), running=(4,), again=(1,)), Drawn(6, waiting=(5, 2))]
    cursor = Cursor.merged(places)
    assert cursor == Cursor(9, (1, 2, 4, 5, 6, 7, 8))
    drawn = [
        [numbers.draw() for _ in range(4)]
        for numbers in (GroupNumbers(cursor, rank, 3, own) for rank, own in enumerate(places))
    ]
    assert drawn == [[6, 9, 12, 15], [7, 4, 1, 10], [5, 2, 8, 11]]
    assert [GroupNumbers(cursor, rank, 3).draw() for rank in range(3)] == [1, 2, 4]
