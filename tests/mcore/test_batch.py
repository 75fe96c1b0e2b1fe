"""Samples as rows of tensors, by hand: position t predicts token t + 1."""

from pathlib import Path

import pytest
import torch

from tests.megatron_forks import run_megatron

HERE = Path(__file__).resolve().parent
NAN = float("nan")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict:
    """What batch_worker.py saved: it imports Megatron, which this process must not."""
    path = tmp_path_factory.mktemp("batch") / "batch.pt"
    done = run_megatron(HERE / "batch_worker.py", path)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(path) | {"two ranks": [torch.load(f"{path}.{rank}") for rank in range(2)]}


# Rows of 5: a prompt of 3 and 2 sampled tokens; one aborted at once; one that fills the row; a short one.
TOKENS = [[11, 12, 13, 21, 0], [0, 0, 0, 0, 0], [15, 16, 31, 32, 33], [17, 18, 0, 0, 0]]
LABELS = [[12, 13, 21, 22, 0], [0, 0, 0, 0, 0], [16, 31, 32, 33, 34], [18, 41, 0, 0, 0]]
MASK = [[0, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1], [0, 1, 0, 0, 0]]
LOGPROBS = [[0, 0, -0.1, NAN, 0], [0, 0, 0, 0, 0], [0, -0.3, -0.4, -0.5, -0.6], [0, -0.7, 0, 0, 0]]


@pytest.mark.parametrize("which", ["batch", "broadcast"])
def test_rows_when_made_and_when_broadcast_then_each_label_is_the_next_token(made, which):
    batch = made[which]
    assert batch["tokens"].tolist() == TOKENS and batch["labels"].tolist() == LABELS
    assert batch["loss_mask"].int().tolist() == MASK and batch["loss_mask"].dtype == torch.bool
    for row, expected in zip(batch["rollout_logprobs"].tolist(), LOGPROBS, strict=True):
        assert row == pytest.approx(expected, nan_ok=True)
    assert batch["rewards"].tolist() == [1.0, 5.0, 2.0, 4.0]
    assert batch["group_ids"].tolist() == [0, 0, 1, 1]
    # Version 7 trains; the third row's first token is of version 5, although its later ones are of 6.
    assert batch["version_lags"].tolist() == [0, 0, 2, 3]
    assert batch["token_lags"].tolist() == [[0] * 5, [0] * 5, [0, 2, 1, 1, 1], [0, 3, 0, 0, 0]]


def test_labels_when_in_the_mask_then_the_sampled_tokens_in_order(made):
    batch = made["batch"]
    assert batch["labels"][batch["loss_mask"]].tolist() == [21, 22, 31, 32, 33, 34, 41]
    assert made["seq_ids"].tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5


def test_sample_when_longer_than_the_row_then_refused_with_the_length_that_fits(made):
    # 3 + 3 tokens fit in 5, the last is a label only.
    assert made["fits"] == "accepted"
    assert made["too long"] == (
        "--seq-length 5 is too short for a sample of 7 tokens (3 of them prompt); "
        "use --seq-length 6 or more, or a smaller --rollout-max-new-tokens"
    )


