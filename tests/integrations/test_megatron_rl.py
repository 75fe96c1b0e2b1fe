"""Our correction inside Megatron's GRPO loss, called as train_rl.py calls it, against whole sequences.

The call and its six values are those of Megatron-LM core 0.15.3, 0.16.1, 0.17.1, 0.18.2, 0.19.0 and
main (0.20, tests/matrix/test_train_rl.py); the loss mask's place is that of their train_rl.py (with
packing, from 0.16 on).
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_rl_corr import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.integrations import megatron_rl_hooks
from megatron_rl_corr.integrations.megatron_rl import GRPOCorrection
from tools.cpu import environment

HERE = Path(__file__).resolve().parent
NAN = float("nan")
CONFIG = RolloutCorrectionConfig(
    rollout_is="token", rollout_is_upper=1.5, rollout_rs=(RejectionRule("seq_mean", "ratio", 0.8, 1.25),)
)
STARTS, LENGTHS, BIN = [0, 7, 13], [7, 6, 9], 24
"""Tokens of a bin of packed sequences; two more are padding."""


def grpo(
    current_logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    clamp_eps_lower,
    clamp_eps_upper,
    kl_beta,
    entropy_weight,
    inference_logprobs=None,
    is_truncation_coef=None,
    seq_starts=None,
    seq_lengths=None,
):
    """Clipped surrogate, k3 penalty and entropy term, with the original's arguments and results."""
    ratio = (current_logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clamp_eps_lower, 1 + clamp_eps_upper)
    by_token = advantages[:, None]
    if seq_starts is not None:
        by_token = torch.zeros_like(current_logprobs)
        for start, length, advantage in zip(seq_starts, seq_lengths, advantages, strict=True):
            by_token[0, start : start + length - 1] = advantage
    kl = (ref_logprobs - current_logprobs).exp() - (ref_logprobs - current_logprobs) - 1
    entropy = -current_logprobs.exp() * current_logprobs
    assert inference_logprobs is None and is_truncation_coef is None, "the weight is ours"
    loss = -torch.min(ratio * by_token, clipped * by_token) + kl_beta * kl - entropy_weight * entropy
    return loss, kl, ratio, entropy, ratio > 1 + clamp_eps_upper, ratio < 1 - clamp_eps_lower


def values(rows, length, seed=0):
    """What a microbatch has, besides masks and advantages: [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=generator) * 2 - 0.1
    return {
        "old_logprobs": old,
        "current_logprobs": (old + 0.1 * torch.randn(rows, length, generator=generator)).requires_grad_(),
        "ref_logprobs": old + 0.1 * torch.randn(rows, length, generator=generator),
        "inference_logprobs": old - 0.2 * torch.rand(rows, length, generator=generator),
    }


def call(correction, given, mask, **more):
    """One forward step as train_rl.py's: it takes the microbatch, then asks for the loss."""
    loss = correction.calculate_grpo_loss(grpo)
    arguments = (
        given
        | {
            "clamp_eps_lower": 0.2,
            "clamp_eps_upper": 0.2,
            "kl_beta": 0.0,
            "entropy_weight": 0.0,
            "is_truncation_coef": None,
            "seq_starts": None,
            "seq_lengths": None,
        }
        | more
    )
    if arguments["seq_starts"] is None:
        # Masks of unpacked rows have one entry more: the first token has no log-prob.
        whole = torch.cat([torch.zeros(len(mask), 1), mask.float()], dim=1)
        batch = ("tokens", "advantages", "old", whole, "position_ids", "ref", "inference")
    else:
        batch = (torch.tensor([5]),)
    loaded = ("tokens", "advantages", "old", mask.float(), "and", "seven", "more")

    def forward_step(data_iterator, model):
        if len(next(data_iterator)) == 1:
            correction.load_packed_data_by_index(lambda *_: loaded)(5, "context", True)
        return loss(**arguments), model

    result, model = correction.forward_step(forward_step)(iter([batch]), "model")
    assert model == "model"
    return result


