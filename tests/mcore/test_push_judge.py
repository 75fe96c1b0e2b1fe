"""Rank 0's part of the probe on made-up servers, whose log-probs differ from the trainer's by
rounding and faults.
"""

import asyncio
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl_corr.data.prompts import Prompt, PromptDataset
from megatron_rl_corr.features.push_probe import judge as judging
from megatron_rl_corr.features.push_probe.answers import Decoded, ProbeAnswer
from megatron_rl_corr.features.push_probe.judge import ROUNDS, PushJudge
from megatron_rl_corr.features.push_probe.texts import round_texts

SURE, MOVES = 1e-6, 2e-2
"""Nats by which bfloat16 moves a sure token's log-prob, and another one's."""
TEMPLATE = list(range(40))
"""Ids that begin each prompt, of which the policy is sure."""


class World:
    """A model's log-probs: those of TEMPLATE are near 0; each server's own rounding, and what
    is wrong with it.
    """

    def __init__(self, **wrong):
        self.wrong, self.random = wrong, np.random.default_rng(1)
        """By server what of its log-probs is off: "scores", "samples" or "weights"."""
        self.types = defaultdict(lambda: "bfloat16")

    def moves(self, ids):
        return np.where(np.array(ids[1:]) < len(TEMPLATE), SURE, MOVES)

    def rounded(self, own, ids, nats=0.0):
        unsure = self.moves(ids) == MOVES
        return own + self.random.standard_normal(own.shape) * self.moves(ids) + nats * unsure

    def own(self, ids):
        return -100 * self.moves(ids)

    def simulated(self, ids):
        return self.random.standard_normal((4, len(ids) - 1)) * self.moves(ids)

    def answer(self, url, question):
        wrong = self.wrong.get(url, "")
        scores_off, samples_off = ((wrong in (side, "weights")) * 0.5 for side in ("scores", "samples"))

        def decoded(draw):
            ids = (*draw.prompt, *self.random.integers(len(TEMPLATE), 1000, draw.tokens).tolist())
            own = self.own(ids)[-draw.tokens :]
            sides = [self.rounded(own, ids[-draw.tokens - 1 :], off) for off in (samples_off, scores_off)]
            return Decoded(ids, *sides, draw.fresh)

        scores = tuple(self.rounded(self.own(ids), ids, scores_off) for ids in question.texts)
        return ProbeAnswer(scores, tuple(map(decoded, question.draws)), "/generate")


def made_judge(monkeypatch, world, urls, *, template=TEMPLATE, prompts=12, simulates=None, **settings):
    """A judge of these servers, and what judges one push: (its error or None, its numbers)."""

    async def types(servers):
        return {url: world.types[url] for url in servers if world.types[url]}

    async def answers(asked, question, **_):
        return {url: world.answer(url, question) for url in asked}

    def submit(coroutine):
        future = Future()
        future.set_result(asyncio.run(coroutine))
        return future

    monkeypatch.setattr(judging, "ask_types", types)
    monkeypatch.setattr(judging, "ask_servers", answers)
    rows = prompts
    if isinstance(prompts, int):
        rows = [[*template, *range(100 + 50 * i, 150 + 50 * i)] for i in range(prompts)]
    source = SimpleNamespace(
        client=SimpleNamespace(control=lambda urls: urls, vocab_size=1000, cache_key=None),
        loop=SimpleNamespace(call=asyncio.run, submit=submit),
        prompts=PromptDataset([Prompt(i, ids) for i, ids in enumerate(rows)]),
    )
    settings = {
        "dtype": "bfloat16",
        "max_log_ratio": None,
        "push_rounding": "none",
        "longest": 1023,
    } | settings
    judge = PushJudge(source, responses=lambda: [], resumed=False, **settings)
    servers = SimpleNamespace(urls=urls, loaded={}, quantization=None)

    def computed(asked):
        own = [world.own(ids) for ids in asked.texts]
        moved = [simulates(asked, ids) if simulates else world.simulated(ids) for ids in asked.texts]
        return own, moved if asked.relative_error else []

    def push():
        asked = judge.begin(servers, "id-1")
        judge.screen(judge.ask(0).result(), *computed(asked))
        for number in range(1, ROUNDS + 1):
            if not judge.goes_on:
                break
            judge.take(judge.ask(number).result())
            if (error := judge.judge(*computed(judge.asked))) is not None:
                return error, judge.numbers
        return None, judge.numbers

    return push


