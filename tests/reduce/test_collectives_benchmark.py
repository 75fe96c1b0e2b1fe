"""benchmarks/collectives.py: counts on real ranks are those worked out by hand, and what it can't
explain ends it.
"""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.collectives import laws_of, seconds, totals
from benchmarks.exchanges import bytes_sent
from benchmarks.metric_exchanges import check_equal
from megatron_rl_corr.mcore.batch.collect_metrics import COUNTED
from megatron_rl_corr.rollout.failures import CAUSES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def printed() -> list[list[str]]:
    """The cells of every row of every table."""
    run = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "benchmarks/collectives.py",
            "--latency-us",
            "1",
            "--bandwidth-gb-s",
            "1",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [line.strip("| ").split(" | ") for line in run.stdout.splitlines() if line.startswith("| ")]


def test_step_when_counted_then_number_and_bytes_of_every_collective_are_those_by_hand(printed):
    laws = {(row[0], row[1], row[5]): row[2:5] for row in printed if len(row) == 6}
    # Four float32 of each token of this rank, in training, and in scoring where something needs
    # the whole batch.
    scored = "token weights, 1 rule; token weights, 4 rules; M2PO"
    in_the_loss = "token weights; GSPO, means over sequences; two policies, 1 rule"
    assert laws["tp", "log-probs of labels", scored] == ["all-gather", "2 M", "32 T/cp"]
    assert laws["tp", "log-probs of labels", in_the_loss] == ["all-gather", "M", "16 T/cp"]
    # Sums of one, D, and either log-prob in float64; and one a rule about sequences.
    assert laws["cp", "sums over sequences", "M2PO"] == ["all-reduce", "1", "32 S"]
    assert laws["cp", "sums over sequences", "token weights, 1 rule"] == ["all-reduce", "1", "40 S"]
    # Two means, and how many tokens are outside a seq_max rule.
    assert laws["cp", "sums over sequences", "token weights, 4 rules"] == ["all-reduce", "1", "56 S"]
    # Once for what is valid, once in the losses of all microbatches.
    in_two = "token weights; GSPO, means over sequences"
    assert laws["cp", "sums over sequences", in_two] == ["all-reduce", "1 + M", "64 S"]
    assert laws["cp", "sums over sequences", "two policies, 1 rule"] == ["all-reduce", "1 + M", "72 S"]
    assert laws["cp", "GSPO's ratios", "GSPO, means over sequences"] == ["all-reduce", "M", "16 S"]
    # Valid and kept tokens, and sequences, in float64; 2 x 4096 bins.
    assert laws["dp_cp", "counts of the batch", "all"] == ["all-reduce", "1", "24"]
    assert laws["dp_cp", "M2PO's histogram", "M2PO"] == ["all-reduce", "1", "65536"]
    # Five float64 a row; one for each count of how the samples came.
    for group in ("tp_cp", "pp"):
        rows = f"{8 * len(COUNTED)} + 40 S"
        assert laws[group, "counts and rows of the batch", "all"] == ["broadcast", "2", rows]
    # Three int32 and a float32 of each token of this rank, on the last stage.
    assert laws["world", "tokens of the batch", "all"] == ["receive", "1", "16 T/cp"]
    assert laws["tp", "tokens of the batch", "all"] == ["broadcast", "1", "16 T/cp"]
    # What is kept, what has a gradient, two KLs, the ESS of the sequences, whether a feature ends the run; of
    # the whole batch its ESS and the mean of the products.
    assert laws["pp", "may the step update", "all"] == ["broadcast", "1", "64"]
    # Once when the leaders have taken their groups, once when they have made batches of them: the first that
    # failed, whether all are done, whether one asks for a turn.
    assert laws["world", "did a replica fail", "all"] == ["all-reduce", "2", "48"]
    # Samples that ended, groups that were replaced, who knows why one failed, new names of
    # rewards, and the causes.
    assert laws["world", "samples that failed", "all"] == ["all-reduce", "1", str(8 * (4 + len(CAUSES)))]
    # Sums in one, extrema in the other.
    metrics = [law for (_, purpose, _), law in laws.items() if purpose == "metrics"]
    assert metrics and all(law[:2] == ["all-reduce", "2"] and int(law[2]) % 8 == 0 for law in metrics)


