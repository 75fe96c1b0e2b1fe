"""Which ids differ, decided on made-up servers of a made-up model: each defect by its ids, and nothing of a
healthy one.
"""

import asyncio
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl_corr.commands.doctor import vocabulary_check
from megatron_rl_corr.commands.doctor.vocabulary_check import ask_vocabulary
from megatron_rl_corr.doctor.vocabulary import Comparison, IdLogprobs, Model, id_chunks
from megatron_rl_corr.engines.inspection import DetailedSample, TokenScores
from megatron_rl_corr.engines.types import UnsupportedByEngine

ANSWERS, TOKENS, HIDDEN = 3, 16, 24


def bfloat16(tensor):
    return tensor.bfloat16().float()


class MadeUp:
    """A model of V ids: logits = hidden states times an output layer; its server is a change of that.

    In 16 bits hidden states have noise, and weights and logits are rounded.
    """

    def __init__(
        self, seed, size, change=lambda weight: weight, *, half=False, listed=40, chosen=64, bias=None
    ):
        make = torch.Generator().manual_seed(seed)
        weight = torch.randn(size, HIDDEN, generator=make) / 3
        weight[:, 0] = 0.1 * torch.randn(size, generator=make)
        weight[size // 2 :, 0] -= 4.0  # the second half is unlikely
        hidden = torch.randn(ANSWERS * TOKENS, HIDDEN, generator=make)
        hidden[:, 0] = 2.0
        noise = 2e-3 * torch.randn(2, *hidden.shape, generator=make)
        self.exact = (hidden @ weight.t()).split(TOKENS)
        self.rounded = bfloat16(bfloat16(hidden + noise[0]) @ bfloat16(weight).t()).split(TOKENS)
        served = change(weight)
        logits = hidden @ served.t()
        if half:
            logits = bfloat16(bfloat16(hidden + noise[1]) @ bfloat16(served).t())
        if bias is not None:
            logits[:, bias[0]] += bias[1]
        self.served = (
            (logits + 1e-6 * torch.randn(logits.shape, generator=make)).log_softmax(1).double().numpy()
        )
        draws = self.served.argmax(axis=1)
        self.answers = [
            DetailedSample([1], draws[at : at + TOKENS].tolist(), *[np.zeros(0)] * 3)
            for at in range(0, ANSWERS * TOKENS, TOKENS)
        ]
        self.asked, self.half = [], half
        engine = SimpleNamespace(most_likeliest=lambda info: listed, most_scored_ids=chosen, name="MadeUp")

        async def info():
            return {}

        self.probe = SimpleNamespace(
            info=info,
            engine=engine,
            client=SimpleNamespace(vocab_size=size),
            score=self.score,
            score_ids=self.score_ids,
        )

    def row_of(self, prompt):
        """Which of the places has this prefix."""
        for number, answer in enumerate(self.answers):
            if prompt == [*answer.prompt, *answer.output[: len(prompt) - 1]]:
                return number * TOKENS + len(prompt) - 1
        raise AssertionError(prompt)

    async def score(self, prompt, output, likeliest):
        number = next(n for n, one in enumerate(self.answers) if one.output is output)
        rows = self.served[number * TOKENS : (number + 1) * TOKENS]
        ids = np.argsort(-rows, axis=1)[:, :likeliest]
        return TokenScores(np.zeros(TOKENS), np.take_along_axis(rows, ids, 1), ids)

    async def score_ids(self, prompt, ids):
        self.asked.append(ids)
        return self.served[self.row_of(prompt), ids]

    def row(self):
        judged = ask_vocabulary(
            self.probe, self.half, self.answers, self.exact, self.rounded, lambda one: f"<{one}>"
        )
        return asyncio.run(judged)


@pytest.fixture(autouse=True)
def distinct_prefixes(monkeypatch):
    """Answers of one beginning would be one place."""
    init = MadeUp.__init__

    def made(self, *args, **kwargs):
        init(self, *args, **kwargs)
        for number, answer in enumerate(self.answers):
            answer.prompt[0] = number

    monkeypatch.setattr(MadeUp, "__init__", made)


def exchanged(first, second):
    def change(weight):
        weight = weight.clone()
        weight[[first, second]] = weight[[second, first]]
        return weight

    return change


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("seed", "size"), [*((seed, 83) for seed in range(10)), (0, 3000), (1, 3000)])
def test_server_when_it_is_right_then_nothing_is_found(seed, half, size):
    row = MadeUp(seed, size, half=half).row()
    assert (row.status, row.numbers["off"]) == ("ok", {}), row.message
    assert row.numbers["ids"] == size and "not covered" not in row.message
    assert row.numbers["least_tv"] < (0.05 if half else 1e-5)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("seed", "size"), [*((seed, 83) for seed in range(5)), (0, 3000)])
