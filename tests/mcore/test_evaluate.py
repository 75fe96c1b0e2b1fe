"""What an evaluation counts, by hand; which samples each replica asks for; when its step's
numbers are written.
"""

import asyncio
import itertools
import math
import types
from concurrent.futures import Future

import pytest
import torch

from megatron_rl_corr.engines.errors import SampleFailure
from megatron_rl_corr.features.evaluation.evaluation import (
    Evaluation,
    HeldOut,
    HeldOutSample,
    metrics_of_set,
    totals_of_set,
)
from megatron_rl_corr.features.evaluation.feature import EvaluationFeature
from megatron_rl_corr.features.evaluation.options import EvaluationSet
from megatron_rl_corr.features.evaluation.pass_at_k import pass_at_k, powers_up_to
from megatron_rl_corr.mcore.feature import EndedStep
from megatron_rl_corr.mcore.step_reports import StepReports
from megatron_rl_corr.rollout import Prompt, PromptDataset, SamplingParams


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_when_all_choices_are_counted_then_the_same(samples):
    for passed, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        choices = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
        assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_when_worked_out_by_hand_then_the_same():
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of 6 pairs
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)  # 1 - 1/10: one choice of three has none of the two
    with pytest.raises(ValueError, match="pass@5 of 4"):
        pass_at_k(4, 1, 5)


def test_powers_when_the_number_is_none_then_it_is_there_too():
    assert [powers_up_to(n) for n in (1, 2, 3, 4, 6)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]


def scored(*rewards):
    """Samples with these rewards, of 3 tokens each; None: it failed. A reward of 0 was cut."""
    return [None if reward is None else HeldOutSample(reward, 3, reward == 0) for reward in rewards]


def test_metrics_of_a_set_when_worked_out_by_hand_then_the_same():
    # Prompts of 4 samples: 2 passed, none passed (one failed), all failed.
    prompts = [scored(1, 1, 0, 0.5), scored(0, 0, None, 0.5), scored(None, None, None, None)]
    halves = [totals_of_set(part, 4, 1.0) for part in (prompts[:1], prompts[1:])]
    whole = [a + b for a, b in zip(*halves, strict=True)]
    assert whole == totals_of_set(prompts, 4, 1.0)
    found = metrics_of_set(EvaluationSet("a", "p", 4), iter(whole))
    assert found == {
        "eval/a/reward": pytest.approx(3 / 7),
        "eval/a/response_length": 3.0,
        "eval/a/length_fraction": pytest.approx(3 / 7),
        "eval/a/mean@4": pytest.approx((2.5 / 4 + 0.5 / 3) / 2),
        "eval/a/pass@1": pytest.approx((0.5 + 0) / 2),
        "eval/a/pass@2": pytest.approx((5 / 6 + 0) / 2),  # 1 - 1/6: one pair of the two that did not pass
        "eval/a/pass@4": 1.0,  # the second prompt has three samples
        "eval/a/samples": 7.0,
        "eval/a/failed": 5.0,
    }


def test_metrics_of_a_set_when_one_sample_a_prompt_then_the_old_names_and_what_passes_is_the_users():
    found = metrics_of_set(
        EvaluationSet("", "p", 1), iter(totals_of_set([scored(0.5), scored(0.25)], 1, 0.5))
    )
    assert found["eval/reward"] == 0.375 and found["eval/pass@1"] == 0.5 and "eval/mean@1" not in found
    empty = metrics_of_set(EvaluationSet("", "p", 1), iter(totals_of_set([scored(None)], 1, 1.0)))
    assert math.isnan(empty["eval/reward"]) and empty["eval/failed"] == 1


class Loop:
    """Runs what is submitted at once."""

    def submit(self, coroutine):
        future = Future()
        future.set_result(asyncio.run(coroutine))
        return future


class Client:
    """Answers with the prompt; the second sample of prompt [2] fails."""

    def __init__(self):
        self.asked, self.under_way, self.most = [], 0, 0

    async def generate(self, prompts, sampling, *, group_numbers):
        self.asked.append((prompts[0][0], *group_numbers))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if self.asked.count((prompts[0][0], *group_numbers)) > 1:
            raise AssertionError("asked twice")
        if prompts == [[2]] and sum(prompt == 2 for prompt, _ in self.asked) == 2:
            raise SampleFailure("refused", "no")
        known = {"sampled": torch.ones(2), "finish_reason": "stop", "environment_reward": None}
        return [types.SimpleNamespace(**known, of=prompts[0][0])]


class Rewards:
    async def score(self, prompt, sample):
        assert prompt.input_ids == [sample.of]
        return float(sample.of)