def test_microbatches_when_cut_then_rows_and_their_targets_stay_together(made):
    first, second = made["microbatches"]
    assert first["tokens"].tolist() == TOKENS[:2] and second["tokens"].tolist() == TOKENS[2:]
    assert first["labels"].tolist() == LABELS[:2] and second["labels"].tolist() == LABELS[2:]
    assert second["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    # Tokens are numbered through: the second microbatch begins at 10.
    assert second["old_logprobs"].tolist() == list(range(10, 20))
    assert second["advantages"].tolist() == list(range(110, 120))
    assert second["mask"].int().tolist() == MASK[2] + MASK[3]
    # The denominator is the whole batch's: 7 tokens (the log-probs that are compared here are all finite).
    assert first["valid_tokens"].item() == second["valid_tokens"].item() == 7
    assert made["without targets"] == [None] * 4


def test_targets_when_a_row_is_rejected_then_it_leaves_its_groups_baseline(made):
    # Group 0 has a rejected row and one without tokens: no baseline, advantage 0. Group 1:
    # rewards 2, 4, mean 3.
    assert made["targets"]["advantages"].tolist() == [0.0] * 10 + [-1.0] * 5 + [1.0] * 5
    assert made["targets"]["mask"].int().tolist() == [0] * 10 + MASK[2] + MASK[3]


def test_metrics_when_of_a_batch_then_by_hand(made):
    metrics = made["targets"]["metrics"]
    expected = {
        "reward/mean": 3.0,
        "reward/std": 2.5**0.5,
        "reward/max": 5.0,
        "reward/min": 1.0,  # 1, 5, 2, 4
        "response_length/mean": 7 / 4,
        "weight_lag": 3.0,
        "weight_lag_mean": 5 / 4,
        # Entropy is the position's number: valid ones are 2, 11, 12, 13, 14, 16 (3 has no log-prob).
        "loss/entropy": 68 / 6,
        "rollout_corr/valid_tokens": 6,
        "rollout_corr/nonfinite_tokens": 1,
        "rollout_corr/sequences": 3,
        "rollout_corr/kept_sequence_fraction": 2 / 3,
        "rollout_corr/kept_fraction": 5 / 7,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


# Prompts of 2 and 1 tokens; the environment said 91, then 92 93 and 94.
TURN_LABELS = [[12, 21, 22, 91, 23, 0, 0, 0], [31, 92, 93, 32, 94, 33, 0, 0], [41] + [0] * 7, [51] + [0] * 7]
TURN_MASK = [[0, 1, 1, 0, 1, 0, 0, 0], [1, 0, 0, 1, 0, 1, 0, 0], [1] + [0] * 7, [1] + [0] * 7]
TURN_IDS = [[0, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 2, 0, 0], [0] * 8, [0] * 8]


COLUMNS = [[0, 1, 6, 7], [2, 3, 4, 5]]
"""Of four chunks of two columns the first of two context-parallel ranks has the first and the last."""


def whole(made, name):
    """[4, 8] of the two ranks' columns; name: of the result, or of its batch."""
    rows = torch.empty(4, 8, dtype=torch.float64)
    for columns, rank in zip(COLUMNS, made["two ranks"], strict=True):
        rows[:, columns] = (rank | rank["batch"])[name].double()
    return rows


def test_rows_when_an_environment_spoke_then_its_tokens_are_outside_the_mask_and_turns_are_told(made):
    batch = made["turns"]["batch"]
    assert batch["labels"].tolist() == TURN_LABELS and batch["loss_mask"].int().tolist() == TURN_MASK
    assert batch["turn_ids"].tolist() == TURN_IDS and batch["num_turns"] == 3
    expected = torch.tensor([[0, -0.1, -0.2, 0, -0.3, 0, 0, 0], [-0.4, 0, 0, -0.5, 0, -0.6, 0, 0]])
    torch.testing.assert_close(batch["rollout_logprobs"][:2], expected)
    assert made["batch"]["turn_ids"] is None and made["broadcast"]["turn_ids"] is None


def test_turn_ids_when_broadcast_to_two_context_parallel_ranks_then_each_has_those_of_its_columns(made):
    assert [rank["batch"]["positions"].tolist() for rank in made["two ranks"]] == [
        [own] * 4 for own in COLUMNS
    ]
    assert whole(made, "turn_ids").tolist() == TURN_IDS and whole(made, "loss_mask").tolist() == TURN_MASK
    assert [rank["batch"]["num_turns"] for rank in made["two ranks"]] == [3, 3]


def test_turn_correction_when_through_a_batch_then_each_turn_is_judged_by_its_own_sampled_tokens(made):
    # Row 0: turn 0 has D = 0.1, -0.35 (product e^-0.25, geometric mean e^-0.125), turn 1 has 0.5: e^0.5
    # = 1.6487 is cut at 1.5. Row 1: turns of 0.2, -0.4 (e^-0.4 = 0.67 < 0.7: goes) and 0.9 (e^0.9 =
    # 2.46 > 1.7: goes).
    weights, mask, metrics = (made["turns"][name] for name in ("weights", "mask", "metrics"))
    assert mask.int().tolist() == [TURN_MASK[0], [1] + [0] * 7, [1] + [0] * 7, [1] + [0] * 7]
    expected = [0.7788008, 0.7788008, 1.5, 1.2214028, 1.0, 1.0]
    assert weights[mask].tolist() == pytest.approx(expected, rel=1e-5)
    expected = {
        "rollout_corr/valid_tokens": 8,
        "rollout_corr/nonfinite_tokens": 0,
        "response_length/mean": 8 / 4,
        "rollout_corr/kept_fraction": 6 / 8,
        "rollout_corr/rejected_fraction/turn_mean_ratio": 2 / 8,
        "rollout_corr/by_turn/first/tokens": 5,
        "rollout_corr/by_turn/first/kl": (-0.1 + 0.35 - 0.2) / 5,
        "rollout_corr/by_turn/later/tokens": 3,
        "rollout_corr/by_turn/later/kl": (-0.5 + 0.4 - 0.9) / 3,
    }
    assert {name: metrics.get(name) for name in expected} == pytest.approx(expected, rel=1e-5)


def test_turn_correction_when_a_turn_lies_on_two_ranks_then_as_on_one(made):
    # Turn 0 of row 0 has a token on each.
    torch.testing.assert_close(whole(made, "weights"), made["turns"]["weights"].double(), rtol=1e-6, atol=0)
    assert whole(made, "mask").tolist() == made["turns"]["mask"].tolist()
    for rank in made["two ranks"]:
        assert rank["metrics"] == pytest.approx(made["turns"]["metrics"], rel=1e-6, nan_ok=True)


# How many ids each position's label was drawn from, by row: prompts and what is behind the end have none, a
# token of the environment has itself; the last row was aborted before its first token.
SIZES = [[0, 2, 1, 1, 3, 0, 0, 0], [1, 1, 1, 2, 1, 1, 0, 0], [4] + [0] * 7, [1] + [0] * 7, [0] * 8]
IDS = [21, 5, 22, 91, 7, 23, 1, 31, 92, 93, 32, 2, 94, 33, 41, 40, 42, 43, 51]
TWO_RANKS = [
    ([[row[column] for column in COLUMNS[0]] for row in SIZES], [21, 5, 31, 92, 41, 40, 42, 43, 51]),
    ([[row[column] for column in COLUMNS[1]] for row in SIZES], [22, 91, 7, 23, 1, 93, 32, 2, 94, 33]),
]


def test_supports_when_cut_for_context_parallel_ranks_then_each_has_those_of_its_columns(made):
    assert made["cut"][1] == [(SIZES, IDS)] and made["cut"][2] == TWO_RANKS
    # Of eight chunks of a column rank r of four has columns r and 7 - r.
    assert [ids for _, ids in made["cut"][4]] == [
        [31, 41, 40, 42, 43, 51],
        [21, 5, 92],
        [22, 93, 33],
        [91, 7, 23, 1, 32, 2, 94],
    ]
    assert [sizes[0] for sizes, _ in made["cut"][4]] == [[0, 0], [2, 0], [1, 0], [1, 3]]


@pytest.mark.parametrize(("name", "rows"), [("all", slice(0, 5)), ("last", slice(3, 5))])
def test_supports_when_scattered_to_two_ranks_then_as_cut_also_where_one_has_none(made, name, rows):
    for rank, (sizes, ids) in zip(made["two ranks"], TWO_RANKS, strict=True):
        found, own = rank["sampling_masks"][name], [size for row in sizes[rows] for size in row]
        assert found["ids"].tolist() == (ids if name == "all" else ids[len(ids) - sum(own) :])
        assert found["offsets"].diff().tolist() == own and found["offsets"][0] == 0
        assert found["offsets"].tolist() == found["host"].tolist()
    assert made["two ranks"][1]["sampling_masks"]["last"]["ids"].numel() == 0


def test_supports_when_one_is_missing_or_without_its_token_then_refused_by_name(made):
    missing, outside = made["support errors"]
    assert missing.startswith(
        "a sample of prompt 0 has no sampling mask, but --rollout-top-k and --rollout-top-p"
    )
    assert outside.startswith(
        "a sample of prompt 0 has token 22 at position 1 of its response, which is none of the 2 ids of its "
        "sampling"
    )
