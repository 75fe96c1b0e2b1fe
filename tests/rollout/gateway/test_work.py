"""What a conversation costs, counted: texts that are tokenised, rendered and decoded, and what is kept."""

import asyncio
import gc
import threading

import pytest

from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout.gateway import episode as episode_module
from megatron_rl_corr.rollout.gateway import openai_messages
from megatron_rl_corr.rollout.gateway import templates as module
from megatron_rl_corr.rollout.gateway.bodies import Memory
from megatron_rl_corr.rollout.gateway.openai_chat import ChatExchange
from megatron_rl_corr.rollout.gateway.openai_responses import ResponseExchange
from megatron_rl_corr.rollout.gateway.server import Gateway
from megatron_rl_corr.rollout.gateway.tree import TurnTree
from megatron_rl_corr.rollout.gateway.types import ChatRequest, GatewayError, TextRequest
from tests.rollout.gateway import agents_model
from tests.rollout.gateway.agents_model import Servers, episode, ids_of

END = "<|im_end|>"
TURNS = 20


class Work:
    """Calls of a `Templates`, by name, with the texts that they got; and the threads of each."""

    def __init__(self, made, monkeypatch):
        self.encoded, self.renders, self.forms, self.decoded, self.threads = [], 0, 0, 0, set()
        self.release = threading.Event()
        self.release.set()
        encode, render, decode = made.tokenizer.encode, made.tokenizer.render, made.tokenizer.decode_all
        message = made.message

        def encoding(text, **how):
            self.threads.add(threading.current_thread() is threading.main_thread())
            assert self.release.wait(10)
            self.encoded.append(text)
            return encode(text, **how)

        def rendering(*given, **how):
            self.renders += 1
            return render(*given, **how)

        def decoding(ids):
            self.decoded += len(ids)
            return decode(ids)

        def forming(given):
            self.forms += 1
            return message(given)

        monkeypatch.setattr(made.tokenizer, "encode", encoding)
        monkeypatch.setattr(made.tokenizer, "render", rendering)
        monkeypatch.setattr(made.tokenizer, "decode_all", decoding)
        monkeypatch.setattr(made, "message", forming)


@pytest.fixture
def made():
    own = agents_model.templates("qwen3")
    own._neutral  # noqa: B018  found once, by tokenising
    return own


@pytest.fixture
def work(made, monkeypatch):
    return Work(made, monkeypatch)


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 20))


def said(number):
    return f"answer {number} to it"


def history(turns):
    """The messages of turn `turns`, from 0."""
    messages = [{"role": "system", "content": "be brief"}]
    for number in range(turns):
        messages += [{"role": "user", "content": f"question {number} of it"}]
        messages += [{"role": "assistant", "content": said(number)}]
    return [*messages, {"role": "user", "content": f"question {turns} of it"}]


def conversation(made, exchange=ChatExchange, **fields):
    """The answers to TURNS requests, written as the protocol does."""
    own = episode(Servers(*[(said(number) + END, "stop") for number in range(TURNS)]), made)
    memory = Memory(SamplingParams(64))
    name = "input" if exchange is ResponseExchange else "messages"

    async def all_turns():
        for turn in range(TURNS):
            asked = exchange({"model": "m", name: history(turn), **fields}, memory)
            answers = await own.chat(asked.request)
            assert b"".join(asked.events(answers)) if asked.streams else asked.body(answers)

    run(all_turns())
    assert own.counts.branches == 1
    return own, memory


def test_conversation_when_of_many_turns_then_each_message_is_tokenised_and_formed_once(made, work):
    own, _ = conversation(made)
    whole = "".join(work.encoded)
    for number in range(TURNS):
        assert whole.count(f"question {number} of it") == 1
        assert said(number) not in whole  # what was sampled is never tokenised
    assert len(work.encoded) == TURNS and work.forms == 2 * TURNS + 1
    glue = max(map(len, work.encoded[1:]))
    assert glue < 100  # of any turn
    assert own.tree.check() == []


