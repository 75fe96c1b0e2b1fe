"""Each warning in a run that is made for it, with its first step by hand; none in healthy runs."""

import math
import random

import pytest

from megatron_rl_corr.observability.early_warnings import ENDS, HOLDS, TRENDS, TrendWatch, find_warnings

K3, ESS, GRAD = "rollout_corr/k3_kl", "rollout_corr/ess_sequences", "grad_norm"
HEALTHY = {
    "reward/mean": 0.5,
    K3: 2e-3,
    ESS: 0.9,
    GRAD: 1.0,
    "loss/entropy": 2.0,
    "response_length/mean": 100.0,
    "rollout_corr/by_lag/0/k3_kl": 1e-3,
    "rollout_corr/by_lag/1/k3_kl": 2e-3,
    "rollout_corr/by_lag/2+/k3_kl": 4e-3,
}


def run(steps=80, **changes):
    """A run of these steps; changes: by name a constant, or a function of the step."""
    rows = []
    for step in range(1, steps + 1):
        values = HEALTHY | {
            name: change(step) if callable(change) else change for name, change in changes.items()
        }
        rows.append({"step": step} | {name: value for name, value in values.items() if value is not None})
    return rows


def then(before, after, at=41):
    """`before` until step at - 1, `after` from step `at` on."""
    return lambda step: after if step >= at else before


def found(rows):
    return {warning.trend.name: (warning.first_step, warning.last_step) for warning in find_warnings(rows)}


def ramp(low, high, first=41, last=80):
    return lambda step: low + (high - low) * min(max(step - first, 0), last - first) / (last - first)


# A median of ten is the new value once six of them are, five steps behind the first: of two of each
# it is the middle.
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # The middle of 2e-3 and 1e-2 is 6e-3, three times 2e-3: with five of ten, at step 45.
        ({K3: then(2e-3, 1e-2)}, {"mismatch_grows": 45}),
        ({K3: then(2e-3, 5.9e-3)}, {}),
        # A thousand times as much, and still nothing.
        ({K3: then(1e-7, 9e-4)}, {}),
        # With five of ten the middle of 0.9 and 0.3 is 0.6, with six 0.3, which is below half of 0.9.
        ({ESS: then(0.9, 0.3)}, {"ess_falls": 46}),
        ({ESS: then(0.9, 0.46)}, {}),
        ({ESS: then(0.29, 0.01)}, {}),
        # The mean of ten with k new ones is 0.5 - 0.04 k: below 0.25 from k = 7 on.
        ({"reward/mean": then(0.5, 0.1)}, {"reward_fell": 47, "reward_falls": None}),
        # -0.1 - 0.08 k: more than half of |-0.1| lower from k = 1 on; all of ten are lower at k = 10.
        ({"reward/mean": then(-0.1, -0.9)}, {"reward_fell": 41, "reward_falls": 50}),
        # -0.4 - 0.01 k: a tenth of |-0.4| lower in the end alone, and a fifth never.
        ({"reward/mean": then(-0.4, -0.46)}, {}),
        ({"reward/mean": then(0.5, 0.42)}, {}),
        # 0.5 - (step - 41) / 200 from 41 on: the mean of the last ten is 0.5 - (step - 45.5) / 200,
        # below 0.4 at 66.
        ({"reward/mean": lambda step: min(0.5, 0.5 - (step - 41) / 200)}, {"reward_falls": 66}),
        # Fresh tokens are as before; those of one push ago have six of ten at 46, and with five
        # the middle is 5e-3.
        ({"rollout_corr/by_lag/1/k3_kl": then(2e-3, 8e-3)}, {"mismatch_of_old_samples": 46}),
        ({f"rollout_corr/by_lag/{lag}/k3_kl": then(1e-3, 8e-3) for lag in "01"}, {}),
        ({"rollout_corr/by_lag/1/k3_kl": then(2e-3, 8e-3), "rollout_corr/by_lag/0/k3_kl": None}, {}),
        # The reward does not gain, and the entropy is a fifth at six of ten.
        ({"loss/entropy": then(2.0, 0.3)}, {"entropy_collapse": 46}),
        ({"loss/entropy": then(2.0, 0.3), "reward/mean": ramp(0.3, 0.9)}, {}),
        ({"loss/entropy": then(2.0, 0.3), "reward/mean": None}, {}),
        # A flat reward is flat at any level; a tenth of -0.5 is 0.05.
        ({"loss/entropy": then(2.0, 0.3), "reward/mean": -0.5}, {"entropy_collapse": 46}),
        ({"loss/entropy": then(2.0, 0.3), "reward/mean": 0.0}, {"entropy_collapse": 46}),
        ({"loss/entropy": then(2.0, 0.3), "reward/mean": then(-0.5, -0.46)}, {"entropy_collapse": 46}),
        ({"loss/entropy": then(2.0, 0.3), "reward/mean": then(-0.5, -0.44)}, {}),
    ],
)
def test_warning_when_a_metric_moves_then_its_first_step_by_hand(changes, expected):
    steps = {name: first for name, (first, _) in found(run(**changes)).items()}
    known = {name: first for name, first in expected.items() if first is not None}
    assert steps.keys() == expected.keys() and {name: steps[name] for name in known} == known


