"""Every metric against its formula, worked out by hand on one small batch, and where little is measurable."""

import math

import pytest
import torch

from megatron_rl_corr.config.correction import PRESETS, RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.reduce.collectives import all_reduce_metrics
from megatron_rl_corr.reduce.metrics import EDGES, LABELS, LogRatioHistogram

NAN = float("nan")
LN2 = math.log(2)

# Sequence 0: pi_train 1/2, 1/4 against pi_rollout 1/4, 1/4; sequence 1: 1/5 against 4/5; sequence 2: empty.
# The fourth token is masked, the fifth has no rollout log-prob. D = ln 2, 0, -2 ln 2.
TRAIN = torch.tensor([0.5, 0.25, 0.2, NAN, 0.9]).log()
ROLLOUT = torch.tensor([0.25, 0.25, 0.8, 0.5, NAN]).log()
MASK = torch.tensor([True, True, True, False, True])
SEQ_IDS = torch.tensor([0, 0, 1, 1, 2])
CONFIG = RolloutCorrectionConfig(
    rollout_is="token", rollout_is_upper=1.5, rollout_rs=(RejectionRule("token", "k2", upper=0.5),)
)


def metrics_of(train, rollout, mask, seq_ids, *, num_sequences, config=CONFIG) -> dict[str, float]:
    correction = compute_correction(train, rollout, mask, seq_ids, num_sequences=num_sequences, config=config)
    return all_reduce_metrics(correction.metrics, None)


EXPECTED = (
    {
        "valid_tokens": 3,
        "nonfinite_tokens": 1,
        "padded_tokens": 1,
        # k2 = D^2 / 2 = 0.240, 0, 0.961: the third token is over 0.5.
        "kept_fraction": 2 / 4,  # of the mask's four tokens: the fourth has no finite log-prob
        "rejected_fraction/token_k2": 1 / 3,
        "kl": LN2 / 3,  # mean(-D) = (-1 + 0 + 2) ln 2 / 3
        # e^D - 1 - D = 2 - 1 - ln 2, 0, 1/4 - 1 + 2 ln 2, sum 1/4 + ln 2
        "k3_kl": (0.25 + LN2) / 3,
        "log_ratio_abs_mean": LN2,  # (1 + 0 + 2) ln 2 / 3
        "log_ratio_abs_max": 2 * LN2,
        "exact_fraction": 1 / 3,  # D = 0 of the second token
        "log_ratio_large_fraction": 1 / 3,  # |D| above ln 2: a ratio of 2 is not
        "token_mult_prob_error": (2 + 1 + 4) / 3,
        "chi2_token": (4 + 1 + 1 / 16) / 3 - 1,
        # Half of the tokens have |D| at most ln 2, all at most 2.
        "log_ratio_abs_p50": LN2,
        "log_ratio_abs_p99": 2,
        "log_ratio_abs_p999": 2,
        # rho = 2: [2 ln(4/3) + ln(2/3)] / 2; rho = 1: 0; rho = 1/4: [ln(0.5/1.25) / 4 + ln(2/1.25)] / 2
        "jsd": (math.log(32 / 27) + math.log(0.4) / 4 + math.log(1.6)) / 6,
        # pi_train - pi_rollout = 0.25, 0, -0.6
        "prob_diff_abs_mean": 0.85 / 3,
        "prob_diff_abs_max": 0.6,
        "prob_diff_std": math.sqrt(0.4225 / 3 - (0.35 / 3) ** 2),
        # x = .5, .25, .2 and y = .25, .25, .8; deviations .18333, -.06667, -.11667 and -.18333, -.18333,
        # .36667: cov -.0641667, variances .0516667 and .2016667 (all times 3)
        "pearson": -0.0641667 / math.sqrt(0.0516667 * 0.2016667),
        # w = min(rho, 1.5) = 1.5, 1, 0.25
        "weight_mean": 2.75 / 3,
        "weight_std": math.sqrt(3.3125 / 3 - (2.75 / 3) ** 2),
        "weight_max": 1.5,
        "weight_min": 0.25,
        "ess": 2.75**2 / (3 * 3.3125),
        "weight_out_of_bounds": 1 / 3,  # rho = 2
        "sequences": 2,
        "kept_sequence_fraction": 1,  # no rule took a whole sequence
        "training_ppl": (math.sqrt(8) + 5) / 2,  # (1/2 * 1/4)^(-1/2) and 5
        "rollout_ppl": (4 + 1.25) / 2,
        "training_log_ppl": (1.5 * LN2 + math.log(5)) / 2,
        "rollout_log_ppl": (2 * LN2 + math.log(1.25)) / 2,
        # mean(-D) of a sequence: -ln 2 / 2 and 2 ln 2
        "log_ppl_diff": (-LN2 / 2 + 2 * LN2) / 2,
        "log_ppl_diff_abs": (LN2 / 2 + 2 * LN2) / 2,
        "log_ppl_diff_max": 2 * LN2,
        "log_ppl_diff_min": -LN2 / 2,
        "ppl_ratio": (1 / math.sqrt(2) + 4) / 2,
        "chi2_seq": (4 + 1 / 16) / 2 - 1,  # products 2 and 1/4
        "ess_sequences": (2 + 1 / 4) ** 2
        / (2 * (4 + 1 / 16)),  # of the products, whatever the token weights are
        "chi2_geo": (2 + 1 / 16) / 2 - 1,  # geometric means sqrt 2 and 1/4
        # Every pi_rollout is above 0.1.
        "by_prob/above_1e-1/tokens": 3,
        "by_prob/above_1e-1/kl": LN2 / 3,
        "by_prob/above_1e-1/k3_kl": (0.25 + LN2) / 3,
        "by_prob/above_1e-1/log_ratio_abs_mean": LN2,
    }
    | {
        f"by_prob/{band}/{name}": 0 if name == "tokens" else NAN
        for band in ("below_1e-4", "1e-4_to_1e-3", "1e-3_to_1e-2", "1e-2_to_1e-1")
        for name in ("tokens", "kl", "k3_kl", "log_ratio_abs_mean")
    }
    | {
        # |D| = ln 2, 0, 2 ln 2
        f"log_ratio_abs_bin/{label}": (label in ("upto_0.693", "upto_1e-06", "upto_2")) / 3
        for label in LABELS
    }
)
CLAMPED = {
    "kl",
    "k3_kl",
    "chi2_token",
    "jsd",
    "token_mult_prob_error",
    "log_ratio_abs_mean",
    "log_ppl_diff",
    "log_ppl_diff_abs",
    "training_log_ppl",
    "rollout_log_ppl",
    "training_ppl",
    "rollout_ppl",
    "ppl_ratio",
    "chi2_geo",
    "chi2_seq",
}
"""The means that a single token could run away with: each has its clamped variant, and nothing
here is beyond one.
"""
EXPECTED |= {f"{name}_clamped": value for name, value in EXPECTED.items() if name.split("/")[-1] in CLAMPED}


