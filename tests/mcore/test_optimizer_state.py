"""What an optimizer has before its first update. Whole runs are in test_skipped_saves.py."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.mcore.optimizer_state import begin_optimizer_state


def megatrons(inner, init_state_fn=None, *, precise=False):
    config = SimpleNamespace(use_precision_aware_optimizer=precise)
    return SimpleNamespace(optimizer=inner, config=config, init_state_fn=init_state_fn)


def moments_of_zero(inner, config):
    """As Megatron's own for Adam."""
    for group in inner.param_groups:
        for weight in group["params"]:
            inner.state[weight] |= {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}


def weights_of(*values):
    return [torch.nn.Parameter(torch.tensor(one)) for one in values]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_state_when_begun_then_updates_are_those_of_an_optimizer_that_was_left_alone(kind):
    updated = []
    for begins in (True, False):
        weights = weights_of([1.0, -2.0], [0.5])
        inner = kind(weights, lr=0.1, weight_decay=0.1)
        if begins:
            begin_optimizer_state(megatrons(inner, moments_of_zero))
            assert [state["step"].item() for state in inner.state.values()] == [0, 0]
            assert all(not state["exp_avg_sq"].any() for state in inner.state.values())
        for gradient in (0.5, -0.25):
            for weight in weights:
                weight.grad = torch.full_like(weight, gradient)
            inner.step()
        updated.append(torch.cat([weight.detach() for weight in weights]).tolist())
    assert updated[0] == updated[1]


def test_state_when_there_is_one_or_no_way_to_begin_it_then_left_as_it_is():
    [weight] = weights_of([3.0])
    stepped, plain = torch.optim.Adam([weight]), torch.optim.SGD([weight], momentum=0.9)
    weight.grad = torch.ones(1)
    stepped.step()
    before = {name: value.clone() for name, value in stepped.state[weight].items()}
    chain = SimpleNamespace(
        chained_optimizers=[megatrons(stepped, moments_of_zero), megatrons(plain), megatrons(None)]
    )
    begin_optimizer_state(chain)
    assert stepped.state[weight] == before and before["step"] == 1 and not plain.state
    begin_optimizer_state(None)  # what Megatron saves may have none


def test_state_when_a_chain_holds_a_chain_then_of_each_of_their_optimizers():
    first, second = (torch.optim.Adam(weights_of([value])) for value in (1.0, 2.0))
    inner = SimpleNamespace(chained_optimizers=[megatrons(first, moments_of_zero)])
    begin_optimizer_state(SimpleNamespace(chained_optimizers=[inner, megatrons(second, moments_of_zero)]))
    assert all("exp_avg" in state for one in (first, second) for state in one.state.values())
    assert len(first.state) == len(second.state) == 1


@pytest.mark.parametrize("kept", [True, False])
def test_state_when_updates_are_of_precise_weights_then_begun_as_the_optimizer_itself_does(kept):
    begun = []
    low, high = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    inner = SimpleNamespace(
        state={},
        param_groups=[{"params": [low]}, {"params": [high]}],
        store_param_remainders=kept,
        initialize_state=lambda weight, remainders: begun.append((weight, remainders)),
    )
    begin_optimizer_state(megatrons(inner, lambda *_: pytest.fail("it lacks an argument"), precise=True))
    assert begun == [(low, kept), (high, False)]
