"""Distances in ulps by hand and against numpy, keys, what a rank counts, and certificates."""

import asyncio
import json
import math
from types import SimpleNamespace

import numpy
import pytest
import torch

from megatron_rl_corr.config.problems import problems_of
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.features.exact.certificate import NAME, Certificate, digest_of, read_certificate
from megatron_rl_corr.features.exact.comparison import (
    FIRST,
    exact_metrics,
    place_of_key,
    token_keys,
    ulps_apart,
)
from megatron_rl_corr.features.exact.feature import ExactFeature
from megatron_rl_corr.features.exact.message import message
from megatron_rl_corr.reduce.failure import StartupError

SHORT, LONG = torch.bfloat16, torch.float32
RUN = {"urls": ("http://127.0.0.1:30000",), "hf_checkpoint": "model", "log_dir": "log"}
RUN |= {"prompts": ("rows.jsonl",), "reward_function": ("reward.py:reward",), "max_new_tokens": 8}


def after(x, steps=1):
    """The float32 so many steps from x on, away from 0."""
    for _ in range(steps):
        x = numpy.nextafter(numpy.float32(x), numpy.float32(-numpy.inf))
    return float(x)


@pytest.mark.parametrize(
    "p, q, dtype, ulps",
    [
        (-0.5, -0.5, LONG, 0),
        # below 1 a unit is that of 1, 2^-23: numbers from 0.5 on are 2^-24 apart
        (-0.5, after(-0.5), LONG, 0.5),
        (-1.0, after(-1.0), LONG, 1),
        (-1.5, after(-1.5, 3), LONG, 3),
        # the larger of both decides, across a power of two too: -2 and its neighbour, 2^-22 apart
        (-2.0, after(-2.0), LONG, 1),
        (after(-1.0, 2), after(-1.0, 5), LONG, 3),
        (-16.0, after(-16.0, 2), LONG, 2),
        # log-probs of nearly certain tokens: 1.19e-7 is a unit, however small the number is
        (0.0, -(2.0**-23), LONG, 1),
        (-1e-30, -2e-30, LONG, 1e-30 * 2**23),
        (0.0, -0.0, LONG, 0),
        # bfloat16: 8 bits; p is rounded first
        (-1.0, -1.0078125, SHORT, 1),
        (-1.001, -1.0, SHORT, 0),
        (-4.0, -4.0625, SHORT, 2),
    ],
)
def test_ulps_of_two_numbers_then_as_by_hand(p, q, dtype, ulps):
    found = ulps_apart(torch.tensor([p]), torch.tensor([q]), dtype)
    assert float(found) == pytest.approx(ulps, rel=1e-6, abs=0 if not ulps else 1e-40)
    assert (float(found) == 0) == (ulps == 0)


def test_ulps_of_many_numbers_then_numpys_spacing():
    generator = torch.Generator().manual_seed(0)
    p = -torch.rand(10_000, generator=generator).mul(8).exp().sub(1)
    steps = torch.randint(-6, 7, (10_000,), generator=generator)
    bits = p.view(torch.int32) + steps.int()
    q = torch.where(p == 0, p, bits.view(torch.float32))
    larger = numpy.maximum(numpy.maximum(abs(p.numpy()), abs(q.numpy())), numpy.float32(1))
    expected = abs(p.numpy().astype("f8") - q.numpy().astype("f8")) / numpy.spacing(larger)
    assert numpy.array_equal(ulps_apart(p, q, LONG).numpy(), expected)
    assert torch.equal(ulps_apart(p, q, LONG) == 0, p == q)


@pytest.mark.parametrize("other", [math.nan, -math.inf])
def test_ulps_of_no_number_then_not_finite(other):
    for pair in ((-1.0, other), (other, -1.0), (other, other)):
        assert not ulps_apart(*(torch.tensor([x]) for x in pair), LONG).isfinite().any()


def test_keys_then_tokens_in_order_and_back():
    seq_ids, positions = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 5])
    sampled = torch.tensor([False, True, True, True])
    keys = token_keys(3, seq_ids, positions, sampled)
    assert keys.tolist()[0] == keys.tolist()[-1] == -1
    assert [place_of_key(key) for key in keys.tolist()[1:-1]] == [(3, 0, 1), (3, 1, 0), (3, 1, 5)]
    assert keys[1:-1].diff().gt(0).all() and token_keys(2, seq_ids, positions, sampled).max() < keys[1]
    largest = token_keys(2**16 - 1, torch.tensor([2**14 - 1]), torch.tensor([2**23 - 1]), sampled[1:2])
    assert int(largest[0].double()) == int(largest[0]) == 2**53 - 1