def test_metrics_when_worked_out_by_hand_then_all_equal():
    metrics = metrics_of(TRAIN, ROLLOUT, MASK, SEQ_IDS, num_sequences=3)
    assert metrics == pytest.approx(EXPECTED, rel=1e-5, nan_ok=True)


def test_metrics_when_the_policies_agree_then_their_neutral_values():
    logprobs = torch.tensor([0.5, 0.25, 0.8]).log()
    metrics = metrics_of(logprobs, logprobs, MASK[:3], SEQ_IDS[:3], num_sequences=2)
    for name in (
        "kl",
        "k3_kl",
        "log_ratio_abs_mean",
        "log_ratio_abs_max",
        "chi2_token",
        "weight_std",
        "log_ppl_diff",
        "weight_out_of_bounds",
        "nonfinite_tokens",
    ):
        assert metrics[name] == 0, name
    for name in ("exact_fraction", "ess_sequences"):
        assert metrics[name] == 1, name
    for name in ("ess", "weight_mean", "weight_min", "weight_max", "kept_fraction", "kept_sequence_fraction"):
        assert metrics[name] == 1, name
    assert metrics["pearson"] == pytest.approx(1, abs=1e-12)
    assert metrics["training_ppl"] == metrics["rollout_ppl"]


def test_weight_metrics_when_weights_are_those_of_icepop_then_the_published_numbers():
    # Raw weights 0.4, 0.8, 6.0 with bounds 0.5_5.0 become 0, 0.8, 0.
    config = PRESETS["decoupled_token_icepop"]
    metrics = metrics_of(
        torch.tensor([0.4, 0.8, 6.0]).log(),
        torch.zeros(3),
        torch.ones(3),
        torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        config=config,
    )
    assert metrics["weight_out_of_bounds"] == pytest.approx(2 / 3)
    assert metrics["weight_std"] == pytest.approx(0.3771236, abs=1e-6)
    assert metrics["ess"] == pytest.approx(1 / 3)
    assert metrics["weight_min"] == 0 and metrics["kept_fraction"] == 1
    # D = -0.5, -1, -0.2: 0.6065307, 0 (0.368 is below 0.5), 0.8187308.
    metrics = metrics_of(
        torch.tensor([-0.5, -1.0, -0.2]),
        torch.zeros(3),
        torch.ones(3),
        torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        config=config,
    )
    assert metrics["weight_out_of_bounds"] == pytest.approx(1 / 3)
    assert metrics["weight_mean"] == pytest.approx((0.6065307 + 0.8187308) / 3, rel=1e-6)