def naive(rho, rows):
    """Weights and kept tokens, by rows of indices [(row, column), ...] of the tokens with a
    rollout log-prob.
    """
    weight, keep = torch.ones_like(rho), torch.zeros_like(rho, dtype=torch.bool)
    for tokens in rows:
        if not tokens:
            continue
        mean = torch.stack([rho[t].log() for t in tokens]).mean().exp()
        for t in tokens:
            weight[t] = min(float(rho[t]), 1.5)
            keep[t] = bool(0.8 <= mean <= 1.25)
    return weight, keep


def test_rows_when_corrected_then_the_policy_term_has_the_naive_weights_and_rejections():
    given, advantages = values(4, 6), torch.tensor([1.0, -0.5, 2.0, 1.5])
    mask = torch.tensor(
        [[0, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    ).bool()
    given["inference_logprobs"][1] -= 0.5  # e^0.5 is above 1.25: the row goes
    given["inference_logprobs"][2, 5] = 0.0  # the appended end of the response: weight 1, stays with its row
    given["inference_logprobs"][1, 5] = 0.0  # the same in a row that goes
    given["inference_logprobs"][3] = 0.0  # nothing came from the engine: nothing to reject it for
    given["inference_logprobs"][0, 2] = NAN  # not finite: dropped
    given["inference_logprobs"][2, 0] = NAN  # outside the mask: never matters
    rho = (given["old_logprobs"] - given["inference_logprobs"]).exp()
    rows = [[(0, 1), (0, 3)], [(1, 0), (1, 1), (1, 3), (1, 4)], [(2, 2), (2, 3), (2, 4)]]
    weight, keep = naive(rho, rows)
    keep[2, 5] = keep[3, 4] = keep[3, 5] = True
    assert keep.any(dim=1).tolist() == [True, False, True, True] and (weight[keep] > 1).any()

    correction = GRPOCorrection(CONFIG)
    loss, *logged = call(correction, given, mask, advantages=advantages)
    plain = {name: given[name] for name in ("current_logprobs", "old_logprobs", "ref_logprobs")} | {
        "advantages": advantages,
        "clamp_eps_lower": 0.2,
        "clamp_eps_upper": 0.2,
    }
    policy, *expected = grpo(**plain, kl_beta=0.0, entropy_weight=0.0)
    torch.testing.assert_close(loss, torch.where(keep, policy * weight, 0.0), rtol=1e-5, atol=1e-7)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(logged, expected, strict=True))
    [metrics] = correction.metrics
    assert metrics["nonfinite_tokens"].value() == 1 and metrics["valid_tokens"].value() == 9

    gradient = torch.autograd.grad(loss.sum(), given["current_logprobs"])[0]
    theirs = torch.autograd.grad(torch.where(keep, policy * weight, 0.0).sum(), given["current_logprobs"])[0]
    torch.testing.assert_close(gradient, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_that_the_engine_was_certain_of_then_they_count_as_any_other(packed):
    # log-prob 0 is probability 1: trained at 5 % where the second stands, and three of them keep
    # the mean in bounds.
    old = torch.tensor([[-1e-5, math.log(0.05), -1e-5, -1e-5, -0.7, -2.0]])
    rollout = torch.tensor([[0.0, 0.0, 0.0, 0.0, -1.4, 0.0]])  # the last is the end that Megatron appended
    given = values(1, 6) | {"old_logprobs": old, "inference_logprobs": rollout}
    more = {"seq_starts": [0], "seq_lengths": [7]} if packed else {}
    # e^(-2.296 / 5) = 0.63
    config = replace(CONFIG, rollout_rs=(RejectionRule("seq_mean", "ratio", 0.6, 1.25),))
    correction = GRPOCorrection(config)
    loss, *_ = call(correction, given, torch.ones(1, 6).bool(), advantages=torch.tensor([1.0]), **more)
    plain = {name: given[name] for name in ("current_logprobs", "old_logprobs", "ref_logprobs")}
    policy, *_ = grpo(
        **plain,
        advantages=torch.tensor([1.0]),
        clamp_eps_lower=0.2,
        clamp_eps_upper=0.2,
        kl_beta=0.0,
        entropy_weight=0.0,
    )
    torch.testing.assert_close(
        loss, policy * torch.tensor([[1.0, 0.05, 1.0, 1.0, 1.5, 1.0]]), rtol=1e-4, atol=1e-7
    )
    assert correction.metrics[0]["valid_tokens"].value() == 5


def test_other_terms_when_asked_for_then_they_are_not_weighted_and_only_kept_tokens_have_them():
    given, advantages = values(2, 5), torch.tensor([1.0, -1.0])
    mask = torch.ones(2, 5).bool()
    given["inference_logprobs"][1] -= 0.5
    bare, *_ = call(GRPOCorrection(CONFIG), given, mask, advantages=advantages)
    loss, kl, _, entropy, *_ = call(
        GRPOCorrection(CONFIG), given, mask, advantages=advantages, kl_beta=0.1, entropy_weight=0.02
    )
    terms = 0.1 * kl - 0.02 * entropy
    torch.testing.assert_close((loss - bare)[0], terms[0], rtol=1e-4, atol=1e-6)
    assert not (loss - bare)[1].any() and not bare[1].any()


def test_packed_bin_when_corrected_then_each_sequence_is_decided_by_itself():
    given, advantages = values(1, BIN - 1, seed=1), torch.tensor([1.0, 1.0, -1.0])
    mask = torch.zeros(1, BIN - 1).bool()
    for start, length in zip(STARTS, LENGTHS, strict=True):
        mask[0, start + 2 : start + length - 1] = True  # two tokens of prompt
    given["inference_logprobs"][0, 7:12] -= 0.5
    given["inference_logprobs"][~mask] = 0.0
    rho = (given["old_logprobs"] - given["inference_logprobs"]).exp()
    rows = [
        [(0, t) for t in range(start + 2, start + length - 1)]
        for start, length in zip(STARTS, LENGTHS, strict=True)
    ]
    weight, keep = naive(rho, rows)
    assert [bool(keep[row[0]]) for row in rows] == [True, False, True]
    packing = {"seq_starts": STARTS, "seq_lengths": LENGTHS, "advantages": advantages}
    loss, *_ = call(GRPOCorrection(CONFIG), given, mask, **packing)
    policy, *_ = grpo(
        given["current_logprobs"],
        given["old_logprobs"],
        given["ref_logprobs"],
        advantages,
        0.2,
        0.2,
        0.0,
        0.0,
        seq_starts=STARTS,
        seq_lengths=LENGTHS,
    )
    torch.testing.assert_close(loss, torch.where(keep, policy * weight, 0.0), rtol=1e-5, atol=1e-7)


def test_empty_bin_when_it_fills_up_a_rank_then_the_loss_is_zero():
    given = values(1, BIN - 1)
    given["inference_logprobs"][:] = 0.0
    empty = {"seq_starts": [], "seq_lengths": [], "advantages": torch.zeros(0)}
    loss, *_ = call(GRPOCorrection(CONFIG), given, torch.zeros(1, BIN - 1).bool(), **empty)
    assert not loss.any()


def test_diagnostics_only_when_set_then_the_policy_term_is_the_originals():
    given, advantages = values(2, 5), torch.tensor([1.0, -1.0])
    given["inference_logprobs"][0, 0] = NAN
    correction = GRPOCorrection(replace(CONFIG, diagnostics_only=True))
    loss, *_ = call(correction, given, torch.ones(2, 5).bool(), advantages=advantages)
    logprobs = (given[f"{name}_logprobs"] for name in ("current", "old", "ref"))
    policy, *_ = grpo(*logprobs, advantages, 0.2, 0.2, 0.0, 0.0)
    assert torch.equal(loss, policy) and len(correction.metrics) == 1


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"inference_logprobs": None}, "--rl-inference-logprobs-is-correction"),
        ({"is_truncation_coef": 2.0}, "--rollout-is-threshold"),
        ({"inference_logprobs": torch.zeros(2, 4)}, "of one shape"),
    ],
)
def test_call_when_it_can_not_be_corrected_then_refused(more, told):
    with pytest.raises(ValueError, match=told):
        call(GRPOCorrection(CONFIG), values(2, 5), torch.ones(2, 5).bool(), advantages=torch.ones(2), **more)


