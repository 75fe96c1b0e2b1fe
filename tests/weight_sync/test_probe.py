"""What servers are asked after a push: texts and a response; servers that don't answer."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.inspection import DetailedSample
from megatron_rl_corr.engines.trajectory import VersionSpan
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.features.push_probe import answers
from megatron_rl_corr.features.push_probe.answers import (
    ProbeDraw,
    Question,
    ask_earlier,
    ask_servers,
    ask_types,
)

QUESTION = Question(((5, 6, 7),))


class Servers:
    """url -> the version that answers, or the error."""

    def __init__(self, **replies):
        self.replies, self.base_urls, self.asked = replies, tuple(replies), []

    def engine_of(self, url):
        return SimpleNamespace(
            score=self.score,
            parse_scores=self.parse,
            server_info=lambda: "info",
            generate_endpoint="/score",
            detailed_sample=self.sample,
            parse_detailed_sample=self.parse_sample,
            is_quantized=lambda info: info == "q",
            dtype=lambda info: info,
        )

    def sample(self, prompt, sampling, **how):
        self.asked.append((prompt, sampling, how))
        return SimpleNamespace(endpoint="/sample")

    def parse_sample(self, answer, *, server, prompt_ids, tokens):
        return DetailedSample(
            prompt_ids,
            [8, 3],
            np.array([-0.5, -0.25]),
            np.zeros((2, 1)),
            np.zeros((2, 1)),
            version_spans=(VersionSpan(answer, 0, 2),),
        )

    def score(self, prompt, output, **how):
        self.asked.append((prompt, output, how))
        return SimpleNamespace(endpoint="/score")

    def parse(self, answer, *, server, output_ids, vocab_size):
        return SimpleNamespace(logprobs=np.zeros(len(output_ids)), version=answer)

    async def ask(self, url, request):
        reply = self.replies[url]
        if isinstance(reply, list) and request != "info":  # one answer after the other
            reply = reply.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


def ask(servers, question=QUESTION):
    return asyncio.run(ask_servers(servers, question, version="v2", vocab_size=9, cache_key="k"))


def test_scores_then_no_cached_prefix_is_used_and_the_first_id_is_the_prompt():
    servers = Servers(a="v2", b=None)  # b does not tell its version
    assert list(ask(servers)) == ["a", "b"]
    assert servers.asked == [([5], [6, 7], {"likeliest": 1, "cache_key": "k"})] * 2


def test_scores_when_a_server_dies_or_is_restarted_then_the_others_are_compared(caplog, monkeypatch):
    monkeypatch.setattr(answers, "PAUSE_S", 0.0)
    dead, busy = (RolloutServerError("x", "/score", status, "why") for status in (None, 503))
    assert list(ask(Servers(dead=dead, busy=busy, restarted="default", good="v2"))) == ["good"]
    assert "its weights are version 'default', the trainer's are 'v2'" in caplog.text
    assert caplog.text.count("is not compared") == 3


def nonsense(times):
    return [RolloutProtocolError("a", "/score", "not JSON")] * times


def test_scores_when_one_answer_is_nonsense_then_the_server_is_asked_again(monkeypatch):
    monkeypatch.setattr(answers, "PAUSE_S", 0.0)
    assert list(ask(Servers(a=[*nonsense(2), "v2"], b="v2"))) == ["a", "b"]


def test_scores_when_a_server_answers_nothing_but_nonsense_then_the_others_are_compared_and_it_is_told(
    monkeypatch,
):
    monkeypatch.setattr(answers, "PAUSE_S", 0.0)
    before = EVENTS.counts["server_not_compared"]
    servers = Servers(a=nonsense(9), b="v2")
    assert list(ask(servers)) == ["b"]
    assert len(servers.replies["a"]) == 6 and EVENTS.counts["server_not_compared"] == before + 1
    # nobody is compared: an engine that answers otherwise
    with pytest.raises(RolloutProtocolError, match="not JSON"):
        ask(Servers(a=nonsense(9), dead=RolloutServerError("x", "/score", None, "why")))


def test_scores_when_the_only_server_that_lives_fails_at_every_score_then_that_is_an_error(monkeypatch):
    monkeypatch.setattr(answers, "PAUSE_S", 0.0)
    failing, dead = (RolloutServerError("a", "/score", status, "no scores") for status in (500, None))
    servers = Servers(a=[failing, failing, failing], dead=dead)
    with pytest.raises(RolloutServerError, match="HTTP 500: no scores"):
        ask(servers)
    assert servers.replies["a"] == [] and list(ask(Servers(a=[failing, "v2"]))) == ["a"]
    assert ask(Servers(dead=dead)) == {}  # the push itself says that nobody is left


def test_scores_before_the_first_push_then_of_any_version_and_no_failure_is_an_error(monkeypatch, caplog):
    monkeypatch.setattr(answers, "PAUSE_S", 0.0)
    refusing = RolloutServerError("b", "/score", 400, "too long")
    found = asyncio.run(ask_earlier(Servers(a="default", b=refusing), QUESTION, vocab_size=9, cache_key=None))
    assert list(found) == ["a"] and "b is not compared with itself before the first push: " in caplog.text


def test_scores_when_a_server_refuses_then_that_is_an_error_which_names_the_flag():
    with pytest.raises(
        RolloutServerError, match="HTTP 400: too long; it was asked to score .*`probe_push` off"
    ):
        ask(Servers(a=RolloutServerError("a", "/score", 400, "too long"), b="v2"))


def test_response_then_it_is_sampled_with_the_seed_and_scored_by_the_same_server():
    servers = Servers(a="v2")
    found = ask(
        servers, Question(((5, 6, 7),), (ProbeDraw((1, 2), 3, tokens=8), ProbeDraw((1, 2), 4, fresh=True)))
    )
    one, other = found["a"].decoded
    assert one.ids == (1, 2, 8, 3) and one.sampled.tolist() == [-0.5, -0.25] and one.scored.tolist() == [0, 0]
    assert not one.fresh and other.fresh
    samples = [how for _, _, how in servers.asked if "seed" in how]
    assert [how["seed"] for how in samples] == [3, 4]
    assert samples[0]["cache_key"] == "k"
    # shares no prefix, nor with what other weights left there
    assert samples[1]["cache_key"] == "kprobe-v2-4"
    samplings = [sampling for _, sampling, how in servers.asked if "seed" in how]
    assert [one.max_new_tokens for one in samplings] == [8, 16]
    assert all(one.temperature == 1.0 and one.ignore_eos for one in samplings)
    assert ([1, 2], [8, 3], {"likeliest": 1, "cache_key": "k"}) in servers.asked


def test_response_when_it_is_of_other_weights_then_the_server_is_not_compared(caplog):
    assert list(ask(Servers(a="v2", b="old"), Question((), (ProbeDraw((1,), 0),)))) == ["a"]
    assert "its weights are version 'old'" in caplog.text


def test_response_when_the_server_cannot_sample_so_then_its_scores_are_still_compared(monkeypatch, caplog):
    monkeypatch.setattr(answers, "PAUSE_S", 0.0)

    class NoSamples(Servers):
        async def ask(self, url, request):
            if getattr(request, "endpoint", "") == "/sample":
                raise RolloutServerError(url, "/sample", 500, "top_k 0 with a sampling mask")
            return await super().ask(url, request)

    found = ask(NoSamples(a="v2"), Question(((5, 6),), (ProbeDraw((1,), 0),)))
    assert len(found["a"].scores) == 1 and found["a"].decoded == ()
    assert "samples no tokens to compare" in caplog.text


def test_number_types_then_of_the_servers_that_answer():
    dead = RolloutServerError("x", "/info", None, "why")
    found = asyncio.run(ask_types(Servers(a="float32", b="q", c=dead)))
    assert found == {"a": "float32", "b": "fp8"}


@pytest.mark.parametrize("status", [408, 425, 429])
def test_scores_when_a_server_is_too_busy_then_it_is_asked_again(monkeypatch, status):
    monkeypatch.setattr(answers, "PAUSE_S", 0.0)
    busy = RolloutServerError("a", "/score", status, "too many requests")
    assert list(ask(Servers(a=[busy, busy, "v2"], b="v2"))) == ["a", "b"]
    assert list(ask(Servers(a=[busy] * 3, b="v2"))) == ["b"]


def test_scores_when_only_suspects_are_asked_and_one_fails_then_it_is_left_out(monkeypatch):
    monkeypatch.setattr(answers, "PAUSE_S", 0.0)
    failing = RolloutServerError("a", "/score", 502, "no upstream")
    how = {"version": "v2", "vocab_size": 9, "cache_key": "k", "required": False}
    assert asyncio.run(ask_servers(Servers(a=[failing] * 3), QUESTION, **how)) == {}