def test_metrics_when_one_token_is_an_outlier_then_finite_and_its_size_is_told():
    # D = 0, 15: k3 = e^15 - 16 = 3269001.37, half of it in the mean; the truncated weight is 2.
    def outlier(d: float) -> dict[str, float]:
        train = torch.tensor([-1.0, -2.0])
        return metrics_of(
            train,
            train - torch.tensor([0.0, d]),
            torch.ones(2),
            torch.zeros(2, dtype=torch.int64),
            num_sequences=1,
            config=PRESETS["decoupled_token_is"],
        )

    metrics = outlier(15)
    assert metrics["k3_kl"] == pytest.approx(3269001.37 / 2, rel=1e-6)
    assert metrics["kl"] == -7.5 and metrics["log_ratio_abs_max"] == 15
    # Clamped where k3 is 10, at e^D = 11 + D, D = 2.610869: that is all that the token may add.
    assert metrics["k3_kl_clamped"] == pytest.approx(10 / 2, rel=1e-8)
    assert metrics["kl_clamped"] == pytest.approx(-2.610869 / 2, rel=1e-6)
    assert metrics["chi2_token_clamped"] == pytest.approx((1 + 13.610869**2) / 2 - 1, rel=1e-6)
    assert metrics["token_mult_prob_error"] == pytest.approx((1 + math.exp(15)) / 2)
    assert metrics["weight_mean"] == 1.5 and metrics["weight_out_of_bounds"] == 0.5
    # From below k3 is 10 where D = e^D - 11.
    metrics = outlier(-15)
    assert metrics["k3_kl_clamped"] == pytest.approx(10 / 2, rel=1e-8)
    assert metrics["k3_kl"] == pytest.approx(14 / 2, rel=1e-6)
    assert metrics["kl_clamped"] == pytest.approx((11 - math.exp(-11)) / 2, rel=1e-8)
    # D = 0, 200: exponentials stop at 20, the size does not.
    metrics = outlier(200)
    assert all(math.isfinite(value) for name, value in metrics.items() if not name.startswith("by_prob/"))
    assert metrics["k3_kl"] == pytest.approx((math.exp(20) - 21) / 2, rel=1e-6)
    assert metrics["token_mult_prob_error"] == pytest.approx((1 + math.exp(20)) / 2)
    assert metrics["log_ratio_abs_max"] == 200 and metrics["weight_max"] == 2


def test_clamped_metrics_when_one_token_is_extreme_then_they_hardly_move():
    # 1000 sequences of one token of D = 0.01, of which one is replaced by D = 100, -100 or a
    # log-prob of -1e4.
    rollout = torch.full((1000,), -1.0)
    ids = torch.arange(1000)

    def measured(train: float, rollout_too: float = -1.0) -> dict[str, float]:
        both = [side.clone() for side in (rollout + 0.01, rollout)]
        both[0][7], both[1][7] = train, rollout_too
        return metrics_of(
            *both, torch.ones(1000), ids, num_sequences=1000, config=PRESETS["decoupled_token_is"]
        )

    usual = measured(-0.99)
    for train, other in ((-101.0, -1.0), (-1.0, -101.0), (-1e4, -1.0), (-1.0, -1e4), (-1e4, -1e4)):
        extreme = measured(train, other)
        assert all(
            math.isfinite(v) for n, v in extreme.items() if not n.startswith("by_prob/") and n != "pearson"
        )
        for name in CLAMPED:
            # k3 = 10 of one in a thousand is 0.01; rho = 13.6 has a square of 185; a
            # perplexity of 100 is 0.1.
            moved = abs(extreme[f"{name}_clamped"] - usual[f"{name}_clamped"])
            assert moved < (0.19 if "chi2" in name else 0.1), name
            assert usual[f"{name}_clamped"] == pytest.approx(usual[name], rel=1e-9, abs=1e-12)
    # D = 100 among 999 of 0.01; e^20 = 4.85e8.
    extreme = measured(-1.0, -101.0)
    assert extreme["kl"] == pytest.approx(-0.10999, rel=1e-5)
    assert extreme["k3_kl"] == pytest.approx((math.exp(20) - 101 + 999 * 5.0167e-5) / 1000, rel=1e-9)
    assert extreme["jsd"] > 1e5 and extreme["chi2_token"] > 1e14 and extreme["chi2_seq"] > 1e14
    assert extreme["jsd_clamped"] < 0.005 < extreme["token_mult_prob_error_clamped"] - 1 < 0.03
    assert extreme["rollout_ppl"] > 1e14 and extreme["rollout_ppl_clamped"] == pytest.approx(
        (999 * math.e + 100) / 1000, rel=1e-6
    )


