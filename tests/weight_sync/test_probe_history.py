"""What several answers of a server show: one that computes with old weights, one that a push has made worse."""

import pytest

from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.weight_sync.probe_history import Growth, Movement
from tests.weight_sync.test_probe import TRAINED, answers


def test_movement_when_a_server_loads_weights_and_never_computes_with_them_then_found_as_soon_as_the_trainers_move():
    movement, served = Movement(), [-1.01, -2.0, -3.02]  # in 16 bits

    def push(number, moved, loaded, **servers):
        found = answers(**{"stuck": served, **servers})
        movement.check(found, TRAINED + moved, {"http://stuck": loaded, "http://good": loaded}, version=f"id-{number}")

    push(0, 0.0, 7, good=served)
    push(1, 2e-3, 7)  # the trainer's differ by rounding: the weights are those of before, as at a learning rate of 0
    push(2, 6e-4, 8, good=served)  # too little to tell
    push(3, 9e-4, 9, good=[-1.01, -2.0, -3.03])
    with pytest.raises(RolloutProtocolError) as error:  # little by little, since the first
        push(4, 1.2e-3, 10, good=[-1.02, -2.0, -3.03])
    assert error.value.url == "http://stuck"
    for words in ("loaded version 'id-4'", "in every bit those of version 'id-0'", "moved by up to 0.0012"):
        assert words in str(error.value), words


def test_movement_when_weights_are_not_hashed_then_nothing_is_known():
    movement = Movement()
    for moved in (0.0, 1.0):
        movement.check(answers(a=[-1.0, -2.0, -3.0]), TRAINED + moved, {}, version="v")


GROWN = "rollout/probe_k3_growth"


def off(distance, **more):
    """Server a's log-probs are all this far from the trainer's: k3 is about distance ** 2 / 2."""
    return answers(a=TRAINED - distance, **more)


def grown(growth, found, version="id-1"):
    return growth.check(found, TRAINED, {"http://a"}, version=version)


def test_growth_when_the_first_push_makes_a_servers_log_probs_worse_then_it_is_named():
    growth = Growth()
    assert growth.is_first_push
    growth.expect_first_push(off(0.005))  # k3 1.25e-5, as of the tiny model in bfloat16
    assert not growth.is_first_push
    with pytest.raises(RolloutProtocolError) as error:
        grown(growth, off(0.02))  # (e^0.02 - 1.02) / (e^0.005 - 1.005) = 2.0134e-4 / 1.2521e-5 = 16.08
    assert error.value.url == "http://a" and error.value.endpoint == "/score"
    for words in ("its weights differ from the trainer's: the run's first push, of version 'id-1'", "factor of 16.1",
                  "to 0.000201", "may do so by 10", "restart", "`max_probe_log_ratio`"):  # fmt: skip
        assert words in str(error.value), words


@pytest.mark.parametrize(
    ("before", "after", "growth"),
    [
        (0.005, 0.005, 1.0),  # the weights that it held
        (0.5, 0.02, 2.0134e-4 / 0.148721),  # the weights of another run, with k3 e^0.5 - 1.5
        (0.0, 0.004, 8.0107),  # e^0.004 - 1.004 = 8.0107e-6, over the least, 1e-6
    ],
)
def test_growth_when_the_first_push_makes_log_probs_no_worse_then_it_is_told(before, after, growth):
    made = Growth()
    made.expect_first_push(off(before))
    assert grown(made, off(after))[GROWN] == pytest.approx(growth, rel=1e-3)


def test_growth_when_a_later_push_makes_log_probs_worse_then_a_warning_and_slow_growth_is_right(caplog):
    growth = Growth()
    growth.expect_first_push({})
    assert grown(growth, off(0.005)) == {}  # nobody was asked before
    for distance in (0.01, 0.02, 0.04, 0.08):  # k3 grows to four times with each push
        assert grown(growth, off(distance))[GROWN] == pytest.approx(4, rel=0.05)
    assert not caplog.records
    assert grown(growth, off(0.3), "id-9")[GROWN] > 10
    assert "http://a: version 'id-9' has raised its k3 of 3 given ids by a factor of " in caplog.text
    assert grown(growth, off(0.3))[GROWN] == 1 and len(caplog.records) == 1


def test_growth_of_a_server_in_float32_or_quantised_then_not_told():
    growth = Growth()
    growth.expect_first_push(answers(b=TRAINED))
    assert growth.check(answers(b=TRAINED - 1), TRAINED, set(), version="v") == {}
