"""What the rest looks like: the arithmetic by hand, on passes that are made up; and the words for it."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from megatron_rl_corr.core.ledger_verdict import cause_lines, verdict_line
from megatron_rl_corr.features.ledger.causes import Cause, CauseSearch, Divided, Rest
from megatron_rl_corr.features.ledger.suspects import LOGIT_SCALE, SIZED, SWITCHED, Suspect

TOKENS = 1000


def suspect(name, sizes=SIZED):
    return Suspect(name, lambda chunks: nullcontext(), sizes)


A, B = suspect("norm_epsilon/1e-05"), suspect("rotary_base/1e+06")
C = suspect("router_type/bfloat16")


class MadeUp:
    """A trainer whose log-probs are -1, and move by an effect of its own under each suspect."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.base = torch.full((TOKENS,), -1.0, dtype=torch.float64)
        self.effect = {one: 0.1 * torch.randn(TOKENS, generator=generator).double() for one in (A, B, C)}
        self.entropy = 1 + torch.rand(TOKENS, generator=generator).double()
        self.passes = []

    def log_probs(self, suspects, rounds_otherwise=False):
        if not rounds_otherwise:
            self.passes.append([one.name for one in suspects])
        return self.base + sum(self.effect[one] for one in suspects)

    def rest(self, server, valid=None):
        valid = torch.ones(TOKENS, dtype=torch.bool) if valid is None else valid
        return Rest(torch.where(valid, self.base - server, 0.0), valid, self.base + self.entropy)

    def causes(self, server, suspects=(A, B, C, LOGIT_SCALE), noise=1e-5, valid=None):
        search = CauseSearch(suspects, self.log_probs, noise, 1)
        rest = self.rest(server, valid)
        return list(search.causes(rest)) if search.needs_causes(rest) else []


@pytest.fixture
def made_up(one_rank):
    return MadeUp()


def test_server_as_one_suspect_then_all_of_the_rest_is_as_it_and_nothing_else_is_tried(made_up):
    found = made_up.causes(made_up.base + made_up.effect[B])
    assert found == [Cause("rotary_base/1e+06", pytest.approx(1), pytest.approx(1))]
    assert made_up.passes == [["norm_epsilon/1e-05"], ["rotary_base/1e+06"], ["router_type/bfloat16"]]


def test_server_as_two_then_both_the_larger_first_and_the_second_is_tried_under_the_first(made_up):
    made_up.effect[A] *= 2
    found = made_up.causes(made_up.base + made_up.effect[A] + made_up.effect[B])
    assert [one.name for one in found] == ["norm_epsilon/1e-05", "rotary_base/1e+06"]
    assert sum(one.share for one in found) == pytest.approx(1)
    assert found[0].share == pytest.approx(0.8, abs=0.05)
    assert ["norm_epsilon/1e-05", "rotary_base/1e+06"] in made_up.passes


def test_server_as_three_then_all_of_them(made_up):
    server = made_up.log_probs([A, B, C])
    made_up.effect[A] = made_up.effect[A].clone()
    assert {one.name for one in made_up.causes(server)} == {A.name, B.name, C.name}


def test_two_that_together_look_most_like_a_third_then_the_two(made_up):
    made_up.effect[C] = 1.3 * (made_up.effect[A] + made_up.effect[B]) + 0.02 * made_up.effect[C]
    server = made_up.base + made_up.effect[A] + made_up.effect[B]
    found = made_up.causes(server)
    assert {one.name for one in found} == {A.name, B.name}
    assert sum(one.share for one in found) == pytest.approx(1)


def test_two_changes_of_one_part_then_the_second_is_not_tried_under_the_first(made_up):
    other = suspect("rotary_base/10000")
    made_up.effect[other] = made_up.effect[C]
    server = made_up.base + made_up.effect[B] + 0.5 * made_up.effect[C]
    assert [one.name for one in made_up.causes(server, [B, other])] == [B.name]
    assert all(len(names) == 1 for names in made_up.passes)


def test_server_with_half_of_a_change_then_it_is_named_with_its_size(made_up):
    [cause] = made_up.causes(made_up.base + 0.5 * made_up.effect[C])
    assert (cause.name, cause.times) == (C.name, pytest.approx(0.5))
    assert cause.share == pytest.approx(1)


def test_logits_times_a_factor_then_it_is_found_without_a_pass(made_up):
    server = made_up.base - 0.05 * (made_up.base + made_up.entropy)
    assert made_up.causes(server, [LOGIT_SCALE]) == [
        Cause("logit_scale", pytest.approx(1), pytest.approx(0.95))
    ]
    assert made_up.passes == []


def test_change_that_is_on_or_off_when_a_tenth_of_it_would_fit_then_it_is_no_cause(made_up):
    off, twice = suspect("expert_bias/none", SWITCHED), suspect("rotary_base/10000")
    made_up.effect[off] = made_up.effect[twice] = made_up.effect[A]
    server = made_up.base + 0.1 * made_up.effect[A]
    assert made_up.causes(server, [off]) == []
    assert made_up.causes(server - 0.01 * made_up.effect[A], [twice]) == []  # less than a tenth
    assert made_up.causes(server + 0.01 * made_up.effect[A], [twice]) != []


def test_cause_whose_effect_one_token_has_then_it_is_found_where_nothing_else_is_left(made_up):
    made_up.effect[A][7] = 50.0
    [cause] = made_up.causes(made_up.base + made_up.effect[A], [A])
    assert (cause.share, cause.times) == (pytest.approx(1), pytest.approx(1))


def test_two_that_have_one_token_alike_then_it_is_no_evidence(made_up):
    made_up.effect[A][7] = 50.0
    assert made_up.causes(made_up.base + made_up.effect[B] + 50 * (torch.arange(TOKENS) == 7), [A]) == []