def finished(parts):
    """The numbers of several ranks' shares, as their reductions make them."""
    found = {}
    for name, one in parts[0].items():
        reduce = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[one.reduction]
        found[name] = one.finish(reduce(torch.stack([part[name].values for part in parts]), dim=0).tolist())
    return found


def test_metrics_of_two_ranks_then_counts_extrema_and_the_first_token():
    one = exact_metrics(
        torch.tensor([-1.0, -1.0, -9.0]),
        torch.tensor([-1.0, after(-1.0, 2), -1.0]),
        torch.tensor([7, 9, -1]),  # the last was not sampled
        allowed=0,
        dtype=LONG,
    )
    other = exact_metrics(
        torch.tensor([-2.0, -3.0]),
        torch.tensor([-2.0, math.nan]),
        torch.tensor([4, 5]),
        allowed=0,
        dtype=LONG,
    )
    distance = -1.0 - after(-1.0, 2)
    assert finished([one, other]) == {
        "exact/tokens": 4,
        "exact/tokens_apart": 2,
        "exact/tokens_unknown": 1,
        "exact/ulps_max": 2,
        "exact/log_ratio_max": distance,
        FIRST: 5,
    }
    assert finished([one])[FIRST] == 9


@pytest.mark.parametrize("allowed, apart", [(0, 2), (1, 1), (2, 0), (2.5, 0)])
def test_metrics_with_a_tolerance_then_only_what_is_beyond(allowed, apart):
    p, q = torch.tensor([-1.0, -1.0, -4.0]), torch.tensor([after(-1.0), after(-1.0, 2), -4.0])
    found = finished([exact_metrics(p, q, torch.tensor([0, 1, 2]), allowed=allowed, dtype=LONG)])
    assert found["exact/tokens_apart"] == apart
    assert (found[FIRST] < math.inf) == (apart > 0)


def test_metrics_without_a_token_then_nothing_is_apart():
    empty = torch.zeros(0)
    found = finished([exact_metrics(empty, empty, empty.long(), allowed=0, dtype=LONG)])
    assert found["exact/tokens"] == found["exact/tokens_apart"] == 0 and math.isnan(found[FIRST])


NUMBERS = {"exact/tokens": 100.0, "exact/ulps_max": 0.0, "exact/log_ratio_max": 0.0}


def test_certificate_of_a_run_then_what_held_and_an_intact_digest(tmp_path):
    written = Certificate.begun(tmp_path, 0.0, 0, number_type="float32", releases={"torch": "2"})
    for step in (1, 2, 3):
        written.add(step, step - 1, NUMBERS)
    found = read_certificate(tmp_path / NAME)
    assert found["held"] and found["tokens"] == 300 and found["ulps_max"] == found["log_ratio_max"] == 0
    [part] = found["parts"]
    assert part == {
        "number_type": "float32",
        "releases": {"torch": "2"},
        "first_step": 1,
        "last_step": 3,
        "first_weights": 0,
        "last_weights": 2,
        "tokens": 300,
        "ulps_max": 0.0,
        "log_ratio_max": 0.0,
    }


def test_certificate_of_a_resumed_run_then_both_parts(tmp_path):
    first = Certificate.begun(tmp_path, 1.0, 0)
    for step in (1, 2, 3):
        first.add(step, step - 1, NUMBERS | {"exact/ulps_max": 0.5})
    again = Certificate.begun(tmp_path, 1.0, 2)  # the checkpoint is behind: step 3 is made again
    again.add(3, 2, NUMBERS)
    found = read_certificate(tmp_path / NAME)
    spans = [(one["first_step"], one["last_step"], one["tokens"]) for one in found["parts"]]
    assert spans == [(1, 3, 300), (3, 3, 100)]
    assert found["tokens"] == 400 and found["ulps_max"] == 0.5
    Certificate.begun(tmp_path, 0.0, 0).add(1, 0, NUMBERS)  # a run from its beginning in the same folder
    assert read_certificate(tmp_path / NAME)["tokens"] == 100


def test_certificate_of_a_run_whose_flag_was_left_out_for_a_while_then_what_was_not_compared(tmp_path):
    first = Certificate.begun(tmp_path, 0.0, 0)
    first.add(1, 0, NUMBERS)
    first.add(3, 1, NUMBERS)  # two updates a batch
    assert read_certificate(tmp_path / NAME)["weights_not_compared"] == []
    Certificate.begun(tmp_path, 0.0, 4).add(5, 2, NUMBERS)
    assert read_certificate(tmp_path / NAME)["weights_not_compared"] == []
    Certificate.begun(tmp_path, 0.0, 10).add(11, 5, NUMBERS)
    Certificate.begun(tmp_path, 0.0, 14).add(15, 7, NUMBERS)
    assert read_certificate(tmp_path / NAME)["weights_not_compared"] == [[3, 4], [6, 6]]
    (tmp_path / NAME).unlink()
    Certificate.begun(tmp_path, 0.0, 16).add(17, 8, NUMBERS)
    assert read_certificate(tmp_path / NAME)["weights_not_compared"] == [[0, 7]]


