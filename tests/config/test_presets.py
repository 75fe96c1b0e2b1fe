"""What each preset does to one small batch, by hand: weights, and which tokens are kept."""

import math

import pytest
import torch

from megatron_rl_corr.config.correction import PRESETS
from megatron_rl_corr.core.correction import compute_correction

# Sequence A: D = 0.0004, -0.0002. Sequence B: rho = 0.4, 0.8, 6, around a hole. Sequence C: rho =
# 3. E: rho = 0.6.
#   product of rho        A 1.0002   B 1.92    C 3      E 0.6
#   geometric mean        A 1.0001   B 1.2429  C 3      E 0.6
#   mean of k3            A 1e-7     B 1.18    C 0.90   E 0.11
#   mean of e^|D|         A 1.0003   B 3.25    C 3      E 1.67
#   D^2                   A 0, 0     B 0.84, 0.05, 3.21   C 1.21   E 0.26
A1, A2 = math.exp(0.0004), math.exp(-0.0002)
D = [0.0004, -0.0002, math.log(0.4), 9.0, math.log(0.8), math.log(6.0), math.log(3.0), math.log(0.6)]
SEQ_IDS = torch.tensor([0, 0, 1, 1, 1, 1, 2, 3])
MASK = torch.tensor([True, True, True, False, True, True, True, True])
TOKEN = [A1, A2, 0.4, 0.0, 0.8, 6.0, 3.0, 0.6]
TOKEN_TIS = [A1, A2, 0.4, 0.0, 0.8, 2.0, 2.0, 0.6]
SEQ_TIS = [math.exp(0.0002)] * 2 + [1.92, 0.0, 1.92, 1.92, 2.0, 0.6]
GEOMETRIC = [math.exp(0.0001)] * 2 + [1.92 ** (1 / 3), 0.0, 1.92 ** (1 / 3), 1.92 ** (1 / 3), 3.0, 0.6]
ICEPOP = [A1, A2, 0.0, 0.0, 0.8, 0.0, 3.0, 0.6]
# w^2 e^(3 (1 - w)) of A and C, w^3 e^(2 (1 - w)) of B and E, whose advantages are negative.
GAMMA_B, GAMMA_E = 1.92**3 * math.exp(-1.84), 0.6**3 * math.exp(0.8)
GAMMA = [math.exp(0.0004) * math.exp(3 * (1 - math.exp(0.0002)))] * 2 + [
    GAMMA_B,
    0.0,
    GAMMA_B,
    GAMMA_B,
    9 * math.exp(-6),
    GAMMA_E,
]
SEQ_MEAN = (math.exp(0.0002) + 1.92 + 2.0 + 0.6) / 4  # of A, B, C and E, however long each is
ONES = MASK.float().tolist()
ALL, ONLY_A, A_B_E = "AABBBCE", "AA", "AABBBE"


def mean_one(weights: list[float]) -> list[float]:
    return [weight / (sum(weights) / 7) for weight in weights]


def above_2_masked(weights: list[float]) -> list[float]:
    return [weight if weight <= 2 else 0.0 for weight in weights]