@pytest.mark.parametrize("seed", range(20))
def test_healthy_run_in_16_bits_when_both_sides_round_by_themselves_then_none(one_rank, seed):
    """Each pass has its own rounding, of the size of the mismatch; a suspect that changes nothing has too."""
    made_up = MadeUp(seed)
    rounded = torch.Generator().manual_seed(2000 + seed)
    passes = {}

    def log_probs(suspects, rounds_otherwise):
        key = (*(one.name for one in suspects), rounds_otherwise)
        if key not in passes:
            passes[key] = made_up.base + 0.02 * torch.randn(TOKENS, generator=rounded).double()
        return passes[key]

    trained, server = log_probs([], False), log_probs([suspect("server")], False)
    rest = Rest(trained - server, torch.ones(TOKENS, dtype=torch.bool), made_up.base + made_up.entropy)
    search = CauseSearch((A, B, C, LOGIT_SCALE), log_probs, 0.015, 1)
    assert search.needs_causes(rest) and search.causes(rest) == ()


@pytest.mark.parametrize("seed", range(20))
def test_rest_like_no_suspect_then_none(one_rank, seed):
    made_up = MadeUp(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    assert made_up.causes(made_up.base + 0.1 * torch.randn(TOKENS, generator=generator)) == []


def test_opposite_of_a_change_then_it_is_not_that_change(made_up):
    assert made_up.causes(made_up.base - made_up.effect[A]) == []


def test_rest_within_the_noise_or_of_few_tokens_then_nothing_is_tried(made_up):
    server = made_up.base + made_up.effect[A]
    few = torch.arange(TOKENS) < 63
    assert made_up.causes(server, noise=1.0) == made_up.causes(server, valid=few) == []
    assert made_up.passes == []
    assert len(made_up.causes(server, valid=torch.arange(TOKENS) < 80)) == 1


def test_tokens_without_a_number_then_they_are_left_out(made_up):
    made_up.effect[A][::2] = float("nan")
    valid = torch.arange(TOKENS) % 2 == 1
    server = torch.where(valid, made_up.base + made_up.effect[A], 5.0)
    [cause] = made_up.causes(server, valid=valid)
    assert (cause.name, cause.share) == (A.name, pytest.approx(1))


def numbers(**causes):
    found = {"ledger/tokens": 1000, "ledger/mean_abs": 0.1, "ledger/noise": 1e-5}
    found |= {"ledger/rest/share": 1.0, "ledger/rest/mean_abs": 0.1}
    for name, (share, times) in causes.items():
        found |= {f"ledger/as/{name}/share": share, f"ledger/as/{name}/times": times}
    return found


def test_words_when_the_rest_looks_like_changes_then_each_with_its_share_and_size():
    found = numbers(
        **{"rotary_base/1e+06": (0.25, 1.01), "norm_epsilon/1e-05": (0.5, 3.0), "logit_scale": (0.1, 0.953)}
    )
    found |= {"ledger/as/router_type/bfloat16/share": 0.05, "ledger/as/router_type/bfloat16/times": 1.0}
    found |= {"ledger/as/expert_weights/not_normalised/share": 0.04, "ledger/decode/known": 1.0}
    found |= {"ledger/as/expert_weights/not_normalised/times": 0.95}
    assert cause_lines(found) == [
        "50 % of the rest is as if servers had an epsilon of 1e-05 in the norms, 3 times as much",
        "25 % of the rest is as if servers had a rotary base of 1e+06",
        "10 % of the rest is as if servers had logits times 0.953",
        "5 % of the rest is as if servers had routers in bfloat16",
        "4 % of the rest is as if servers had experts' weights not normalised over the chosen ones",
    ]
    assert all(line in verdict_line(found) for line in cause_lines(found))


def test_words_when_the_rest_is_not_blamed_then_nothing_of_what_it_looks_like():
    found = numbers(**{"rotary_base/1e+06": (1.0, 1.0)}) | {"ledger/noise": 1.0}
    assert "rotary" not in verdict_line(found)


def test_change_that_moves_no_log_prob_then_it_is_told_and_one_that_moves_a_single_bit_not(one_rank):
    base, moved = torch.full((4,), -1.0, dtype=torch.float64), {"0": 0.0, "1": 2.0**-52}

    def log_probs(suspects, rounds_otherwise=False):
        [names] = [one.changed.args[0] for one in suspects] or [()]
        return base + sum(moved[name] for name in names) + 1e-6 * rounds_otherwise

    search = CauseSearch((), log_probs, 1e-5, 1)
    rest = Rest(torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.bool), base)

    def of(part):
        return Divided((part,), lambda parts, chunks: nullcontext(), lambda parts: f"without/x/{parts[0]}")

    assert search.changes_nothing(of("0"), rest) and not search.changes_nothing(of("1"), rest)


def test_likeliest_then_the_suspect_along_which_most_lies_with_its_share_or_none(made_up):
    wrong, lacking = made_up.effect[A], made_up.effect[B]
    half = replace(A, name="places/mlp/layer_1", sizes=SWITCHED, least_fit=0.2)
    made_up.effect[half] = made_up.effect[A]
    search = CauseSearch((half, C), made_up.log_probs, 1e-5, 1)
    # what the trainer adds and what it lacks are unrelated and of one size: half of the square lies along d
    rest = made_up.rest(made_up.base + wrong - lacking)
    [found] = search.likeliest(rest)
    assert found.name == "places/mlp/layer_1"
    assert found.share == pytest.approx(0.5, abs=0.05) and found.times == pytest.approx(1, abs=0.1)
    assert search.likeliest(made_up.rest(made_up.base + lacking)) == ()