@pytest.mark.parametrize("sure", [30, 40], ids=["of most of it", "of all of it"])
def test_judge_when_the_policy_is_sure_of_the_prompt_of_responses_then_a_healthy_server_does_not_differ(
    monkeypatch, sure
):
    push = made_judge(monkeypatch, World(), ["a"], template=TEMPLATE[:sure])
    rounds = []
    for _ in range(20):
        error, numbers = push()
        assert error is None, error
        rounds.append(numbers["rollout/probe_rounds"])
    assert sum(rounds[1:]) <= 5, rounds  # the first one has shown what rounding does to such responses


@pytest.mark.parametrize("servers", [1, 4, 9])
def test_judge_when_more_servers_differ_than_are_asked_again_then_all_are_said_to(monkeypatch, servers):
    urls = [f"s{i}" for i in range(servers)]
    error, _ = made_judge(monkeypatch, World(**dict.fromkeys(urls, "weights")), urls)()
    assert "Every server differs" in str(error)


def test_judge_when_another_server_was_suspicious_and_is_cleared_then_the_fault_is_the_servers_own(
    monkeypatch,
):
    world = World(a="weights", b="weights")
    push = made_judge(monkeypatch, world, ["a", "b"])
    answer = world.answer

    def cleared(url, question):
        world.wrong["b"] = "weights" if len(question.draws) == 1 else ""  # off in the first round alone
        return answer(url, question)

    world.answer = cleared
    error, _ = push()
    assert error.url == "a" and "It is the server's: a tensor was loaded wrongly" in str(error), error


@pytest.mark.parametrize("sampled_off", [False, True], ids=["a text of each", "a response of each"])
def test_judge_when_many_healthy_servers_are_suspicious_in_every_push_then_the_wrong_one_is_soon_asked(
    monkeypatch, sampled_off
):
    urls = [f"s{i}" for i in range(9)]
    world = World(s8="samples")
    answer = world.answer

    def near_a_tie(url, question):
        found = answer(url, question)
        if url != "s8" and len(question.draws) == 1:
            off = found.decoded[0].sampled if sampled_off else found.scores[0]
            off -= 1.0
        return found

    world.answer = near_a_tie
    push = made_judge(monkeypatch, world, urls)
    errors = [error for _ in range(3) if (error := push()[0])]
    assert errors and errors[0].url == "s8" and "decode path" in str(errors[0])


def test_judge_when_a_sure_policy_gives_one_response_again_and_again_then_it_is_no_evidence_for_itself(
    monkeypatch,
):
    world = World()
    answer, first = world.answer, []

    def sure(url, question):
        found = answer(url, question)
        first.append(found.decoded[0])
        first[0].sampled[:] = first[0].scored + 1.0  # near a tie of a router
        return replace(found, decoded=(first[0],) * len(found.decoded))

    world.answer = sure
    error, numbers = made_judge(monkeypatch, world, ["a"])()
    assert error is None and numbers["rollout/probe_rounds"] >= 1


def test_judge_in_further_rounds_then_prompts_of_responses_are_others_and_the_cached_ones_begin_alike(
    monkeypatch,
):
    world, asked = World(), []
    answer = world.answer

    def off(url, question):
        asked.append(question.draws)
        found = answer(url, question)
        for score in found.scores[: 1 if len(asked) == 1 else 3]:
            score -= 1.0  # as many as leave it unclear
        return found

    world.answer = off
    made_judge(monkeypatch, world, ["a"], template=[])()
    [usual], *further = asked
    draws = [draw for draws in further for draw in draws]
    assert len(further) == ROUNDS and len({draw.prompt for draw in (usual, *draws)}) == 1 + ROUNDS * 8
    assert usual.tokens == 8 and {draw.tokens for draw in draws} == {16}
    cached = [draw.prompt for draw in draws if not draw.fresh]
    assert len(cached) == ROUNDS * 4 and all(usual.prompt[: len(prompt)] == prompt for prompt in cached)
    assert min(map(len, cached)) >= 20


def numbered(sizes):
    """Prompts of so many ids each, all ids different."""
    ids = iter(range(10**6))
    return PromptDataset([Prompt(i, [next(ids) for _ in range(size)]) for i, size in enumerate(sizes)])


