"""Verdicts after a push: what is named as wrong, from the sides of the triangle; the numbers by hand."""

import math

import numpy as np
import pytest

from megatron_rl_corr.features.push_probe.answers import Decoded, ProbeAnswer
from megatron_rl_corr.features.push_probe.evidence import TextRounding
from megatron_rl_corr.features.push_probe.verdict import (
    Growth,
    ProbeNumbers,
    ServerEvidence,
    cause_of,
    error_of,
    judge_decoded,
)

OFF, FINE = [9.0] * 8, [1.0] * 8


def evidence(scores=FINE, decode=FINE, fresh=(), sampled=FINE):
    return ServerEvidence([9.0], list(scores), list(decode), list(fresh), list(sampled), suspicious=True)


@pytest.mark.parametrize(
    ("found", "before", "alone", "words"),
    [
        (evidence(scores=OFF, sampled=OFF), False, True, "it is the server's: a tensor was loaded wrongly"),
        (evidence(scores=OFF, sampled=OFF), False, False, "every server differs"),
        (evidence(scores=OFF, sampled=OFF), True, False, "before the first push, .* Megatron's flags"),
        (
            evidence(decode=OFF, fresh=OFF, sampled=OFF),
            False,
            True,
            "its decode path computes with other weights",
        ),
        (
            evidence(decode=OFF, fresh=FINE[:2], sampled=OFF),
            False,
            True,
            "its prefix cache keeps keys and values",
        ),
        (
            evidence(decode=OFF[3:], fresh=FINE[:3], sampled=OFF[4:] + FINE[:4]),
            False,
            True,
            "its prefix cache keeps",
        ),
        (
            evidence(decode=OFF[6:] + FINE[:2], fresh=OFF[5:] + FINE[:1], sampled=OFF[4:] + FINE[:4]),
            False,
            True,
            "its decode path computes with other weights",
        ),
        (
            evidence(scores=OFF, decode=OFF, fresh=OFF),
            False,
            True,
            "scores of given tokens are wrong and its samples",
        ),
    ],
    ids=["weights", "all", "trainer", "decode", "cache", "cache, nearly", "decode, nearly", "prefill"],
)
def test_cause_then_the_side_that_is_too_long_is_named(found, before, alone, words):
    import re

    assert found.answer == "differs"
    assert re.search(words, cause_of(found, before=before, alone=alone))


def test_evidence_when_a_suspicion_begins_then_what_raised_it_does_not_count():
    found = ServerEvidence([9.0] * 8, decode=[9.0])
    found.begin_evidence()
    assert found.goes_on and found.bits == 0 and found.suspicious
    found.scores += FINE
    assert found.answer == "equal" and not found.goes_on
    found.scores = [9.0, 1.0, 1.0]
    assert found.answer == "unclear" and found.goes_on


def test_decoded_response_then_each_side_of_the_triangle_is_judged():
    expected = TextRounding(1e-3, 1e-3, np.zeros(3, dtype=bool))
    sampled, scored = np.full(3, -1.0), np.full(3, -1.01)
    found = ServerEvidence([])
    judge_decoded(found, Decoded((1, 2, 3, 4), sampled, scored, fresh=False), np.full(3, -1.011), expected)
    assert found.decode == pytest.approx([10]) and found.fresh == []
    assert found.sampled == pytest.approx([11]) and found.scores == pytest.approx([1])
    judge_decoded(found, Decoded((1, 2, 3, 4), sampled, scored, fresh=True), None, expected)
    assert found.fresh == pytest.approx([10]) and len(found.sampled) == 1


def test_error_then_it_has_the_server_the_evidence_the_numbers_and_the_remedy():
    answer = ProbeAnswer((np.array([-1.0, -2.5]), np.array([-2.75])), (), "/score")
    own = [np.array([-1.0, -2.0]), np.array([-3.0])]
    error = error_of("http://b", answer, evidence(scores=OFF, sampled=OFF), own, "restart it", version="id-7")
    assert error.url == "http://b" and error.endpoint == "/score"
    for words in (
        "with 40 bits of evidence (20 are needed",
        "1,048,576",
        "version 'id-7'",
        "off in 8 of 8 texts",
        "max |D| is 0.5",
        "mean 0.25",
        "Restart it.",
        "`max_probe_log_ratio`",
    ):
        assert words in str(error), words


def test_numbers_then_max_mean_and_k3_are_those_by_hand():
    # D = [0, 0.5, -0.25]: k3 = (0 + e^0.5 - 1.5 + e^-0.25 - 0.75) / 3
    own, served = [np.array([-1.0, -2.0]), np.array([-3.0])], [np.array([-1.0, -2.5]), np.array([-2.75])]
    found = ProbeNumbers.of(own, served)
    assert (found.max_abs, found.mean_abs) == (0.5, 0.25)
    assert found.k3 == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75) / 3, rel=1e-12)


def test_growth_then_the_largest_factor_over_the_push_before_of_the_servers_that_were_in_it():
    growth = Growth()
    assert growth.measure({"a": 1e-4, "b": 0.0}) is None
    assert growth.measure({"a": 2e-4, "b": 5e-6, "new": 9.0}) == pytest.approx(5)  # b's least is 1e-6