def test_certificate_of_a_run_that_goes_on_behind_its_end_then_that_end_stays(tmp_path):
    first = Certificate.begun(tmp_path, 0.0, 0)
    first.add(1, 0, NUMBERS)
    first.refute(2, {"token_id": 5})
    Certificate.begun(tmp_path, 0.0, 1).add(2, 1, NUMBERS)
    Certificate.begun(tmp_path, 0.0, 2).add(3, 2, NUMBERS)
    found = read_certificate(tmp_path / NAME)
    assert found["held"] and found["ended_before"] == [{"ended_in_step": 2, "token": {"token_id": 5}}]


def test_certificate_of_a_run_that_ended_then_not_held(tmp_path):
    written = Certificate.begun(tmp_path, 0.0, 0)
    written.add(1, 0, NUMBERS)
    written.refute(2, {"token_id": 5})
    found = read_certificate(tmp_path / NAME)
    assert not found["held"] and found["ended_in_step"] == 2 and found["token"] == {"token_id": 5}
    assert found["tokens"] == 100  # what held before


@pytest.mark.parametrize(
    "change",
    [{"tokens": 10**9}, {"held": False}, {"parts": []}, {"sha256": "0"}],
    ids=lambda one: next(iter(one)),
)
def test_certificate_that_was_changed_then_refused(tmp_path, change):
    Certificate.begun(tmp_path, 0.0, 0).add(1, 0, NUMBERS)
    content = json.loads((tmp_path / NAME).read_text())
    assert content["sha256"] == digest_of(content)
    (tmp_path / NAME).write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match="is no certificate"):
        Certificate.begun(tmp_path, 0.0, 1)


def test_certificate_of_another_tolerance_then_not_continued(tmp_path):
    Certificate.begun(tmp_path, 2.0, 0).add(1, 0, NUMBERS)
    with pytest.raises(ValueError, match="--rollout-expect-exact 0: .* was begun with 2"):
        Certificate.begun(tmp_path, 0.0, 1)


@pytest.mark.parametrize(
    "given, named",
    [
        ({"max_lag": 1}, "`max_lag` 1"),
        ({"push_rounding": "fp8_blockwise"}, "`push_rounding` fp8_blockwise"),
        ({"log_dir": None}, "no `log_dir`"),
        ({"expect_exact": -1.0}, "`expect_exact`"),
    ],
)
def test_options_that_differ_by_design_then_refused_by_name(given, named):
    RunConfig(**RUN, expect_exact=0.0)
    with pytest.raises(ValueError) as refused:
        RunConfig(**RUN | {"expect_exact": 0.0} | given)
    [text] = problems_of(refused.value)
    assert named in text


@pytest.mark.parametrize(
    "given, named",
    [
        ({"linear_logprobs": True}, "`linear_logprobs`"),
        ({"top_k": 8}, "`top_p`, `top_k` or `min_p`"),
    ],
)
def test_batch_invariance_with_other_sums_then_refused_by_name(given, named):
    RunConfig(**RUN, batch_invariant=True)
    with pytest.raises(ValueError) as refused:
        RunConfig(**RUN, batch_invariant=True, **given)
    assert any(named in text for text in problems_of(refused.value))


TOKEN = {
    "replica": 1,
    "sample": 3,
    "position": 9,
    "token": 5,
    "token_id": 42,
    "log_p_train": -1.5,
    "log_q_server": -1.25,
    "ulps": 2097152.0,
    "number_type": "float32",
    "server": "http://a:1",
    "weight_version": "7",
}


def test_message_then_the_token_and_the_ledgers_term():
    options = SimpleNamespace(expect_exact=0.0, urls=("http://a:1",))
    numbers = {"exact/tokens": 50.0, "exact/tokens_apart": 4.0, "exact/ulps_max": 9e6}
    text = message(options, 8, TOKEN, numbers)
    for part in (
        "in step 8 4 of 50 sampled tokens",
        "token 5 (id 42, position 9) of sample 3 of replica 1",
        "training has -1.5",
        "http://a:1 with weights 7 has -1.25",
        "--rollout-ledger-interval 1",
    ):
        assert part in text
    shares = {f"ledger/{name}/share": value for name, value in {"rest": 0.9, "decode": 0.1}.items()}
    shares |= {f"ledger/{name}/mean_abs": 1e-7 for name in ("rest", "decode")}
    ledger = {
        "ledger/tokens": 50.0,
        "ledger/noise": 1e-5,
        "ledger/mean_abs": 1e-7,
        "ledger/mean_square": 1e-14,
    }
    assert "Ledger: 90 % is rest" in message(options, 8, TOKEN, numbers | shares | ledger)