def test_loss_mask_when_none_came_with_the_microbatch_then_refused():
    correction = GRPOCorrection(CONFIG)
    call(correction, values(2, 5), torch.ones(2, 5).bool(), advantages=torch.ones(2))
    loss = correction.calculate_grpo_loss(grpo)
    with pytest.raises(ValueError, match="of one shape"):
        loss(
            **values(2, 5),
            advantages=torch.ones(2),
            kl_beta=0.0,
            entropy_weight=0.0,
            clamp_eps_lower=0.2,
            clamp_eps_upper=0.2,
        )


# The command line

RL = ["--perform-rl-step", "--rl-inference-logprobs-is-correction"]


def test_flags_when_megatron_samples_then_only_the_corrections_are_taken():
    ours = ["--rollout-is", "sequence", "--rollout-log-dir", "runs/x"]
    config, folder = megatron_rl_hooks.parse([*RL, *ours, "--lr", "1"])
    assert (config.rollout_is, config.rollout_is_upper, folder) == ("sequence", 2.0, "runs/x")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([*RL, "--rollout-url", "http://a:1"], "--rollout-url has no effect with --perform-rl-step"),
        ([*RL, "--rollout-max-lag=1"], "--rollout-max-lag has no effect"),
        (RL[:1], "needs --rl-inference-logprobs-is-correction"),
        (
            [*RL, "--rollout-is", "token", "--rollout-is-batch-normalize"],
            "rollout_is_batch_normalize True has no",
        ),
        ([*RL, "--rollout-loss", "reinforce"], "loss reinforce has no effect in Megatron's RL"),
    ],
)
def test_flags_when_without_effect_there_then_refused(flags, told):
    with pytest.raises(ValueError, match=told):
        megatron_rl_hooks.parse(flags)