def test_warning_when_two_metrics_rise_together_then_that_is_said_and_not_when_one_rises_alone():
    # k3 stays below three times 2e-3, and its median of ten is twice that about step 68.
    both = found(run(**{K3: ramp(2e-3, 5.5e-3), GRAD: ramp(1.0, 4.0)}))
    assert both.keys() == {"gradient_and_mismatch"} and 66 <= both["gradient_and_mismatch"][0] <= 72
    assert found(run(**{GRAD: ramp(1.0, 4.0)})) == {}
    longer = found(run(**{K3: ramp(2e-3, 5.5e-3), "response_length/mean": ramp(100, 200)}))
    assert longer.keys() == {"mismatch_with_length"}
    # Both stay high, and go up and down by themselves: the warning goes on.
    staying = run(
        140,
        **{
            K3: lambda step: ramp(2e-3, 5.5e-3)(step) + 2e-4 * (step % 2),
            GRAD: lambda step: ramp(1.0, 4.0)(step) + 0.1 * (step % 3),
        },
    )
    assert found(staying).keys() == {"gradient_and_mismatch"}
    assert found(staying)["gradient_and_mismatch"][1] is None
    # k3 rose long before the length does, and goes up and down since then: no common course.
    jumping = run(
        **{
            K3: lambda step: 2e-3 if step < 21 else 4.5e-3 + 5e-4 * (step % 2),
            "response_length/mean": ramp(100, 200, first=51),
        }
    )
    assert found(jumping) == {}


@pytest.mark.parametrize("steps", [100, 500, 2000])
@pytest.mark.parametrize(
    ("other", "name"), [("response_length/mean", "mismatch_with_length"), (GRAD, "gradient_and_mismatch")]
)
def test_warning_when_two_metrics_rise_slowly_and_scatter_then_that_is_said_in_runs_of_any_length(
    steps, other, name
):
    generator = random.Random(1)

    def rising(low, growth, spread):
        return lambda step: low * growth ** (step / steps) * math.exp(generator.gauss(0, spread))

    both = find_warnings(run(steps, **{K3: rising(2e-3, 5, 0.2), other: rising(HEALTHY[other], 3, 0.1)}))
    told = [warning for warning in both if warning.trend.name == name]
    assert told and told[0].first_step < 0.8 * steps and told[-1].last_step is None
    # One that rises beside another that scatters around a constant is no rise of both.
    alone = found(run(steps, **{K3: rising(2e-3, 5, 0.2), other: rising(HEALTHY[other], 1, 0.1)}))
    assert alone.keys() == {"mismatch_grows"}


def test_warning_when_the_condition_goes_then_it_ends_and_a_short_break_ends_nothing():
    # 1e-2 in the steps 41 to 60: five of ten from 45 to 65, as the sixth old one comes at 66.
    assert found(run(**{K3: lambda step: 1e-2 if 41 <= step <= 60 else 2e-3})) == {"mismatch_grows": (45, 65)}
    # Down in the steps 61 to 66: six of ten are old at 66, seven from 70 on are new again.
    broken = run(**{K3: lambda step: 2e-3 if step < 41 or 61 <= step <= 66 else 1e-2})
    assert found(broken) == {"mismatch_grows": (45, None)}
    # The run ends in the ninth step without it.
    assert found(run(74, **{K3: lambda step: 1e-2 if 41 <= step <= 60 else 2e-3})) == {
        "mismatch_grows": (45, None)
    }
    assert found(run(75, **{K3: lambda step: 1e-2 if 41 <= step <= 60 else 2e-3})) == {
        "mismatch_grows": (45, 65)
    }