def test_two_unlikely_ids_when_they_are_exchanged_then_each_is_named_with_the_other(seed, half, size):
    one, other = size - 7, size - 20
    row = MadeUp(seed, size, exchanged(one, other), half=half).row()
    assert row.defect == "ids_differ", row.message
    assert set(row.numbers["off"]) == {str(one), str(other)}
    assert f"id <{one}> has the log-probs of <{other}>" in row.message
    assert f"id <{other}> has the log-probs of <{one}>" in row.message


@pytest.mark.parametrize("half", [False, True])
def test_vocabulary_when_it_is_shifted_beyond_an_id_then_each_id_has_the_next_ones_log_probs(half):
    def shifted(weight):
        return torch.cat([weight[:2900], weight[2901:], weight[2900:2901]])

    row = MadeUp(0, 3000, shifted, half=half).row()
    assert row.defect == "ids_differ" and min(map(int, row.numbers["off"])) >= 2900
    pairs = re.findall(r"id <(\d+)> has the log-probs of <(\d+)>", row.message)
    assert len(pairs) == 8 and all(int(b) == int(a) + 1 or a == "2999" for a, b in pairs)
    assert "and 56 more at least" in row.message


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("token", [3, 2990])
def test_logit_bias_then_the_id_and_its_nats(half, token):
    row = MadeUp(1, 3000, half=half, bias=(token, 5.0)).row()
    assert row.defect == "ids_differ" and list(row.numbers["off"]) == [str(token)]
    assert re.search(rf"id <{token}> has \+(5|4\.9|5\.1) nats wherever it stands", row.message), row.message


def test_padding_when_it_takes_mass_then_the_ids_that_the_model_lacks():
    def padded(weight):
        return torch.cat([weight, torch.zeros(5, HIDDEN)])

    row = MadeUp(2, 83, padded).row()
    assert row.defect == "ids_differ" and row.numbers["off"] == {}
    assert re.search(r"ids 83 to 87, which the model lacks, have 0\.\d+ of the mass", row.message), (
        row.message
    )
    assert row.numbers["lacking_mass"] == pytest.approx(row.numbers["least_tv"], rel=0.2)


@pytest.mark.parametrize("seed", range(3))
def test_padding_when_it_is_on_no_list_then_the_mass_that_all_others_lack(seed):
    def padded(weight):
        rows = torch.zeros(13, HIDDEN)
        rows[:, 0] = -2.5
        return torch.cat([weight, rows])

    row = MadeUp(seed, 83, padded).row()
    assert row.defect == "ids_differ" and row.numbers["off"] == {} and row.numbers["lacking_mass"] == 0
    assert re.match(r"ids that the model lacks, or that were not asked for, have \d", row.message), (
        row.message
    )


def test_model_when_it_is_another_one_then_no_id_is_named():
    row = MadeUp(3, 83, lambda weight: weight.roll(1, dims=0)).row()
    assert row.status == "note" and row.message.startswith("all ids differ, see the model difference")


def test_engine_when_it_scores_no_chosen_ids_then_it_says_what_is_not_covered():
    server = MadeUp(4, 3000, exchanged(2990, 2980), chosen=0)
    row = server.row()
    assert row.status == "ok" and row.numbers["ids"] < 1600
    assert (
        "ids that are never among the likeliest are not covered: MadeUp has no request for them"
        in row.message
    )


def test_server_when_it_refuses_chosen_ids_then_it_says_so():
    server = MadeUp(4, 3000)

    async def refused(prompt, ids):
        raise UnsupportedByEngine("MadeUp", "log-probs of chosen ids")

    server.probe.score_ids = refused
    row = server.row()
    assert (
        row.status == "ok" and "are not covered: " in row.message and "log-probs of chosen ids" in row.message
    )


def test_vocabulary_when_it_is_too_large_for_the_requests_then_a_sample_is_asked_for(monkeypatch):
    monkeypatch.setattr(vocabulary_check, "MOST_REQUESTS", 4)
    server = MadeUp(5, 3000)
    row = server.row()
    assert len(server.asked) == 8 and all(len(ids) == 64 for ids in server.asked)
    assert "not covered, but for a sample of 256" in row.message


def test_chunks_then_each_id_once_in_an_order_of_the_seed():
    chunks = id_chunks(10, 4, 9, 1)
    assert [len(one) for one in chunks] == [4, 4, 2] and sorted(sum(chunks, [])) == list(range(10))
    assert chunks != id_chunks(10, 4, 9, 2) and id_chunks(10, 4, 2, 1) == chunks[:2]


def test_median_of_a_place_when_one_id_takes_mass_then_the_others_are_not_off():
    # One id of five takes half of the mass: the others lose ln 2 at each place, and are not off.
    exact = np.log(np.full((4, 5), 0.2))
    served = np.log(np.array([[0.5, 0.125, 0.125, 0.125, 0.125]] * 4))
    places, ids = np.repeat(np.arange(4), 5), np.tile(np.arange(5), 4)
    listed = IdLogprobs(places, ids, served.ravel())
    found = Comparison(Model(exact, exact), listed, half=False).off_ids(listed)
    assert list(found) == [0] and found[0] == pytest.approx(-np.log(0.5 / 0.125))