def test_counts_when_tokens_sequences_and_rules_grow_then_over_dp_cp_only_the_metrics_do(printed):
    rows = [row for row in printed if row[0] == "cp 2, dp 2" and len(row) == 12]
    assert [row[2:5] for row in rows[:5]] == [
        ["4", "64", "1"],
        ["4", "64", "4"],
        ["4", "256", "1"],
        ["16", "256", "1"],
        ["16", "1024", "4"],
    ]
    for row in rows:
        # 2 x 3/4 of 24 bytes, of P values, and of M2PO's histogram.
        m2po = row[1] == "M2PO"
        sent = 36 + 12 * int(row[5]) + 98304 * m2po
        assert row[8] == f"{3 + m2po}, {sent:,}"


def test_ways_when_compared_then_two_all_reduces_against_one_gather_and_a_collective_per_metric(printed):
    at_dp4 = {row[0]: row[4].split(", ") for row in printed if len(row) == 5}
    gather, two, many = (
        at_dp4[way] for way in ("one gather", "two all-reduces (this package)", "one all-reduce per metric")
    )
    assert gather[0] == "1" and two[0] == "2" and int(many[0]) > 90
    # 3 P values against 2 x 3/4 P.
    sent = [int("".join(cells[1:]).replace(",", "")) for cells in (gather, two, many)]
    assert sent[0] == 2 * sent[1] == 2 * sent[2]


def test_projection_when_made_then_the_formula_of_its_job(printed):
    [row] = [row for row in printed if row[:2] == ["tp 8, pp 8, cp 4, dp 64", "two policies, 1 rule"]]
    # 72 bytes of each of 16 sequences, in 17 all-reduces: 2 x 3/4 x 1152 B = 1728 B; trees of 4 hops of 1 us
    # and of 1152 B at 1 GB/s, 4 x (17 + 1.152) us, against rings of 17 x 6 us and 1.728 us.
    assert row[3] == "17, 1.7 kB, 0.07 ms"
    # tp: 7 x 16 x 16 x 8192 / 4 B = 3.67 MB, 3.67 ms; 16 x 7 us. And 16 bytes of each of these tokens,
    # 0.52 MB and 7 us.
    assert row[2] == "17, 4.2 MB, 4.31 ms"


def test_bytes_when_sent_in_a_ring_then_by_hand():
    # A gather sends every shard on but the last one; an all-reduce a quarter of 100 bytes six times.
    assert [bytes_sent(kind, 4, 100) for kind in ("all-gather", "all-reduce", "broadcast")] == [300, 150, 100]


def test_seconds_when_many_ranks_then_an_all_reduce_takes_the_tree():
    options = Namespace(latency_us=1.0, bandwidth_gb_s=1.0)
    # 1023 hops and 1023 kB; a tree of 2 x 10 hops of 1 us and 1000 B each.
    assert seconds("all-gather", 1024, 1, 1000, options) == pytest.approx(1023e-6 + 1023e-6)
    assert seconds("all-reduce", 1024, 1, 1000, options) == pytest.approx(20e-6 + 20e-6)


def test_exchange_when_nobody_knows_what_for_then_the_benchmark_ends():
    one = {"group": "cp", "kind": "all-reduce", "ranks": 2, "payload": 8, "caller": "something_new"}
    with pytest.raises(SystemExit, match="something_new exchanges something"):
        totals([one])


def test_bytes_when_not_linear_in_the_sizes_then_the_benchmark_ends():
    key = ("cp", "metrics", "all-gather")
    steps = [
        {"sequences": s, "length": length, "cp": cp, "microbatches": cp, "totals": {key: [1, s * s, 0.0]}}
        for s in (2, 4, 8)
        for length in (8, 32)
        for cp in (1, 2)
    ]
    with pytest.raises(SystemExit, match=r"\[4, 4, 4, 4, 16, .* is not linear"):
        laws_of(steps)
    for step in steps:
        step["totals"] = {key: [1, 5 + 3 * step["sequences"] * step["length"] // step["cp"], 0.0]}
    assert laws_of(steps) == {key: ([1, 0], [5, 0, 0, 3])}


def test_ways_when_they_differ_then_the_benchmark_ends():
    check_equal("another", {"a": float("nan"), "b": 1.0}, {"a": float("nan"), "b": 1.0})
    with pytest.raises(SystemExit, match=r"b: 1.0 by two all-reduces, 1.001 by another"):
        check_equal("another", {"b": 1.001}, {"b": 1.0})