def test_watch_when_steps_come_one_by_one_then_a_warning_is_told_once_when_found_and_once_when_it_ends():
    watch, told = TrendWatch(), []
    for row in run(**{K3: lambda step: 1e-2 if 41 <= step <= 60 else 2e-3}):
        told += [(row["step"], change.first_step, change.last_step) for change in watch.add(row)]
    assert told == [(45 + HOLDS - 1, 45, None), (65 + ENDS, 45, 65)] and watch.active == {}


def test_watch_when_a_run_goes_on_then_as_if_it_had_never_stopped():
    rows = run(**{K3: then(2e-3, 1e-2)})
    for cut in (10, 45, 46, 47, 60):
        watch = TrendWatch(rows[:cut])
        told = [change.first_step for row in rows[cut:] for change in watch.add(row)]
        assert told == ([45] if cut < 47 else []) and watch.active["mismatch_grows"].first_step == 45


def test_sentence_then_since_when_until_when_and_the_numbers():
    [warning] = find_warnings(run(**{K3: lambda step: 1e-2 if 41 <= step <= 60 else 2e-3}))
    assert (
        warning.sentence == "Since step 45 until step 65 the mismatch grows: KL(k3) 0.002 early, 0.01 then."
    )
    assert "--rollout-rs" in warning.trend.remedy


def noise(spread):
    return math.exp(random.gauss(0, spread))


NOISY = {
    "reward/mean": lambda step: min(1.0, 0.2 + step / 250) * noise(0.1),
    K3: lambda step: 3e-3 * noise(0.5),
    ESS: lambda step: min(1.0, 0.7 * noise(0.2)),
    GRAD: lambda step: noise(0.4),
    "loss/entropy": lambda step: 3 * math.exp(-step / 60) * noise(0.05),
    "response_length/mean": lambda step: (100 + step) * noise(0.1),
    "rollout_corr/by_lag/0/k3_kl": lambda step: 2e-3 * noise(0.5),
    "rollout_corr/by_lag/1/k3_kl": lambda step: 4e-3 * noise(0.5),
}


def test_healthy_runs_with_noise_and_a_rising_reward_then_no_warning():
    for seed in range(20):
        random.seed(seed)
        assert found(run(300, **NOISY)) == {}, seed


@pytest.mark.parametrize(
    "rows",
    [
        [],
        run(5),
        run(19, **{K3: lambda step: step / 100}),
        [{"step": step} for step in range(1, 90)],
        run(90, **dict.fromkeys(HEALTHY, math.nan)),
        run(90, **dict.fromkeys(HEALTHY, math.inf)),
        run(90, **dict.fromkeys(HEALTHY, 0.0)),
        run(90, **{K3: then(2e-3, math.nan)}),
    ],
)
def test_runs_that_are_short_empty_or_not_finite_then_no_warning(rows):
    assert found(rows) == {}


def test_trends_then_each_names_a_flag_and_states_its_condition():
    assert len({trend.name for trend in TRENDS}) == len(TRENDS)
    for trend in TRENDS:
        assert (
            "`--" in trend.remedy
            and trend.condition
            and trend.meaning.endswith(".")
            and trend.remedy.endswith(".")
        )


def test_conditions_when_a_share_of_the_stake_decides_then_they_say_so_and_by_what_it_falls():
    for trend in TRENDS:
        shares = "stake(reward)" in trend.condition
        assert shares == (trend.name in ("reward_fell", "reward_falls", "entropy_collapse"))
        assert not shares or "7 times what it scatters" in trend.condition