def test_sequence_metrics_when_one_side_is_absurd_then_their_bounds():
    # D = 999 or -999: perplexities and squares of ratios stop at e^40, their ratio at e^20.
    absurd, usual, ids = torch.tensor([-1000.0]), torch.tensor([-1.0]), torch.zeros(1, dtype=torch.int64)
    most, names = math.exp(40), ("training_ppl", "rollout_ppl", "ppl_ratio", "chi2_seq", "chi2_geo")
    metrics = metrics_of(absurd, usual, torch.ones(1), ids, num_sequences=1)
    assert [metrics[name] for name in names] == pytest.approx([most, math.e, math.exp(20), -1, -1])
    metrics = metrics_of(usual, absurd, torch.ones(1), ids, num_sequences=1)
    assert [metrics[name] for name in names] == pytest.approx([math.e, most, math.exp(-20), most, most])


def test_metrics_when_published_log_ratios_then_the_published_numbers():
    # rollout -1 against train 0, -15, -30: k1 = -1, 14, 29; k3 = e - 2, 13, 28.
    train = torch.tensor([0.0, -15.0, -30.0])
    metrics = metrics_of(train, torch.full((3,), -1.0), torch.ones(3), torch.arange(3), num_sequences=3)
    assert metrics["kl"] == 42 / 3
    assert metrics["k3_kl"] == pytest.approx((math.e - 2 + 13 + 28) / 3, rel=1e-6)


def test_histogram_when_sizes_are_on_the_ends_of_bins_then_in_the_bin_below():
    # 0, every end, and the next float32 above each: two tokens in each bin but the last, which has one.
    ends = torch.tensor(EDGES)
    above = torch.nextafter(ends, torch.tensor(math.inf))
    sizes = torch.cat([torch.zeros(1), ends, above])
    signs = torch.tensor([1.0, -1.0]).repeat(len(sizes))[: len(sizes)]
    mask = torch.ones(len(sizes) + 2)
    mask[-2] = 0  # a hole; the last has no log-prob
    train = torch.cat([sizes * signs, torch.tensor([3.0, NAN])])
    metrics = metrics_of(
        train, torch.zeros(len(train)), mask, torch.zeros(len(train)).long(), num_sequences=1
    )
    shares = [metrics[f"log_ratio_abs_bin/{label}"] for label in LABELS]
    assert shares == pytest.approx([2 / len(sizes)] * (len(LABELS) - 1) + [1 / len(sizes)])
    # Seven ends are above ln 2 (1, 2, 5, ..., 100), and eight tokens just above an end.
    assert EDGES.index(LN2) == 18 and metrics["log_ratio_large_fraction"] == pytest.approx(15 / 53)


