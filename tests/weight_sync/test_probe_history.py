"""What several answers of a server show: that it computes with old weights."""

import numpy as np
import pytest

from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.features.push_probe.answers import ProbeAnswer
from megatron_rl_corr.features.push_probe.history import Movement

TRAINED = np.array([-1.0, -2.0, -3.0])


def answers(**served):
    """Of two texts, with one token and two."""
    return {
        f"http://{url}": ProbeAnswer((np.array(logprobs[:1]), np.array(logprobs[1:])), (), "/score")
        for url, logprobs in served.items()
    }


def test_movement_when_a_server_never_computes_with_loaded_weights_then_found_at_once():
    movement, served = Movement(), [-1.01, -2.0, -3.02]  # in 16 bits

    def push(number, moved, loaded, **servers):
        found = answers(**{"stuck": served, **servers})
        hashes = {"http://stuck": loaded, "http://good": loaded}
        movement.check(found, [TRAINED[:1] + moved, TRAINED[1:] + moved], hashes, version=f"id-{number}")

    push(0, 0.0, 7, good=served)
    # the trainer's differ by rounding: the weights are those of before, as at a learning rate of 0
    push(1, 2e-3, 7)
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
        movement.check(answers(a=[-1.0, -2.0, -3.0]), [TRAINED + moved], {}, version="v")
