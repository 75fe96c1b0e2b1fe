"""When failed samples are too many, and which prompts are left out."""

import json

import pytest

from megatron_rl_corr.engines.errors import TooManyFailures
from megatron_rl_corr.rollout import Prompt, SampleFailure
from megatron_rl_corr.rollout.failures import CAUSES, FailedFraction, FailedPrompts, Failures


def step(ended, **failed):
    return [ended, *(failed.get(cause, 0) for cause in CAUSES)]


def test_fraction_when_above_the_bound_then_told_by_cause_and_never_before_a_hundred_samples():
    fraction = FailedFraction(0.05)
    assert fraction.exceeded(step(60, reward_error=60)) is None  # 60 samples say little
    told = dict.fromkeys(CAUSES, 0) | {"reward_error": 60}
    assert fraction.exceeded(step(40)) == ("60 of the 100 samples of the last 2 batches", told)
    fraction = FailedFraction(0.05)
    assert fraction.exceeded(step(100, reward_error=3, refused=2)) is None  # just the bound
    assert fraction.exceeded(step(100, reward_timeout=6))[0] == "11 of the 200 samples of the last 2 batches"


def test_fraction_when_failures_are_20_steps_ago_then_forgotten():
    fraction = FailedFraction(0.05)
    assert fraction.exceeded(step(64, refused=3)) is None
    assert all(fraction.exceeded(step(64)) is None for _ in range(19))
    # 61 of 1280 with the first step, 58 of 1280 without.
    assert fraction.exceeded(step(64, refused=61)) is None


def test_check_when_most_of_the_last_hundred_samples_failed_then_the_run_ends_with_the_causes():
    warnings = []
    failures = Failures(0.05, warnings.append)
    for number in range(49):
        failures.failed(SampleFailure("reward_error", f"Traceback {number}"), "sample 0 of row 3")
    for _ in range(51):
        failures.scored()
    failures.check()  # 49 of 100: other replicas may have had none
    failures.failed(SampleFailure("refused", "HTTP 400"), "sample 1 of row 4")
    failures.failed(SampleFailure("refused", "HTTP 400"), "sample 2 of row 4")
    failures.check()  # the first ones are out of the last hundred
    for _ in range(52):
        failures.failed(SampleFailure("reward_error", "Traceback last"), "sample 0 of row 3")
    with pytest.raises(TooManyFailures) as error:
        failures.check()
    assert str(error.value) == (
        "54 of the last 100 samples of a replica failed for good, which is more than `max_failed_fraction` "
        "0.05 allows. By cause: refused 2, reward_error 101. The last of each cause:\n"
        "reward_error: sample 0 of row 3: Traceback last\nrefused: sample 2 of row 4: HTTP 400"
    )
    assert warnings == [
        "sample 0 of row 3 failed for good (reward_error; further ones are only counted): Traceback 0",
        "sample 1 of row 4 failed for good (refused; further ones are only counted): HTTP 400",
    ]


def test_check_when_every_sample_fails_in_groups_of_one_failure_each_then_their_share_is_told():
    failures = Failures(0.05)
    for number in range(99):
        failures.failed(SampleFailure("reward_error", "no"), "a sample")
        failures.dropped(Prompt(0, [1]), number, [])
        failures.check()
    failures.failed(SampleFailure("reward_error", "no"), "a sample")
    with pytest.raises(TooManyFailures, match="^100 of the last 100 samples"):
        failures.check()


def test_check_when_the_user_allows_all_then_never_raised():
    failures = Failures(1.0)
    for _ in range(300):
        failures.failed(SampleFailure("reward_error", "no"), "a sample")
    failures.check()


def test_since_last_when_groups_are_dropped_then_their_samples_lengths_are_counted():
    failures = Failures(0.05)
    failures.scored()
    failures.dropped(Prompt(9, [1]), 42, [10, 30])
    failures.dropped(Prompt(3, [1]), 43, [])
    since = failures.since_last()
    assert {name: n for name, n in since.items() if n} == {
        "ended": 1,
        "replaced": 2,
        "lost_samples": 2,
        "lost_tokens": 40,
    }
    assert set(failures.since_last().values()) == {0}
    assert failures.take_dropped() == [(9, 42), (3, 43)] and failures.take_dropped() == []


def test_prompt_when_its_groups_failed_three_times_then_left_out_for_an_epoch_and_counted_anew():
    prompts = FailedPrompts(10)
    # Row 4 fails in epochs 0, 1 and 2: numbers 3, 17, 25.
    assert [prompts.add(4, number) for number in (3, 17, 25)] == [False, False, True]
    assert [prompts.leaves_out(4, number) for number in (26, 29, 30, 39, 40)] == [
        True,
        True,
        True,
        True,
        False,
    ]
    assert not prompts.leaves_out(5, 30)
    assert prompts.add(4, 41) is False


def test_failures_when_a_run_goes_on_then_judged_and_untold_ones_are_the_checkpoints():
    failures = Failures(0.05, lambda line: None)
    for number in range(60):
        failures.failed(SampleFailure("refused", "no"), "a sample")
        failures.dropped(Prompt(number % 7, [1]), number, [10])
    failures.since_last(), failures.take_dropped()
    failures.failed(SampleFailure("retries", "no"), "a sample")
    failures.dropped(Prompt(3, [1]), 61, [5, 6])
    failures.cut([4])
    resumed = Failures(0.05, lambda line: None)
    resumed.restore(json.loads(json.dumps(failures.state())))
    for one in (resumed, failures):
        told = {name: n for name, n in one.since_last().items() if n}
        assert told == {
            "ended": 1,
            "replaced": 1,
            "lost_samples": 2,
            "lost_tokens": 11,
            "cut_ended": 1,
            "cut_ended_tokens": 4,
            "failed_retries": 1,
        }
        assert one.take_dropped() == [(3, 61)]
        for _ in range(39):
            one.scored()
        with pytest.raises(TooManyFailures, match="61 of the last 100 samples"):
            one.check()


def test_failures_when_a_checkpoint_has_none_then_counted_anew():
    failures = Failures(0.05)
    failures.restore({})
    assert set(failures.since_last().values()) == {0}


def test_fraction_when_a_run_goes_on_then_the_batches_before_the_checkpoint_are_judged_too():
    fraction = FailedFraction(0.05)
    assert fraction.exceeded(step(90, reward_error=4)) is None
    resumed = FailedFraction(0.05)
    resumed.restore(json.loads(json.dumps(fraction.state())))
    told = dict.fromkeys(CAUSES, 0) | {"reward_error": 4, "refused": 2}
    assert resumed.exceeded(step(10, refused=2)) == ("6 of the 100 samples of the last 2 batches", told)
    assert FailedFraction(0.05).exceeded(step(10, refused=2)) is None
