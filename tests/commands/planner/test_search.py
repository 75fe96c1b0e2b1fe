"""Which layout is suggested: one that fits, the cheapest of those, and the nearest where none does."""

import pytest

from megatron_rl_corr.commands.planner.search import Fixed, candidates, cost
from megatron_rl_corr.commands.planner.serving import GIB
from megatron_rl_corr.commands.planner.train_layout import TrainLayout, Workload
from tests.commands.planner.published import QWEN3_4B, QWEN3_30B_A3B

WORKLOAD = Workload()


def search(config, gpus, *, gib=74.0, workload=WORKLOAD, **fixed):
    return candidates(config, workload, Fixed(**fixed), gpus=gpus, gpus_per_node=8, usable=gib * GIB)


def test_search_for_a_small_model_then_no_more_parallelism_than_it_needs():
    best = search(QWEN3_4B, 8)[0]
    assert best.fits and best.layout == TrainLayout(gpus=8)


def test_search_for_30b_on_4_gpus_then_adam_is_on_the_host_as_nothing_else_fits():
    found = search(QWEN3_30B_A3B, 4)
    assert found[0].fits and found[0].layout.offload_optimizer
    assert all(one.layout.offload_optimizer for one in found if one.fits)
    # 18 bytes of 29 / 4 billion of an expert-parallel rank are 130 GB.
    assert not any(one.fits for one in search(QWEN3_30B_A3B, 4, offload_optimizer=False))


def test_search_for_30b_on_16_gpus_then_adam_fits():
    best = search(QWEN3_30B_A3B, 16)[0]
    assert best.fits and not best.layout.offload_optimizer and best.layout.expert > 1


def test_candidates_then_those_that_fit_by_cost_and_the_others_by_what_they_lack():
    found = search(QWEN3_30B_A3B, 8)
    fitting = [one for one in found if one.fits]
    assert found[: len(fitting)] == fitting and fitting
    assert [one.cost for one in fitting] == sorted(one.cost for one in fitting)
    lacking = [one.spare for one in found[len(fitting) :]]
    assert lacking == sorted(lacking, reverse=True) and lacking[0] < 0


def test_search_when_sizes_are_given_then_only_they():
    found = search(QWEN3_30B_A3B, 8, tensor=2, expert=8, recompute="full", offload_optimizer=True)
    sizes = {(one.layout.tensor, one.layout.expert, one.layout.recompute) for one in found}
    assert sizes == {(2, 8, "full")} and all(one.layout.offload_optimizer for one in found)


def test_search_when_nothing_is_possible_then_the_reason():
    with pytest.raises(
        ValueError, match="no layout is possible on 4 GPUs: .*-size 3 x pipeline 1 .* must divide 4"
    ):
        search(QWEN3_4B, 4, tensor=3)
    with pytest.raises(ValueError, match="the model has no experts; leave it out"):
        search(QWEN3_4B, 4, expert=2)


def test_layout_when_it_hardly_fits_then_a_roomier_one_is_preferred():
    roomy = search(QWEN3_4B, 4, gib=74.0)[0]
    need = roomy.memory.fullest.total / GIB
    tight = next(one for one in search(QWEN3_4B, 4, gib=need + 0.1) if one.layout == roomy.layout)
    assert tight.fits and tight.cost == pytest.approx(roomy.cost * 1.15, rel=0.01)


def test_cost_then_recompute_is_one_more_forward_pass():
    assert cost(TrainLayout(gpus=8)) == 1
    assert cost(TrainLayout(gpus=8, recompute="full")) == pytest.approx(4 / 3)
    assert cost(TrainLayout(gpus=8, tensor=4, offload_optimizer=True)) == pytest.approx(1.5 * 1.2)