EXPECTED = {
    "disabled": (ONES, ALL),
    "decoupled_token_is": (TOKEN_TIS, ALL),
    "decoupled_seq_is": (SEQ_TIS, ALL),
    "decoupled_token_icepop": (ICEPOP, ALL),  # a weight of 0 is no rejection
    "decoupled_seq_is_rs": (SEQ_TIS, A_B_E),
    "decoupled_geo_rs": (ONES, ONLY_A),
    "decoupled_geo_rs_seq_tis": (SEQ_TIS, ONLY_A),
    "decoupled_geo_rs_token_tis": (TOKEN_TIS, ONLY_A),
    "decoupled_k3_rs": (ONES, ONLY_A),
    "decoupled_k3_rs_seq_tis": (SEQ_TIS, ONLY_A),
    "decoupled_k3_rs_token_tis": (TOKEN_TIS, ONLY_A),
    "bypass_ppo_clip": (ONES, ALL),
    "bypass_ppo_clip_geo_rs": (ONES, ONLY_A),
    "bypass_ppo_clip_k3_rs": (ONES, ONLY_A),
    "bypass_pg_is": (SEQ_TIS, ALL),
    "bypass_pg_token_icepop": (ICEPOP, ALL),
    "bypass_pg_geo_rs": (ONES, ONLY_A),
    "bypass_pg_geo_rs_seq_tis": (SEQ_TIS, ONLY_A),
    "bypass_pg_geo_rs_token_tis": (TOKEN_TIS, ONLY_A),
    "ms_swift_token_truncate": (TOKEN_TIS, ALL),
    "ms_swift_token_mask": (above_2_masked(TOKEN), ALL),
    "ms_swift_sequence_truncate": ([min(weight, 2.0) for weight in GEOMETRIC], ALL),
    "ms_swift_sequence_mask": (above_2_masked(GEOMETRIC), ALL),
    "slime_tis": (TOKEN_TIS, ALL),
    "slime_icepop": (above_2_masked(TOKEN), ALL),
    "slime_mis": (mean_one(TOKEN_TIS), "AAbE"),  # b: the second token of B
    "slime_mis_sequence": ([weight / SEQ_MEAN for weight in SEQ_TIS], A_B_E),
    "slime_opsm": (ONES, "AABBBC"),  # E: mean(-D) = 0.51 and a negative advantage
    "slime_rollout_logprobs": (ONES, ALL),
    "nemo_rl_tis": (TOKEN_TIS, ALL),
    "nemo_rl_icepop": (ICEPOP, ALL),
    "nemo_rl_seq_mask_tis": (TOKEN, ONLY_A),
    "nemo_rl_seq_logprob_error": (ONES, ONLY_A),
    "prime_rl": (ONES, ALL),
    "vespo": (GAMMA, ALL),
    # the largest binary KL: 0.063 in B, where 0.018 became 0.11; 0.176 in C, 0.10 in E
    "trm": (ONES, ONLY_A),
    "dppo_binary_kl": (ONES, ALL),
    # A D > 0 in the first two of B, in C and in E, whose means of |rho - 1| are 1.93, 2 and 0.4.
    "vaco": (ONES, "AAB"),
    "sapo": (ONES, ALL),
    "dro": (ONES, ALL),
    "otb": (TOKEN_TIS, ALL),
    "m2po": (ONES, "AAb"),  # the mean of 0, 0, 0.05 is below 0.04; with E's 0.26 it is not
}


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_when_applied_to_a_batch_then_these_weights_and_tokens(preset):
    rollout = torch.tensor([-1.0, -2.0, -3.0, float("nan"), -1.0, -4.0, -2.0, -0.6])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 1.0, -1.0])
    correction = compute_correction(
        rollout + torch.tensor(D),
        rollout,
        MASK,
        SEQ_IDS,
        num_sequences=4,
        config=PRESETS[preset],
        advantages=advantages,
    )
    weights, kept = EXPECTED[preset]
    assert correction.weights.tolist() == pytest.approx(weights, rel=1e-5)
    tokens = ["A", "A", "B", "", "b", "B", "C", "E"]
    if "BBB" in kept:
        kept = kept.replace("BBB", "BbB")
    assert (
        "".join(token for token, keep in zip(tokens, correction.mask.tolist(), strict=True) if keep) == kept
    )


def test_presets_of_losses_when_taken_then_around_the_servers_policy_and_otb_is_a_baseline():
    assert {name: PRESETS[name].loss for name in ("sapo", "dro", "dppo_binary_kl")} == {
        "sapo": "sapo",
        "dro": "dro",
        "dppo_binary_kl": "dppo_kl",
    }
    assert PRESETS["sapo"].bypass_mode and PRESETS["dro"].bypass_mode and PRESETS["dro"].dro_beta == 0.05
    assert PRESETS["otb"].advantage_kind == "otb" and not PRESETS["otb"].bypass_mode


def test_prime_rl_then_its_advantage_is_not_divided_by_the_deviation():
    assert PRESETS["prime_rl"].advantage_kind == "group_mean"


def test_icepop_when_weights_are_the_documented_ones_then_the_documented_numbers():
    # Raw weights 0.4, 0.8, 6 with 0.5_5.0: 0, 0.8, 0; two of three out of bounds; ESS 1/3.
    log_ratio = torch.tensor([0.4, 0.8, 6.0]).log()
    correction = compute_correction(
        log_ratio - 3,
        torch.full((3,), -3.0),
        torch.ones(3),
        torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        config=PRESETS["decoupled_token_icepop"],
    )
    assert correction.weights.tolist() == pytest.approx([0, 0.8, 0])
    values = {name: metric.value() for name, metric in correction.metrics.items()}
    assert values["weight_out_of_bounds"] == pytest.approx(2 / 3)
    assert values["weight_std"] == pytest.approx(0.3771236)
    assert values["ess"] == pytest.approx(1 / 3)
