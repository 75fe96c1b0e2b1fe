"""The transformer's log-probs and scores by other ways, and the table that compares policies."""

import dataclasses

import pytest
import torch

from lab import transformer
from lab.estimators import all_arms
from lab.exact import Moments
from lab.map import POLICY_KINDS, Cell, cases_of, means_of, rows_of
from lab.policies import World
from lab.run import make_policies
from lab.verdicts import table_of_policies

WORLD = World(vocabulary=4, length=3)
THETA = transformer.random_weights(WORLD, 1, spread=1.0, seed=2)


def test_logits_when_prefixes_are_numbered_then_the_tables_way():
    # a prefix of one token has the same logits in a world that ends behind it
    p = transformer.log_conditionals(WORLD, THETA)
    assert p.shape == (1, WORLD.prefixes, 4)
    assert WORLD.token_logprobs(p).sum(dim=2).exp().sum().item() == pytest.approx(1, abs=1e-12)
    short = World(4, 2)
    places = slice(4 * 5 + 4 * 2, 4 * 5 + 4 * 3)  # the third place's embedding, behind the five tokens'
    kept = torch.cat([THETA[:, : places.start], THETA[:, places.stop :]], dim=1)
    assert torch.allclose(transformer.log_conditionals(short, kept), p[:, : short.prefixes])


def test_scores_when_differenced_then_the_same():
    psi, step = transformer.scores(WORLD, THETA[0]), 1e-6

    def logprobs(theta):
        return WORLD.token_logprobs(transformer.log_conditionals(WORLD, theta))[0]

    for place in range(0, THETA.shape[1], 7):
        moved = torch.zeros_like(THETA)
        moved[0, place] = step
        slope = (logprobs(THETA + moved) - logprobs(THETA - moved)) / (2 * step)
        assert (slope - psi[..., place]).abs().max() < 1e-8


def test_case_when_listed_then_weighed_scores_are_the_gradient():
    case = next(cases_of(Cell("outcome", "rounding", 1.0, 3, policy_kind="transformer"), 1))
    p = case.samples.train_logprobs.sum(dim=1).exp()
    assert (p @ case.scores.sum(dim=1)).abs().max() < 1e-13
    assert ((p * case.samples.advantages) @ case.scores.sum(dim=1) - case.truth).abs().max() < 1e-13
    assert case.measure(all_arms()["sequence_unbounded"]).bias2 < 1e-12
    assert case.measure(all_arms()["none"]).bias2 > 1e-3


def test_first_token_when_the_policy_depends_on_it_then_the_last_one_sees_it():
    # a table's last token sees the one before alone
    p = transformer.log_conditionals(WORLD, THETA)[0]
    behind = p[WORLD.first_prefix(2) :].view(4, 4, 4)  # first token, second, third
    assert (behind[0] - behind[1]).abs().max() > 1e-3


def test_policies_when_compared_then_agreement_is_counted(tmp_path):
    make_policies(tmp_path, ["rounding"], [1], 1)
    text = (tmp_path / "policies.md").read_text(encoding="utf-8")
    # five sizes, three batches, six pairs
    assert "| table | rounding | 90 of 90 | 0 of 90 | 0 of 90 | 15 of 15 | 1.00 | 1.00 |" in text
    assert all(f"| {kind} | rounding |" in text for kind in POLICY_KINDS)


@pytest.mark.parametrize(("kinds", "lengths"), [(["rounding"], [6, 8]), (["top_p"], [1, 2])])
def test_policies_when_no_cell_is_left_then_that_is_said_and_no_empty_table(kinds, lengths, tmp_path, capsys):
    make_policies(tmp_path, kinds, lengths, workers=1)
    assert "policies: nothing of what was asked for" in capsys.readouterr().out and not list(
        tmp_path.iterdir()
    )


def test_policies_when_errors_are_made_up_then_the_table_tells_them():
    arms = {arm: Moments(0.0, 1.0, 1.0) for arm in all_arms()}
    better = arms | {"token_truncate": Moments(0.0, 0.5, 1.0)}
    worse = arms | {"token_truncate": Moments(0.0, 2.0, 1.0)}
    cell = Cell("outcome", "lag", 1, 2)
    means = {cell: better, dataclasses.replace(cell, policy_kind="transformer"): worse}
    # none to token_truncate is opposite in each of three batches, token to sequence and geometric too
    assert "| transformer | lag | 9 of 18 | 0 of 18 | 9 of 18 | 0 of 3 | 2.00 | 2.00 |" in table_of_policies(
        means
    )


def test_means_when_policies_differ_then_they_are_apart():
    cells = [Cell("outcome", "lag", 1, 1, policy_kind=kind) for kind in POLICY_KINDS]
    rows = [row for cell in cells for row in rows_of(cell, [all_arms()["none"]], 1)]
    assert list(means_of(rows)) == cells
