"""The text that servers score after a push: distances by hand, bounds, and servers that don't answer."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.weight_sync import probe
from megatron_rl_corr.weight_sync.probe import ProbeAnswer, ProbeScore, ask_earlier, ask_scores, compare, probe_bound

TRAINED = np.array([-1.0, -2.0, -3.0])


def answers(**served):
    return {f"http://{url}": ProbeAnswer(np.array(logprobs), {}, "/score") for url, logprobs in served.items()}


def judged(given=None, float32=True, otherwise=1e-4, **served):
    found = answers(**served)
    bound = probe_bound(given, both_float32=float32, otherwise=otherwise)
    return compare(found, TRAINED, dict.fromkeys(found, bound), version="id-7")


def test_score_then_max_mean_and_k3_are_those_by_hand():
    # D = [0, 0.5, -0.25]: k3 = (0 + e^0.5 - 1.5 + e^-0.25 - 0.75) / 3
    found = ProbeScore.of(TRAINED, np.array([-1.0, -2.5, -2.75]))
    assert (found.max_abs, found.mean_abs, found.worst) == (0.5, 0.25, 1)
    assert found.k3 == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 3, rel=1e-12)


def test_compare_when_all_are_within_their_bound_then_the_worst_of_each_number():
    found = judged(a=[-1.0, -2.0, -3.00003], b=[-1.00002, -2.00002, -3.00002])
    assert found["rollout/probe_max_abs_log_ratio"] == pytest.approx(3e-5, rel=1e-6)  # a's
    assert found["rollout/probe_mean_abs_log_ratio"] == pytest.approx(2e-5, rel=1e-6)  # b's
    assert found["rollout/probe_k3"] == pytest.approx(2e-10, rel=1e-3)  # b's: 2e-5 ** 2 / 2


def test_compare_when_one_of_two_servers_differs_then_it_is_named_with_the_bound_and_the_remedy():
    with pytest.raises(RolloutProtocolError) as error:
        judged(a=[-1.0, -2.0, -3.0], b=[-1.0, -2.0002, -3.0])
    assert error.value.url == "http://b" and error.value.endpoint == "/score"
    for words in ("its weights differ from the trainer's: ", "of 3 given ids after version 'id-7'", "0.0002 off the",
                  "at token 1", "max |log-ratio| may be 0.0001", "1 of 2 servers differ (http://b)", "restart",
                  "`max_probe_log_ratio`"):  # fmt: skip
        assert words in str(error.value), words


def test_compare_when_all_servers_differ_then_the_trainers_flags_are_suspected_too():
    with pytest.raises(RolloutProtocolError, match="All 2 servers differ: .*model-flags"):
        judged(a=[-1.0, -2.1, -3.0], b=[-1.0, -2.1, -3.0])


def test_compare_in_16_bits_then_the_bound_is_of_the_mean_k3_unless_one_is_given():
    far = [-1.0, -2.1, -3.0]  # k3 about 0.005 / 3
    assert judged(float32=False, otherwise=1e-2, a=far)["rollout/probe_k3"] < 2e-3
    with pytest.raises(RolloutProtocolError, match="mean k3 may be 0.001, as not both compute in float32"):
        judged(float32=False, otherwise=1e-3, a=far)
    assert judged(given=0.2, a=far)
    with pytest.raises(RolloutProtocolError, match=r"max \|log-ratio\| may be 0.05, as --rollout-max-probe-log-ratio"):
        judged(given=0.05, float32=False, otherwise=1.0, a=far)


def test_compare_when_what_is_pushed_is_rounded_then_the_bound_is_of_the_mean_k3_and_says_so_unless_one_is_given():
    found = answers(a=[-1.0, -2.1, -3.0])  # k3 about 0.005 / 3
    near, wide, given = (
        probe_bound(bound, both_float32=False, otherwise=otherwise, rounding="int4_group")
        for bound, otherwise in ((None, 1e-3), (None, 1e-2), (0.2, 1e-3))
    )
    with pytest.raises(RolloutProtocolError, match="mean k3 may be 0.001, as --rollout-push-rounding int4_group"):
        compare(found, TRAINED, {"http://a": near}, version="v")
    assert compare(found, TRAINED, {"http://a": wide}, version="v")
    assert compare(found, TRAINED, {"http://a": given}, version="v")


def test_compare_when_a_log_prob_is_not_finite_then_the_weights_differ():
    with pytest.raises(RolloutProtocolError, match="differ from the trainer's"):
        compare(answers(a=[-1.0]), np.array([math.nan]), {"http://a": probe_bound(9, both_float32=True, otherwise=0)},
                version="v")  # fmt: skip


def test_compare_when_no_server_answered_then_nothing_is_told():
    assert compare({}, TRAINED, {}, version="v") == {}


class Servers:
    """url -> the version that answers, or the error."""

    def __init__(self, **replies):
        self.replies, self.base_urls, self.asked = replies, tuple(replies), []

    def engine_of(self, url):
        return SimpleNamespace(score=self.score, parse_scores=self.parse, server_info=lambda: "info")

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


def ask(servers):
    return asyncio.run(ask_scores(servers, (5, 6, 7), version="v2", vocab_size=9, cache_key="k"))


def test_scores_then_no_cached_prefix_is_used_and_the_first_id_is_the_prompt():
    servers = Servers(a="v2", b=None)  # b does not tell its version
    assert list(ask(servers)) == ["a", "b"]
    assert servers.asked == [([5], [6, 7], {"likeliest": 1, "cache_key": "k"})] * 2


def test_scores_when_a_server_dies_or_is_restarted_then_the_others_are_compared(caplog, monkeypatch):
    monkeypatch.setattr(probe, "PAUSE_S", 0.0)
    dead, busy = (RolloutServerError("x", "/score", status, "why") for status in (None, 503))
    assert list(ask(Servers(dead=dead, busy=busy, restarted="default", good="v2"))) == ["good"]
    assert "its weights are version 'default', the trainer's are 'v2'" in caplog.text
    assert caplog.text.count("is not compared") == 3


def nonsense(times):
    return [RolloutProtocolError("a", "/score", "not JSON")] * times


def test_scores_when_one_answer_is_nonsense_then_the_server_is_asked_again(monkeypatch):
    monkeypatch.setattr(probe, "PAUSE_S", 0.0)
    assert list(ask(Servers(a=[*nonsense(2), "v2"], b="v2"))) == ["a", "b"]


def test_scores_when_a_server_answers_nothing_but_nonsense_then_the_others_are_compared_and_it_is_told(monkeypatch):
    monkeypatch.setattr(probe, "PAUSE_S", 0.0)
    before = EVENTS.counts["server_not_compared"]
    servers = Servers(a=nonsense(9), b="v2")
    assert list(ask(servers)) == ["b"]
    assert len(servers.replies["a"]) == 6 and EVENTS.counts["server_not_compared"] == before + 1
    with pytest.raises(RolloutProtocolError, match="not JSON"):  # nobody is compared: an engine that answers otherwise
        ask(Servers(a=nonsense(9), dead=RolloutServerError("x", "/score", None, "why")))


def test_scores_when_the_only_server_that_lives_fails_at_every_score_then_that_is_an_error(monkeypatch):
    monkeypatch.setattr(probe, "PAUSE_S", 0.0)
    failing, dead = (RolloutServerError("a", "/score", status, "no scores") for status in (500, None))
    servers = Servers(a=[failing, failing, failing], dead=dead)
    with pytest.raises(RolloutServerError, match="HTTP 500: no scores"):
        ask(servers)
    assert servers.replies["a"] == [] and list(ask(Servers(a=[failing, "v2"]))) == ["a"]
    assert ask(Servers(dead=dead)) == {}  # the push itself says that nobody is left


def test_scores_before_the_first_push_then_of_any_version_and_no_failure_is_an_error(monkeypatch, caplog):
    monkeypatch.setattr(probe, "PAUSE_S", 0.0)
    refusing = RolloutServerError("b", "/score", 400, "too long")
    found = asyncio.run(ask_earlier(Servers(a="default", b=refusing), (5, 6, 7), vocab_size=9, cache_key=None))
    assert list(found) == ["a"] and "b is not compared with itself before the first push: " in caplog.text


def test_scores_when_a_server_refuses_then_that_is_an_error_which_names_the_flag():
    with pytest.raises(RolloutServerError, match="HTTP 400: too long; it was asked to score 3 ids .*`probe_push` off"):
        ask(Servers(a=RolloutServerError("a", "/score", 400, "too long"), b="v2"))