class Servers:
    """Of a push; each answers with its number type and release, as its /server_info; None: it is silent."""

    def __init__(self, release="1", **number_types):
        self.urls, self.loop, self.client = tuple(number_types), self, self
        self._types, self._release = number_types, release

    def control(self, urls):
        (url,) = urls
        return SimpleNamespace(server_info=lambda: self._info(url))

    async def _info(self, url):
        if self._types[url] is None:
            raise RolloutServerError(url, "/server_info", None, "no answer")
        return [{"type": self._types[url], "release": self._release}]

    call = staticmethod(asyncio.run)

    def engine_of(self, url):
        return SimpleNamespace(
            name="SGLang",
            version_support=lambda info: SimpleNamespace(version=info["release"]),
            dtype=lambda info: "bfloat16",
            logprob_type=lambda info: info["type"],
            batch_invariance_problem=lambda info: None,
        )


@pytest.fixture
def alone():
    """One process, whose broadcasts are its own."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def feature(tmp_path, alone, monkeypatch):
    """With a certificate that is begun with the servers alone."""
    made = ExactFeature(SimpleNamespace(expect_exact=0.0, log_dir=tmp_path))

    def begin():
        made._certificate = Certificate.begun(tmp_path, 0.0, 0, servers=made._servers)

    monkeypatch.setattr(made, "_begin_certificate", begin)
    return made


def pushed(**number_types):
    return SimpleNamespace(servers=Servers(**number_types))


def test_certificate_when_servers_join_or_come_later_then_it_names_them(feature, tmp_path):
    assert feature.after_push(pushed(), "0") == {}  # all have left
    feature.after_join(Servers(a="bfloat16"), "0")
    assert feature._dtype == torch.bfloat16
    feature.after_push(pushed(a="bfloat16", b="bfloat16"), "1")
    feature.after_join(Servers(c="bfloat16"), "1")
    feature.after_join(Servers(c="bfloat16"), "2")  # again
    feature._certificate.add(1, 0, NUMBERS)
    [part] = read_certificate(tmp_path / NAME)["parts"]
    assert [one["url"] for one in part["servers"]] == ["a", "b", "c"]


def test_certificate_when_a_server_is_started_again_as_another_release_then_it_names_both(feature, tmp_path):
    feature.after_push(pushed(a="bfloat16", b=None), "0")
    feature.after_push(pushed(a=None, b=None), "1")
    feature.after_push(pushed(release="2", a="bfloat16", b="bfloat16"), "2")
    feature._certificate.add(1, 0, NUMBERS)
    [part] = read_certificate(tmp_path / NAME)["parts"]
    assert [(one["url"], one["release"]) for one in part["servers"]] == [("a", "1"), ("a", "2"), ("b", "2")]


def test_servers_when_asked_after_a_push_then_all_at_once(feature):
    class Together(Servers):
        async def _info(self, url):
            self.met = getattr(self, "met", None) or asyncio.Barrier(2)
            async with asyncio.timeout(10):
                await self.met.wait()
            return await super()._info(url)

    feature.after_push(SimpleNamespace(servers=Together(a="bfloat16", b="bfloat16")), "0")
    assert [one["url"] for one in feature._servers] == ["a", "b"]


def test_server_that_joins_with_another_number_type_then_refused(feature):
    feature.after_push(pushed(a="bfloat16"), "0")
    with pytest.raises(StartupError, match="several number types .bfloat16 at a, float32 at b"):
        feature.after_join(Servers(b="float32"), "0")
    assert [one["url"] for one in feature._servers] == ["a"]


def test_feature_when_a_token_is_apart_then_stops_and_logs_no_key():
    feature = ExactFeature(SimpleNamespace(expect_exact=0.0))
    numbers = {"exact/tokens_apart": 1.0, FIRST: 12.0}
    assert feature.stops_update(numbers) and FIRST not in numbers
    assert not feature.stops_update({"exact/tokens_apart": 0.0, FIRST: math.nan})
    assert not feature.stops_update({})  # a later update of a batch
    assert ExactFeature.is_asked_for(SimpleNamespace(expect_exact=0.0))
    assert not ExactFeature.is_asked_for(SimpleNamespace(expect_exact=None))