@pytest.mark.parametrize(
    ("low", "high", "after", "expected"),
    [
        # All that was gained is lost: a reward of 1 and -1, a large constant part, penalties alone.
        (-0.8, -0.05, -1.0, {"reward_fell", "reward_falls"}),
        (10.1, 10.9, 10.0, {"reward_fell", "reward_falls"}),
        (-50, -10, -45, {"reward_fell", "reward_falls"}),
        (-0.8, 0.8, -0.8, {"reward_fell", "reward_falls"}),
        # Three eighths of it, which is more than a fifth.
        (10.1, 10.9, 10.6, {"reward_falls"}),
        (-0.9, -0.1, -0.4, {"reward_falls"}),
        # An eighth, however much more that is than the best itself.
        (10.1, 10.9, 10.8, set()),
        (-0.9, -0.05, -0.15, set()),
        # Nothing was gained, so that a fall is a share of the best.
        (10.9, 10.9, 10.6, set()),
        (0.9, 0.9, 0.85, set()),
        (0.9, 0.9, 0.4, {"reward_fell", "reward_falls"}),
    ],
)
def test_warnings_when_rewards_are_below_0_or_around_a_constant_then_by_the_gain_that_is_lost(
    low, high, after, expected
):
    draw = random.Random(0)
    rising = ramp(low, high, first=11, last=60)
    rewards = [(rising(step) if step <= 90 else after) + draw.gauss(0, 0.01) for step in range(1, 161)]
    assert set(found([{"step": at, "reward/mean": one} for at, one in enumerate(rewards, 1)])) == expected


def test_warnings_when_updates_are_several_or_a_step_was_skipped_then_trends_are_seen():
    """k3 is in a batch's first row, the gradient norm in each; both grow by 3% a batch."""

    def rows(updates, gap=0):
        made = []
        for step in range(1, 80 * updates + 1):
            batch = (step - 1) // updates
            row = {"step": step, GRAD: 1.03**batch}
            if (step - 1) % updates == 0:
                row[K3] = 2e-3 * 1.03**batch
            if gap and batch % gap == gap - 1:
                del row[GRAD]
            made.append(row)
        return made

    for updates, gap in ((1, 0), (2, 0), (4, 0), (8, 0), (9, 0), (16, 0), (1, 15)):
        assert "gradient_and_mismatch" in found(rows(updates, gap)), (updates, gap)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("gain", [0.0, 0.001, 0.004])
def test_warnings_when_rewards_of_1_and_minus_1_scatter_around_0_then_none(seed, gain):
    """64 samples a step, of which half pass, and later more of them by `gain` a step."""
    draw = random.Random(seed)
    rewards = [
        sum(1 if draw.random() < 0.5 + gain * step / 2 else -1 for _ in range(64)) / 64 for step in range(120)
    ]
    assert found(run(120, **{"reward/mean": lambda step: rewards[step - 1]})) == {}


def solved(draw, share):
    """The mean reward of 64 samples, of which this share gets 1, and the others 0."""
    return sum(draw.random() < share for _ in range(64)) / 64


@pytest.mark.parametrize("share", [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.05, 0.2])
def test_warnings_when_a_task_is_hard_and_stays_as_hard_then_none(share):
    """Most batches of the hardest have reward 0, so that the typical difference of two steps is 0."""
    for seed in range(5):
        draw = random.Random(seed)
        rewards = [solved(draw, share) for _ in range(500)]
        assert found([{"step": at, "reward/mean": one} for at, one in enumerate(rewards, 1)]) == {}, seed


def test_warnings_when_a_hard_task_is_solved_ever_more_often_then_none():
    for seed in range(5):
        draw = random.Random(seed)
        rewards = [solved(draw, 0.002 + 0.018 * step / 500) for step in range(500)]
        assert found([{"step": at, "reward/mean": one} for at, one in enumerate(rewards, 1)]) == {}, seed


@pytest.mark.parametrize("spread", [1.5, 2.5])
def test_warnings_when_rewards_have_a_heavy_tail_then_none(spread):
    """One sample in a thousand is worth more than all others of its batch."""
    for seed in range(5):
        draw = random.Random(seed)
        rewards = [sum(draw.lognormvariate(0, spread) for _ in range(64)) / 64 for _ in range(400)]
        assert found([{"step": at, "reward/mean": one} for at, one in enumerate(rewards, 1)]) == {}, seed


@pytest.mark.parametrize(("before", "after"), [(0.5, 0.2), (0.2, 0.05), (0.1, 0.0)])
def test_warnings_when_rewards_of_few_samples_fall_for_good_then_both_of_the_reward(before, after):
    for seed in range(5):
        draw = random.Random(seed)
        rewards = [solved(draw, before if step < 100 else after) for step in range(150)]
        steps = found([{"step": at, "reward/mean": one} for at, one in enumerate(rewards, 1)])
        assert steps.keys() == {"reward_fell", "reward_falls"} and min(steps.values())[0] > 100, seed