@pytest.mark.parametrize("size", [8, 16, 64, 300])
def test_texts_of_rounds_then_they_have_no_ids_in_common(size):
    prompts = numbered([size] * 1000)
    later = [text for number in range(1, ROUNDS + 1) for text in round_texts(prompts, number, (), 1023)]
    ids = [one for text in later for one in text]
    assert len(ids) == len(set(ids)) == ROUNDS * 8 * 64


def test_texts_when_all_prompts_begin_alike_then_they_are_of_what_is_their_own():
    prompts = PromptDataset(
        [Prompt(i, [*range(80), *range(100 + 50 * i, 150 + 50 * i)]) for i in range(1000)]
    )
    texts = [text for number in range(ROUNDS + 1) for text in round_texts(prompts, number, (), 1023)]
    assert len(set(texts)) == len(texts) and all(sum(one >= 100 for one in text) >= 50 for text in texts)


def test_judge_when_there_is_one_prompt_then_a_text_that_is_off_is_evidence_once(monkeypatch):
    """A healthy server, and a text that stands at a tie: the same one in every round."""
    world = World()
    answer = world.answer

    def off(url, question):
        found = answer(url, question)
        for score in found.scores:
            score -= 1.0
        return found

    world.answer = off
    error, numbers = made_judge(monkeypatch, world, ["a"], prompts=[[107]])()
    assert error is None and numbers["rollout/probe_rounds"] >= 1


def test_judge_when_a_sure_policy_goes_on_alike_from_each_beginning_then_its_tokens_are_evidence_once(
    monkeypatch,
):
    """Healthy: ten neighbouring tokens of the one continuation of a prompt are off in
    decoding, as at a tie.
    """
    chain, world = list(range(100, 200)), World()
    world.moves = lambda ids: np.full(len(ids) - 1, MOVES)

    def answer(url, question):
        def decoded(draw):
            sure = draw.prompt[0] == usual[0]
            tail = usual[len(draw.prompt) :] + (*range(500, 600),)
            random = world.random.integers(0, 1000, draw.tokens).tolist()
            ids = (*draw.prompt, *(tail[: draw.tokens] if sure else random))
            sampled, scored = (
                world.rounded(world.own(ids)[-draw.tokens :], ids[-draw.tokens - 1 :]) for _ in range(2)
            )
            at = np.arange(len(draw.prompt), len(ids))
            sampled -= 0.5 * ((at >= 32) & (at < 42)) * sure
            return Decoded(ids, sampled, scored, draw.fresh)

        scores = tuple(world.rounded(world.own(ids), ids) for ids in question.texts)
        return ProbeAnswer(scores, tuple(map(decoded, question.draws)), "/generate")

    world.answer = answer
    usual = tuple(chain[-32:])
    rows = [chain, *([*range(1000 + 80 * i, 1080 + 80 * i)] for i in range(1000))]
    error, numbers = made_judge(monkeypatch, world, ["a"], prompts=rows)()
    assert error is None and numbers["rollout/probe_rounds"] >= 1


@pytest.mark.parametrize(("dtype", "served"), [("float32", "bfloat16"), ("bfloat16", "fp8")])
def test_judge_when_a_server_does_not_tell_its_type_once_then_it_is_that_of_before(
    monkeypatch, dtype, served
):
    world, asked = World(), []
    world.types["a"] = served
    answer = world.answer

    def once_odd(url, question):
        asked.append(url)
        found = answer(url, question)
        if len(asked) == 1:
            found.scores[0][:] -= 1.0
            world.types["a"] = None
        return found

    world.answer = once_odd
    relative = {"float32": 2e-7, "bfloat16": 2.5e-3, "fp8": 4e-2}[served]
    push = made_judge(
        monkeypatch,
        world,
        ["a"],
        dtype=dtype,
        simulates=lambda asked, ids: (
            world.random.standard_normal((4, len(ids) - 1))
            * world.moves(ids)
            * asked.relative_error
            / relative
        ),
    )
    error, numbers = push()
    assert error is None and numbers["rollout/probe_rounds"] == 1


def test_draws_when_sequences_are_short_then_prompt_and_response_fit(monkeypatch):
    world, asked = World(sounds="weights"), []
    answer = world.answer

    def noted(url, question):
        asked.extend(question.draws)
        return answer(url, question)

    world.answer = noted
    made_judge(monkeypatch, world, ["sounds"], longest=15)()
    assert len(asked) > 1 and all(
        len(draw.prompt) >= 2 and len(draw.prompt) + draw.tokens <= 15 for draw in asked
    )