def test_conversation_when_each_request_brings_all_of_it_then_each_message_is_read_once(made, monkeypatch):
    read, own = [], openai_messages.message
    monkeypatch.setattr(
        openai_messages, "message", lambda given, place: read.append(place) or own(given, place)
    )
    conversation(made)
    assert read == ["messages[0]", *(f"messages[{number}]" for number in range(1, 2 * TURNS))]


@pytest.mark.parametrize(
    ("place", "other", "raises"),
    [
        (1, {"role": "user", "content": "another question"}, None),
        (1, {"role": "user", "content": [{"type": "text", "text": "question 0 of it"}]}, None),
        (0, {"role": "developer", "content": "be brief"}, None),
        (1, {"role": "user", "content": 1}, "messages[1].content"),
    ],
)
def test_history_when_a_message_is_another_one_then_it_is_read_again(place, other, raises):
    memory, edited = Memory(SamplingParams(64)), history(2)
    ChatExchange({"model": "m", "messages": history(1)}, memory)
    edited[place] = other
    if raises:
        with pytest.raises(GatewayError) as error:
            ChatExchange({"model": "m", "messages": edited}, memory)
        assert error.value.param == raises
        edited = history(2)  # what failed is not kept
    made = ChatExchange({"model": "m", "messages": edited}, memory).request.messages
    assert (
        made == ChatExchange({"model": "m", "messages": edited}, Memory(SamplingParams(64))).request.messages
    )


def test_gateway_when_it_has_begun_then_what_was_there_is_left_out_of_garbage_collections():
    there = {"a": []}

    def is_looked_at():
        return any(one is there for one in gc.get_objects())

    async def scenario():
        async with Gateway(SamplingParams(64)):
            return is_looked_at()

    assert is_looked_at() and not run(scenario()) and gc.isenabled()


def test_conversation_when_answers_stand_as_sampled_then_each_request_is_rendered_once(made, work):
    conversation(made)
    assert work.renders == TURNS


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_answers_when_nobody_asks_for_logprobs_then_each_token_is_decoded_once(made, work, fields):
    conversation(made, **fields)
    assert work.decoded == sum(len(ids_of(said(number))) for number in range(TURNS))


def test_answers_when_logprobs_are_asked_for_then_decoded_once_more_and_new_tokens_one_by_one(made, work):
    conversation(made, logprobs=True)
    texts = [ids_of(said(number) + END) for number in range(TURNS)]
    once = sum(map(len, texts)) - TURNS
    assert work.decoded == once + sum(map(len, texts)) + len({one for ids in texts for one in ids})


def test_responses_when_each_request_brings_all_of_its_input_then_each_message_is_kept_once(made):
    _, memory = conversation(made, ResponseExchange)
    kept = [message for _, messages in memory.responses.values() for message in messages]
    assert len(kept) == sum(2 * turn + 3 for turn in range(TURNS))
    assert len({id(message) for message in kept}) == 2 * TURNS + 1


def test_prompt_when_long_then_tokenised_once_for_all_and_the_loop_goes_on(made, work, monkeypatch):
    monkeypatch.setattr(module, "LONG_TEXT", 200)
    long = [{"role": "user", "content": "the weather of Oslo " * 20}]
    servers = Servers(*[(f"ok{END}", "stop")] * 5)
    first, second, third = (episode(servers, made, sample=sample) for sample in range(3))

    async def scenario():
        work.release.clear()
        asking = [asyncio.ensure_future(one.chat(ChatRequest(long))) for one in (first, second)]
        cancelled = asyncio.ensure_future(third.chat(ChatRequest(long)))
        while not work.threads:
            await asyncio.sleep(0.01)
        cancelled.cancel()  # one that waits for the same prompt takes it from nobody
        await asyncio.sleep(0)
        work.release.set()
        await asyncio.gather(*asking)
        await third.chat(ChatRequest(long))

    run(scenario())
    assert len(work.encoded) == 1 and work.threads == {False}
    assert [one["prompt"] for one in servers.log] == [ids_of(work.encoded[0])] * 3
    for one in (first, second, third):
        assert one.tree.check() == []