def test_percentiles_when_tokens_are_few_or_many_then_the_end_of_the_bin_that_they_fall_in():
    def of(*log_ratios: float) -> list[float]:
        train = torch.tensor(log_ratios)
        metrics = metrics_of(
            train,
            torch.zeros(len(train)),
            torch.ones(len(train)),
            torch.zeros(len(train)).long(),
            num_sequences=1,
        )
        return [metrics[f"log_ratio_abs_{name}"] for name in ("p50", "p99", "p999")]

    assert of(0.0015) == [0.002] * 3
    # As one number it is the median: bins 0 to 3 have 1, 2, 0 and 1 tokens, and the second of four is in 1.
    counts = [1.0, 0.0, 2.0, 0.0, 1.0] + [0.0] * (len(EDGES) - 3)
    assert LogRatioHistogram(torch.tensor(counts, dtype=torch.float64)).value() == EDGES[1]
    # Half are at most 0.0015, the rest 0.3; of a thousand 0.0015 the one of 30 is beyond p999.
    assert of(0.0015, -0.3) == [0.002, 0.5, 0.5]
    assert of(*[0.0015] * 999, 30.0) == [0.002] * 3
    assert of(*[0.0015] * 998, 30.0, -30.0) == [0.002, 0.002, 50.0]
    # Beyond the last end there is no other to tell.
    assert of(200.0) == [100.0] * 3


def test_metrics_by_probability_when_each_band_has_its_tokens_then_each_its_own():
    # pi_rollout, and pi_train as a multiple of it; a bound belongs to the band above it.
    tokens = [(5e-5, 2.0), (1e-4, 0.5), (5e-4, 1.0), (5e-3, 4.0), (0.05, 1.0), (0.1, 0.5), (0.5, 1.0)]
    rollout = torch.tensor([p for p, _ in tokens] + [0.9, NAN]).log()
    train = torch.tensor([p * rho for p, rho in tokens] + [1.0, 0.5]).log()
    mask = torch.tensor([1] * 7 + [0, 1])
    metrics = metrics_of(train, rollout, mask, torch.zeros(9, dtype=torch.int64), num_sequences=1)
    expected = {
        # k3 of rho 2, 1/2, 4 is 1 - ln 2, ln 2 - 1/2, 3 - 2 ln 2.
        "below_1e-4": (1, -LN2, 1 - LN2, LN2),
        "1e-4_to_1e-3": (2, LN2 / 2, (LN2 - 0.5) / 2, LN2 / 2),
        "1e-3_to_1e-2": (1, -2 * LN2, 3 - 2 * LN2, 2 * LN2),
        "1e-2_to_1e-1": (1, 0, 0, 0),
        "above_1e-1": (2, LN2 / 2, (LN2 - 0.5) / 2, LN2 / 2),
    }
    for band, values in expected.items():
        found = [
            metrics[f"by_prob/{band}/{name}"] for name in ("tokens", "kl", "k3_kl", "log_ratio_abs_mean")
        ]
        assert found == pytest.approx(values, rel=1e-5, abs=1e-6), band


def test_chi2_when_a_product_leaves_all_bounds_then_it_is_clamped_and_the_geometric_one_is_not():
    # 30 tokens of D = 1 and one sequence of D = -0.5: products e^30, clamped to e^20, and e^-0.5.
    rollout = torch.full((31,), -2.0)
    train = rollout + torch.tensor([1.0] * 30 + [-0.5])
    seq_ids = torch.tensor([0] * 30 + [1])
    metrics = metrics_of(train, rollout, torch.ones(31), seq_ids, num_sequences=2)
    assert metrics["chi2_seq"] == pytest.approx((math.exp(40) + math.exp(-1)) / 2 - 1, rel=1e-9)
    assert metrics["chi2_geo"] == pytest.approx((math.exp(2) + math.exp(-1)) / 2 - 1, rel=1e-9)


def test_weight_std_when_the_spread_is_small_then_it_is_not_rounding():
    # 1000 weights of e^0.0001 have no spread; a float32 square of one is off by 6e-8, and its root is 2e-4.
    ids = torch.zeros(1000, dtype=torch.int64)
    config = PRESETS["decoupled_token_is"]
    rollout = torch.full((1000,), -1.0)
    metrics = metrics_of(rollout + 1e-4, rollout, torch.ones(1000), ids, num_sequences=1, config=config)
    assert metrics["weight_std"] < 1e-7
    # Half of them e^0.0001, half e^-0.0001: a spread of 1e-4, a chi-square of E[e^2D] - 1 = 2e-8.
    train = rollout + torch.tensor([1e-4, -1e-4]).repeat(500)
    metrics = metrics_of(train, rollout, torch.ones(1000), ids, num_sequences=1, config=config)
    assert metrics["weight_std"] == pytest.approx(1e-4, rel=1e-2)
    drift = (train - rollout).double()
    assert metrics["chi2_token"] == pytest.approx((2 * drift).exp().mean().item() - 1, abs=1e-12)