# In Megatron's train step

RL_UTILS = """
import torch


def load_packed_data_by_index(bin_idx, packing_context, logprobs_is_correction):
    raise AssertionError("these rows are not packed")


def calculate_grpo_loss(
    current_logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    clamp_eps_lower,
    clamp_eps_upper,
    kl_beta,
    entropy_weight,
    inference_logprobs=None,
    is_truncation_coef=None,
    seq_starts=None,
    seq_lengths=None,
):
    assert inference_logprobs is None
    return -torch.ones_like(old_logprobs) * advantages[:, None], *[old_logprobs] * 5
"""


def test_train_step_when_hooked_then_losses_are_weighted_and_numbers_are_those_of_all_ranks_and_microbatches(
    tmp_path,
):
    (tmp_path / "megatron/rl").mkdir(parents=True)
    (tmp_path / "megatron/rl/rl_utils.py").write_text(RL_UTILS)
    base = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE.parents[1])]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "megatron_rl_worker.py", tmp_path],
        env=environment("megatron", base),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    for rank in (0, 1):
        for number, loss in enumerate(torch.load(tmp_path / f"losses_{rank}.pt")):
            weight = math.exp(0.1 * (1 + rank + number))
            torch.testing.assert_close(loss, -weight * mask.float(), rtol=1e-5, atol=0)
    # Five tokens in each of two microbatches of two ranks, with log-ratios 0.1, 0.2, 0.2, 0.3.
    steps = [json.loads(line) for line in (tmp_path / "log/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps[:2]:
        assert step["rollout_corr/valid_tokens"] == 20
        assert step["rollout_corr/kl"] == pytest.approx(-0.2, rel=1e-5)
        mean = sum(math.exp(d) for d in (0.1, 0.2, 0.2, 0.3)) / 4
        assert step["rollout_corr/weight_mean"] == pytest.approx(mean, rel=1e-5)
    # Two context-parallel ranks have the same tokens; of the first rank above, with log-ratios 0.1 and 0.2.
    assert steps[2]["rollout_corr/valid_tokens"] == 10 and steps[2]["rollout_corr/kl"] == pytest.approx(
        -0.15, rel=1e-5
    )
    for rank in (0, 1):
        told = (tmp_path / f"refused_{rank}.txt").read_text()
        assert told.startswith(
            "--context-parallel-size 2: the RL of megatron-core 0.19.2 has no context parallelism, "
        )
        assert told.endswith("that of 0.20 has (Megatron-LM's main since 2026-08-17); use 0.20, or 1 rank")
    assert done.stdout.count("KL(k3)   weight") == 1, "one header: of one rank"