def test_prompt_when_short_then_tokenised_at_once(made, work):
    own = episode(Servers((f"ok{END}", "stop")), made)
    run(own.chat(ChatRequest(history(0))))
    assert work.threads == {True}


@pytest.mark.parametrize("raw", [False, True])
def test_episode_when_it_ends_while_a_text_is_tokenised_then_nothing_is_sampled(made, work, monkeypatch, raw):
    monkeypatch.setattr(module, "LONG_TEXT", 10)
    servers = Servers((f"ok{END}", "stop"))
    own = episode(servers, made)

    async def scenario():
        work.release.clear()
        ask = own.text(TextRequest("some long text")) if raw else own.chat(ChatRequest(history(0)))
        asking = asyncio.ensure_future(ask)
        while not work.threads:
            await asyncio.sleep(0.01)
        await own.end()
        work.release.set()
        with pytest.raises(GatewayError, match="has ended") as failure:
            await asking
        assert failure.value.status == 401

    run(scenario())
    assert servers.log == []


def test_episode_when_it_has_ended_then_its_branches_are_made_and_checked_while_the_loop_goes_on(
    made, monkeypatch
):
    own = episode(Servers(*[(f"ok{END}", "stop")] * 2), made)
    goes_on, threads = threading.Event(), []

    def slow(work):
        def done(*args, **how):
            threads.append(threading.current_thread())
            assert goes_on.wait(10), "the event loop waits for it"
            return work(*args, **how)

        return done

    for owner, name in ((episode_module, "message_spans"), (TurnTree, "branches"), (TurnTree, "check")):
        monkeypatch.setattr(owner, name, slow(getattr(owner, name)))

    async def scenario():
        for question in ("one", "two"):
            await own.chat(ChatRequest([{"role": "user", "content": question}]))
        finishing = asyncio.ensure_future(own.finish())
        while not threads:
            await asyncio.sleep(0.01)
        goes_on.set()
        return await finishing

    assert [one.branch for one in run(scenario())] == [0, 1]
    assert len(threads) == 4 and threading.main_thread() not in threads


def test_continuation_when_tokenised_in_a_thread_then_its_answer_is_not_taken_back(made, work, monkeypatch):
    """The harness has sent the answer back, so it had it, whatever its connection says meanwhile."""
    monkeypatch.setattr(module, "LONG_TEXT", 200)
    own = episode(Servers(*[(said(number) + END, "stop") for number in range(2)]), made)
    longer = [*history(1)[:-1], {"role": "user", "content": "the weather of Oslo " * 20}]

    async def scenario():
        answers = await own.chat(ChatRequest(history(0)))
        work.release.clear()
        asking = asyncio.ensure_future(own.chat(ChatRequest(longer)))
        while False not in work.threads:
            await asyncio.sleep(0.01)
        own.undelivered(answers)
        work.release.set()
        await asking
        return await own.finish()

    [branch] = run(scenario())
    assert own.counts.turns == 2 and own.counts.undelivered == 0 and own.tree.check([branch]) == []


def test_first_requests_when_together_then_one_is_the_first(made, work, monkeypatch):
    monkeypatch.setattr(module, "LONG_TEXT", 10)
    own = episode(Servers(*[(f"ok{END}", "stop")] * 2), made)

    async def scenario():
        await asyncio.gather(*(own.chat(ChatRequest(history(0))) for _ in range(2)))

    run(scenario())
    assert {reason: count for reason, count in own.tree.forks.items() if count} == {"first": 1, "edited": 1}


def test_tools_when_many_episodes_bring_them_then_their_form_is_made_once(made, monkeypatch):
    shielded, own = [], made._shielded
    monkeypatch.setattr(made, "_shielded", lambda value: shielded.append(value) or own(value))
    for number in range(module.KEPT_TOOLS + 2):
        tool = {"type": "function", "function": {"name": "look", "description": "see"}}
        run(episode(Servers((f"ok{END}", "stop")), made).chat(ChatRequest(history(number), [tool])))
    assert sum(value == "see" for value in shielded) == 1
