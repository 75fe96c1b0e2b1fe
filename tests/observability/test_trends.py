"""The statistics behind early warnings, by hand and against a naive sum over pairs."""

import math
import random
from itertools import combinations

import pytest

from megatron_rl_corr.observability.collapse import WINDOW
from megatron_rl_corr.observability.trends import COURSE, EARLY, KEPT, History, Parts, kendall_tau


def filled(values, name="x"):
    history = History([name], [(name, name)])
    for step, value in enumerate(values, start=1):
        history.add({"step": step, name: value})
    return history


@pytest.mark.parametrize(
    ("ys", "tau"),
    [
        ([1, 2, 3, 4], 1.0),
        ([4, 3, 2, 1], -1.0),
        # Of the 6 pairs (1, 2) alone is discordant: (5 - 1) / 6.
        ([2, 1, 3, 4], 4 / 6),
        # One pair is tied in y: 5 concordant of 6 and 5 untied ones.
        ([1, 1, 2, 3], 5 / math.sqrt(30)),
        # One wild value moves one place alone.
        ([1, 2, 3, 1e9], 1.0),
        ([7, 7, 7, 7], 0.0),
    ],
)
def test_kendall_tau_of_four_pairs_then_by_hand(ys, tau):
    assert kendall_tau([1, 2, 3, 4], ys) == pytest.approx(tau)
    assert kendall_tau(ys, [1, 2, 3, 4]) == pytest.approx(tau)


def test_kendall_tau_of_random_pairs_then_that_of_a_naive_sum():
    random.seed(1)
    xs, ys = ([random.randrange(9) for _ in range(25)] for _ in range(2))
    pairs = [(xs[a] - xs[b], ys[a] - ys[b]) for a, b in combinations(range(25), 2)]
    score = sum(1 if x * y > 0 else -1 if x * y < 0 else 0 for x, y in pairs)
    untied = sum(x != 0 for x, _ in pairs) * sum(y != 0 for _, y in pairs)
    assert kendall_tau(xs, ys) == pytest.approx(score / math.sqrt(untied))
    assert kendall_tau([], []) == kendall_tau([1], [2]) == 0


def test_history_when_short_then_none_and_after_enough_steps_medians_of_windows():
    assert filled(range(9)).now("x") is None and filled(range(19)).early("x") is None
    history = filled(range(20))
    # The first ten are 0 to 9, the last ten 10 to 19.
    assert (history.early("x"), history.now("x"), history.mean("x")) == (4.5, 14.5, 14.5)
    assert (history.best("x"), history.highest("x"), history.tau("x", "x")) == (14.5, 19, 1.0)
    assert filled(range(19)).tau("x", "x") is filled(range(9)).highest("x") is None


def test_history_when_values_fall_then_best_is_the_highest_mean_and_outliers_hardly_move_medians():
    history = filled([1.0] * 20 + [0.5] * 9 + [1e6])
    assert history.now("x") == 0.5 and history.early("x") == 1.0
    history = filled([1.0] * 20 + [0.5] * 30)
    assert history.best("x") == 1.0 and history.mean("x") == 0.5


def test_gain_then_from_the_lowest_mean_before_the_best_whatever_comes_after():
    assert filled(range(9)).gain("x") is None and filled([1.0] * 10).gain("x") == 0
    assert filled([-1.0] * 10 + [-3.0] * 10 + [2.0] * 10 + [-9.0] * 10).gain("x") == 5.0


def test_history_when_values_are_missing_or_not_finite_then_they_do_not_count():
    history = History(["x", "y"], [("x", "y")])
    assert (
        history.add({"step": 1}) == set() and history.add({"step": 2, "x": math.nan, "y": math.inf}) == set()
    )
    for step in range(3, 33):
        assert history.add({"step": step, "x": 1, "other": 2}) == {"x"}
    assert (
        history.now("x") == 1
        and history.now("y") is history.best("y") is None
        and history.tau("x", "y") is None
    )
    assert history.step == 32


def test_history_when_a_run_is_long_then_its_memory_is_bounded():
    history = filled(range(10_000))
    assert len(history._last["x"]) == KEPT and len(history._first["x"]) == EARLY and history.early("x") == 4.5
    assert len(history._both["x", "x"]) == COURSE
    # 10000 steps are 19 parts of 512 and a rest, so the parts are of 256.
    means = history._parts["x", "x"].means
    assert len(means) == 39 and means[0] == (127.5, 127.5) and means[38] == (38 * 256 + 127.5,) * 2


def test_parts_when_a_run_grows_then_twenty_to_thirty_nine_equal_ones_of_all_whole_steps():
    parts = Parts()
    for step in range(1, 200):
        parts.add(step, -step)
        size = 1
        while step // size >= 2 * COURSE:
            size *= 2
        expected = [size * at + (size + 1) / 2 for at in range(step // size)]
        assert [x for x, _ in parts.means] == expected and [y for _, y in parts.means] == [
            -x for x in expected
        ]


@pytest.mark.parametrize("apart", [1, 8, 16, 1000])
def test_tau_when_one_metric_comes_seldom_then_over_the_last_steps_with_both_in_bounded_memory(apart):
    history = History(["x", "y"], [("x", "y")])
    for step in range(COURSE * apart):
        assert history.tau("x", "y") is None or step > (COURSE - 1) * apart
        # x falls within its steps without y, and rises from one step with both to the next.
        history.add(
            {"step": step, "x": step // apart - step % apart, **({} if step % apart else {"y": step})}
        )
    assert history.tau("x", "y") == 1.0 and len(history._last["x"]) == min(KEPT, COURSE * apart)


def test_noise_by_hand_then_the_mean_square_difference_of_neighbours_before_the_last_ten():
    # Neighbours differ by sqrt(2): one number scatters by 1, the mean of ten by 1 / sqrt(10). The
    # fall is no noise.
    values = [math.sqrt(2) * (step % 2) for step in range(COURSE)]
    assert filled(values).noise("x") == pytest.approx(1 / math.sqrt(10))
    assert filled(values[1:]).noise("x") is None
    assert filled(values + [-50] * WINDOW).noise("x") == pytest.approx(1 / math.sqrt(10))
    # One of the first 20 values is -3, among zeros: two differences of 19. The best mean's 10
    # values are all 0.
    rare = [0.0] * 15 + [-3.0] + [0.0] * 4
    assert filled(rare + [0.0] * WINDOW).noise("x") == pytest.approx(math.sqrt(2 * 3**2 / 19 / 2 / 10))


def test_noise_when_the_best_is_long_ago_then_its_own_is_kept():
    # The first mean is the best, and one of its nine differences is 2.
    history = filled([2.0] + [0.0] * (3 * KEPT))
    assert history.best("x") == pytest.approx(0.2)
    assert history.noise("x") == pytest.approx(math.sqrt(2**2 / 9 / 2 / 10))


def test_noise_when_rewards_are_as_large_as_floats_allow_then_a_number():
    assert filled([0.0, 1e200] * COURSE).noise("x") == pytest.approx(1e200 / math.sqrt(20))