def test_pearson_when_probabilities_do_not_vary_then_there_is_none():
    ids, ones = torch.zeros(7, dtype=torch.int64), torch.ones(7)
    # Seven times 0.9: mean of squares less square of the mean is 1e-16, not 0.
    same = torch.full((7,), 0.9).log()
    assert math.isnan(metrics_of(same, same, ones, ids, num_sequences=1)["pearson"])
    varied = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]).log()
    assert math.isnan(metrics_of(same, varied, ones, ids, num_sequences=1)["pearson"])
    assert math.isnan(metrics_of(varied, same, ones, ids, num_sequences=1)["pearson"])


def test_sequence_metrics_when_another_rank_owns_the_sequences_then_nothing_is_counted_twice():
    class SecondRank:
        cp_rank = 1

        def all_reduce_cp(self, sums):
            return sums

        def all_reduce_dp_cp(self, totals):
            return totals

    correction = compute_correction(
        torch.tensor([-1000.0, -1.0]),
        torch.tensor([-1000.0, -1.0]),
        torch.ones(2),
        torch.tensor([0, 1]),
        num_sequences=2,
        config=CONFIG,
        groups=SecondRank(),
    )
    for name in ("sequences", "kept_sequence_fraction", "training_ppl", "rollout_ppl", "log_ppl_diff"):
        assert correction.metrics[name].values.count_nonzero() == 0, name


@pytest.mark.parametrize("config", [PRESETS["decoupled_token_is"], CONFIG, PRESETS["disabled"]])
@pytest.mark.parametrize("tokens, sequences", [(0, 0), (0, 2), (4, 2)])
def test_metrics_when_there_is_nothing_valid_then_the_same_names_and_no_number(config, tokens, sequences):
    metrics = metrics_of(
        torch.full((tokens,), NAN),
        torch.full((tokens,), NAN),
        torch.zeros(tokens),
        torch.zeros(tokens, dtype=torch.int64),
        num_sequences=sequences,
        config=config,
    )
    some = metrics_of(TRAIN, ROLLOUT, MASK, SEQ_IDS, num_sequences=3, config=config)
    # Ranks pack their metrics by name: one without tokens must not lack any.
    assert metrics.keys() == some.keys()
    counts = {"valid_tokens", "nonfinite_tokens", "sequences"}
    counts |= {name for name in metrics if name.startswith("by_prob/") and name.endswith("/tokens")}
    assert metrics.pop("padded_tokens") == tokens
    assert {name for name, value in metrics.items() if value == 0} == counts
    assert all(math.isnan(value) for name, value in metrics.items() if name not in counts)


def test_ess_of_sequences_when_products_leave_all_bounds_then_clamped_and_no_digit_is_lost():
    # sum D = -18 and -19 of ten tokens each: (e^-18 + e^-19)^2 / (2 (e^-36 + e^-38)).
    rollout = torch.full((20,), -2.0)
    train = rollout - torch.tensor([1.8, 1.9]).repeat_interleave(10)
    seq_ids = torch.arange(2).repeat_interleave(10)
    metrics = metrics_of(train, rollout, torch.ones(20), seq_ids, num_sequences=2)
    assert metrics["ess_sequences"] == pytest.approx(
        (1 + math.exp(-1)) ** 2 / (2 * (1 + math.exp(-2))), rel=1e-5
    )
    # -180 and -190: (1 + e^-10)^2 / (2 (1 + e^-20)) = 0.50005. Long responses that all lie far
    # off are not equal.
    far = rollout + 10 * (train - rollout)
    metrics = metrics_of(far, rollout, torch.ones(20), seq_ids, num_sequences=2)
    assert metrics["ess_sequences"] == pytest.approx(
        (1 + math.exp(-10)) ** 2 / (2 * (1 + math.exp(-20))), rel=1e-3
    )
    # -360 and -380 are both -340: equal weights. One of e^300 beside e^-300 is alone: 1 / n.
    metrics = metrics_of(rollout + 20 * (train - rollout), rollout, torch.ones(20), seq_ids, num_sequences=2)
    assert metrics["ess_sequences"] == 1
    train = torch.where(seq_ids == 0, rollout + 30, rollout - 30)
    assert metrics_of(train, rollout, torch.ones(20), seq_ids, num_sequences=2)[
        "ess_sequences"
    ] == pytest.approx(0.5)