def evaluation(client, rank, ranks, leader=True):
    layout = types.SimpleNamespace(dp_rank=rank, dp_size=ranks, is_data_leader=leader)
    source = types.SimpleNamespace(client=client, episodes=None, rewards=Rewards(), loop=Loop())
    sets = [("", 3, 1), ("b", 2, 2)]
    held_out = [
        HeldOut(EvaluationSet(name, "p", samples), PromptDataset([Prompt(i, [i + 1]) for i in range(count)]))
        for name, count, samples in sets
    ]
    return Evaluation(layout, source, held_out, SamplingParams(4), every=2, pass_reward=2.0, at_once=2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_when_dealt_over_replicas_then_every_sample_is_asked_for_once(ranks, capsys):
    client, totals = Client(), 0
    for rank in range(ranks):
        running = evaluation(client, rank, ranks).start(4)
        totals = running.future.result() + totals
        assert running.done + running.failed == running.total
    assert len(client.asked) == 3 + 2 * 2 and len(set(client.asked)) == 7
    # each its own draw, none of the training's
    assert {number for _, number in client.asked} == set(range(-7, 0))
    assert client.most <= 2
    # Set "": rewards 1, 2, 3, of which one may be the failed one; set "b": 1, 1, 2, 2.
    assert totals.sum() > 0 and capsys.readouterr().err.count("of --rollout-eval-prompts") == 1
    whole = iter(totals.tolist())
    first = metrics_of_set(EvaluationSet("", "p", 1), whole)
    second = metrics_of_set(EvaluationSet("b", "p", 2), whole)
    assert first["eval/samples"] + second["eval/b/samples"] == 6
    assert first["eval/failed"] + second["eval/b/failed"] == 1
    assert next(whole, None) is None and len(totals) == evaluation(client, 0, 1).size()


def test_evaluation_when_a_rank_asks_for_no_samples_then_it_waits_for_none():
    running = evaluation(Client(), 0, 1, leader=False).start(4)
    assert running.future is None and running.total == 0


class Started:
    """A running evaluation whose metrics are known."""

    def __init__(self, step, fails=False):
        self.step, self.fails, self.begun, self.closed = step, fails, 0.0, False
        self.evaluation = types.SimpleNamespace(sets=[HeldOut(EvaluationSet("", "p", 2), None)])

    def all_reduce_metrics(self, turns=None):
        if self.fails:
            raise RuntimeError("no server is left")
        return {"eval/reward": self.step / 10, "eval/pass@2": 0.5}

    def close(self):
        self.closed = True


def reports(reporter=True, fails=False):
    """(the feature, its reports, their rows, the end of a step; an evaluation is due after even ones)."""
    rows = []
    made, feature = StepReports(rows.append), EvaluationFeature(None)
    feature.open(types.SimpleNamespace(reports=made, collector=types.SimpleNamespace(turns=None)))
    feature.evaluation = types.SimpleNamespace(
        is_due=lambda step: step % 2 == 0, start=lambda step: Started(step, fails)
    )

    def end(step, *, ahead, pushes=True):
        made.begin_step()
        if reporter:
            made.numbers["step"] = step
        waited = pushes and feature.settle()
        feature.after_step(EndedStep(step, None, ahead))
        made.end_step()
        return waited

    return feature, made, rows, end


def close(feature, made):
    """As at the end, or where a rank fails."""
    feature.close()
    made.close()


def test_reports_when_samples_are_ahead_then_a_step_waits_for_its_evaluation_and_steps_stay_in_order(capsys):
    feature, made, rows, end = reports()
    assert [end(step, ahead=True) for step in (1, 2, 3)] == [False, False, True]
    assert rows == [{"step": 1}, {"step": 2, "eval/reward": 0.2, "eval/pass@2": 0.5}, {"step": 3}]
    end(4, ahead=False)  # the last one is not left running
    assert rows[3].pop("time/eval_s") > 0
    assert rows[3] == {"step": 4, "eval/reward": 0.4, "eval/pass@2": 0.5}
    assert (
        capsys.readouterr().out.splitlines()[0]
        == "[rollout] held-out reward after step 2: 0.2000, pass@2 0.5000"
    )
    close(feature, made)
    assert len(rows) == 4


@pytest.mark.parametrize("fails", [False, True])
def test_reports_when_the_next_batch_makes_several_updates_then_their_numbers_wait_too(fails):
    # Else a file's reader would take step 2 behind step 3 for a run that began again, and leave step 3 out.
    feature, made, rows, end = reports()
    end(2, ahead=True)
    end(3, ahead=True, pushes=False)  # an update that is not its batch's last
    assert rows == []
    if fails:
        close(feature, made)
        assert rows == [{"step": 2}, {"step": 3}]
        return
    assert end(4, ahead=False)
    assert [row["step"] for row in rows] == [2, 3, 4] and rows[0]["eval/reward"] == 0.2


def test_reports_when_the_run_fails_meanwhile_then_the_steps_numbers_are_not_lost():
    feature, made, rows, end = reports()
    end(2, ahead=True)
    running = feature._running
    close(feature, made)
    close(feature, made)
    assert rows == [{"step": 2}] and running.closed
    feature, made, rows, end = reports(fails=True)
    end(2, ahead=True)
    with pytest.raises(RuntimeError, match="no server is left"):
        feature.settle()
    assert rows == [{"step": 2}]


def test_reports_when_another_rank_reports_then_nothing_is_written_and_the_same_is_waited_for():
    *_, rows, end = reports(reporter=False)
    assert [end(step, ahead=True) for step in (1, 2, 3)] == [False, False, True]
    assert rows == []


class Agents:
    """Two sequences of each sample, of which the first is the latest."""

    def __init__(self, own_rewards):
        self.own_rewards = own_rewards

    async def generate(self, client, prompts, sampling, *, group_numbers, on_sample):
        known = {"sampled": torch.ones(2), "of": prompts[0].input_ids[0]}
        own = (3.0, 6.0) if self.own_rewards else (None, None)
        reasons = ("stop", "length")
        branches = [
            types.SimpleNamespace(**known, environment_reward=reward, finish_reason=reason)
            for reward, reason in zip(own, reasons, strict=True)
        ]
        await on_sample(branches[0])
        return branches


@pytest.mark.parametrize(("own_rewards", "reward"), [(False, 1.0), (True, 4.5)])
def test_evaluation_when_samples_have_two_sequences_then_each_counts_once(own_rewards, reward):
    made = evaluation(Client(), 0, 1)
    made.source.episodes = Agents(own_rewards)
    one = made.sets[0]
    sample = asyncio.run(made._scored(one, 0, 5, types.SimpleNamespace(done=0, failed=0)))
    assert sample == HeldOutSample(reward, 4, True)
