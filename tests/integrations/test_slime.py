"""The function for slime's and miles's --custom-tis-function-path, called as they call it, against
whole sequences.

As called in slime v0.2.0, v0.2.1, v0.2.2, v0.2.4, v0.3.0, v0.3.1 and main at 624b824
(slime/backends/megatron_utils/loss.py), and in miles main at 31f1ca9
(miles/backends/training_utils/loss_hub/losses.py).
"""

import importlib
import inspect
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr import RolloutCorrectionConfig, compute_correction
from megatron_rl_corr.integrations.slime import correct
from tests.megatron_forks import run_megatron

HERE = Path(__file__).resolve().parent
NAN = float("nan")
SLIME = {
    "args",
    "pg_loss",
    "train_log_probs",
    "rollout_log_probs",
    "loss_masks",
    "total_lengths",
    "response_lengths",
}
MILES = SLIME | {"parallel_state", "max_seq_lens"}
TOTALS, RESPONSES = [11, 5, 16, 9, 30], [4, 2, 15, 3, 29]
"""Whole chunks and rounded ones; a response on one rank only, and one over all chunks."""
MAX_SEQ_LENS = [32] * 5
SETTINGS = """
rollout_is: sequence
rollout_is_threshold: 1.5
rollout_rs: token_ratio,seq_mean_ratio
rollout_rs_threshold: 0.3_3,0.8_1.25
"""
ALONE = SimpleNamespace(cp=SimpleNamespace(rank=0, size=1, group=None))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("settings") / "correction.yaml"
    path.write_text(SETTINGS)
    return str(path)


@pytest.fixture(scope="module")
def whole():
    """Log-probs of whole responses, a list with an entry a sample; holes in the masks, and NaN
    outside and inside.
    """
    generator = torch.Generator().manual_seed(3)
    train = [-torch.rand(n, generator=generator) * 3 for n in RESPONSES]
    rollout = [t + torch.randn(len(t), generator=generator) * 0.3 for t in train]
    masks = [(torch.rand(n, generator=generator) < 0.8).int() for n in RESPONSES]
    masks[2][3], masks[2][4] = 0, 1
    train[2][3], rollout[2][4] = NAN, NAN
    rollout[3] = train[3] - 0.5  # e^0.5 is above 1.25: the whole sample goes
    pg_loss = torch.randn(sum(RESPONSES), generator=generator)
    return {"train": train, "rollout": rollout, "masks": masks, "pg_loss": pg_loss}


def expected(whole, settings, **instead):
    """Core's own correction of the whole sequences."""
    config = RolloutCorrectionConfig.from_yaml(settings, **instead)
    ids = torch.arange(len(RESPONSES)).repeat_interleave(torch.tensor(RESPONSES))
    return compute_correction(
        torch.cat(whole["train"]),
        torch.cat(whole["rollout"]),
        torch.cat(whole["masks"]),
        ids,
        num_sequences=len(RESPONSES),
        config=config,
    )


def arguments(whole, **instead):
    """What slime passes without context parallelism."""
    return {
        "pg_loss": whole["pg_loss"].clone(),
        "train_log_probs": whole["train"],
        "rollout_log_probs": whole["rollout"],
        "loss_masks": whole["masks"],
        "total_lengths": TOTALS,
        "response_lengths": RESPONSES,
    } | instead


def test_signature_then_every_caller_finds_its_arguments():
    path, _, name = "megatron_rl_corr.integrations.slime.correct".rpartition(".")
    function = getattr(importlib.import_module(path), name)  # as both load it
    for names in (SLIME, MILES):
        inspect.signature(function).bind(**dict.fromkeys(names))


def test_one_rank_when_called_then_weights_and_masks_are_cores(whole, settings):
    args = Namespace(use_tis=True, rollout_correction_config=settings)
    loss, masks, metrics = correct(args, **arguments(whole, parallel_state=ALONE, max_seq_lens=None))
    truth = expected(whole, settings)
    kept = truth.mask
    assert 5 < kept.sum() < truth.valid.sum() < len(kept) and not kept.split(RESPONSES)[3].any()
    torch.testing.assert_close(
        loss, torch.where(kept, whole["pg_loss"] * truth.weights, 0.0), rtol=1e-6, atol=0
    )
    for mask, before, keep in zip(masks, whole["masks"], kept.split(RESPONSES), strict=True):
        assert mask.dtype == before.dtype and torch.equal(mask, before * keep)
    d = torch.cat(whole["train"]) - torch.cat(whole["rollout"])
    d = torch.where(truth.valid, d, 0.0)
    torch.testing.assert_close(metrics["rollout_corr/kl"], -d)
    torch.testing.assert_close(metrics["rollout_corr/k3_kl"], d.exp() - d - 1, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics["rollout_corr/weight"], truth.weights)
    assert torch.equal(metrics["rollout_corr/kept"], kept.float())
    assert all(value.shape == loss.shape and value.isfinite().all() for value in metrics.values())


def test_k3_when_a_token_is_impossible_for_the_trainer_then_its_exponent_alone_is_clamped(whole, settings):
    whole = whole | {name: [part.clone() for part in whole[name]] for name in ("masks", "rollout", "train")}
    whole["masks"][0][0], whole["rollout"][0][0], whole["train"][0][0] = 1, -1.0, -30.0
    args = Namespace(use_tis=True, rollout_correction_config=settings)
    _, _, metrics = correct(args, **arguments(whole, parallel_state=ALONE, max_seq_lens=None))
    assert metrics["rollout_corr/k3_kl"][0].item() == pytest.approx(28.0)  # e^-29 - 1 + 29


def test_metrics_only_when_tis_is_off_then_loss_and_masks_are_the_callers(whole, settings):
    args = Namespace(use_tis=False, rollout_correction_config=settings)
    given = arguments(whole, parallel_state=ALONE)
    loss, masks, metrics = correct(args, **given)
    assert loss is given["pg_loss"] and masks is given["loss_masks"]
    assert metrics["rollout_corr/kept"].sum() == expected(whole, settings).valid_tokens
    assert set(metrics["rollout_corr/weight"].tolist()) == {0.0, 1.0}


def averaged(values, masks):
    """As slime reports a metric without context parallelism: each sample's mean over its mask,
    then over samples.
    """
    means = [
        (v * m).sum() / m.sum().clamp(min=1) for v, m in zip(values.split(RESPONSES), masks, strict=True)
    ]
    return (sum(means) / len(means)).item()


def test_metrics_when_averaged_over_the_callers_masks_or_those_returned_then_as_the_page_says_of_each_release(
    whole, settings
):
    finite = whole | {
        "train": [t.nan_to_num(-1.0) for t in whole["train"]],
        "rollout": [t.nan_to_num(-1.0) for t in whole["rollout"]],
    }
    args = Namespace(use_tis=True, rollout_correction_config=settings)
    _, returned, metrics = correct(args, **arguments(finite, parallel_state=ALONE))
    truth = expected(finite, settings)
    d = (torch.cat(finite["rollout"]) - torch.cat(finite["train"])).split(RESPONSES)
    kept = truth.mask.split(RESPONSES)
    # slime from 0.2.2 on, and miles: the masks that they had.
    before = [mask.bool() for mask in finite["masks"]]
    assert averaged(metrics["rollout_corr/valid"], finite["masks"]) == pytest.approx(1.0)
    assert averaged(metrics["rollout_corr/kept"], finite["masks"]) == pytest.approx(
        sum(k[m].float().mean().item() for k, m in zip(kept, before, strict=True)) / 5
    )
    assert averaged(metrics["rollout_corr/kl"], finite["masks"]) == pytest.approx(
        sum(x[m].mean().item() for x, m in zip(d, before, strict=True)) / 5
    )
    # slime 0.2.0 and 0.2.1: those returned; a sample of which nothing is kept counts as 0.
    samples = sum(k.any().item() for k in kept)
    assert 0 < samples < 5
    for name in ("kept", "valid"):
        assert averaged(metrics[f"rollout_corr/{name}"], returned) == pytest.approx(samples / 5)
    assert averaged(metrics["rollout_corr/kl"], returned) == pytest.approx(
        sum(x[k].mean().item() for x, k in zip(d, kept, strict=True) if k.any()) / 5
    )
    # Without --use-tis the masks are the caller's, so every release has the numbers of all tokens.
    _, same, _ = correct(
        Namespace(use_tis=False, rollout_correction_config=settings),
        **arguments(finite, parallel_state=ALONE),
    )
    assert same is finite["masks"]


# Two context-parallel ranks


def owned(rank, lengths):
    """Of each sample, the response tokens whose predicting position lies in this rank's
    two of four chunks.
    """
    taken = []
    for total, response, length in zip(TOTALS, RESPONSES, lengths, strict=True):
        chunk = (length + 3) // 4
        chunks = [(total - response - 1 + token) // chunk for token in range(response)]
        taken.append(
            torch.tensor([t for t, c in enumerate(chunks) if c in (rank, 3 - rank)], dtype=torch.int64)
        )
    return taken


LAYOUTS = {
    "slime": ("slime", {}, None, TOTALS),
    "miles thd": ("miles", {"qkv_format": "thd"}, None, TOTALS),
    "miles bshd": ("miles", {"qkv_format": "bshd"}, MAX_SEQ_LENS, MAX_SEQ_LENS),
}


@pytest.fixture(scope="module")
def ranks(whole, settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("slime_ranks")
    cases = {}
    for name, (trainer, args, max_seq_lens, lengths) in LAYOUTS.items():
        pieces = [
            [part[t] for part, t in zip(whole["pg_loss"].split(RESPONSES), owned(r, lengths), strict=True)]
            for r in (0, 1)
        ]
        cases[name] = {
            "trainer": trainer,
            "args": {"use_tis": True, "rollout_correction_config": settings, **args},
            "max_seq_lens": max_seq_lens,
            "loss_masks": whole["masks"],
            "total_lengths": TOTALS,
            "response_lengths": RESPONSES,
            "ranks": [
                {"pg_loss": torch.cat(pieces[rank])}
                | {
                    key: [part[t] for part, t in zip(whole[key], owned(rank, lengths), strict=True)]
                    for key in ("train", "rollout")
                }
                for rank in (0, 1)
            ],
        }
    torch.save(cases, folder / "cases.pt")
    done = run_megatron(HERE / "slime_worker.py", folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_cp_ranks_when_called_then_each_has_its_part_of_cores_whole_correction(
    ranks, whole, settings, layout
):
    truth, offsets = expected(whole, settings), torch.tensor([0, *RESPONSES[:-1]]).cumsum(0).tolist()
    for rank in (0, 1):
        mine = owned(rank, LAYOUTS[layout][3])
        index = torch.cat([tokens + offset for tokens, offset in zip(mine, offsets, strict=True)])
        made = ranks[rank][layout]
        factor = torch.where(truth.mask, truth.weights, 0.0)[index]
        assert 0 < len(index) < sum(RESPONSES)
        torch.testing.assert_close(made["gradient"], factor, rtol=1e-6, atol=0)
        torch.testing.assert_close(made["loss"], whole["pg_loss"][index] * factor, rtol=1e-6, atol=0)
        torch.testing.assert_close(
            made["metrics"]["rollout_corr/weight"], truth.weights[index], rtol=1e-6, atol=0
        )
        for mask, before, keep in zip(
            made["masks"], whole["masks"], truth.mask.split(RESPONSES), strict=True
        ):
            assert torch.equal(mask, before * keep), "whole masks, the same on both ranks"


def test_lengths_when_of_another_layout_then_refused(whole, settings):
    args = Namespace(use_tis=True, rollout_correction_config=settings)
    with pytest.raises(ValueError, match="no layout that is known"):
        correct(args, **arguments(whole, parallel_state=ALONE, response_lengths=[4, 2, 15, 4, 28]))


def test_settings_when_not_named_then_the_remedy_is_told(whole):
    with pytest.raises(
        ValueError, match="--custom-config-path a YAML file with the line `rollout_correction_config"
    ):
        correct(Namespace(use_tis=True), **arguments(whole))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "preset: slime_mis",
            "rollout_is_batch_normalize True has no effect in slime and miles: it needs the whole",
        ),
        ("preset: bypass_ppo_clip", "bypass_mode True has no effect in slime and miles: the loss is"),
        ("preset: decoupled_token_is\nloss_denominator: kept", "loss_denominator kept has no effect"),
        ("rollout_rs: turn_mean_ratio\nrollout_rs_threshold: 0.9_1.1", "do not tell turns"),
        (
            "rollout_rs: token_routing\nrollout_rs_threshold: 0.5",
            "token_routing needs .* slime and miles do not give",
        ),
        ("rollout_rs: seq_mean_vaco\nrollout_rs_threshold: 0.5", "seq_mean_vaco needs .* use another rule"),
        (
            "rollout_is: sequence\nrollout_is_mode: gamma",
            "rollout_is_mode gamma needs advantages, .* slime and miles do not give; use another mode",
        ),
        ("preset: decoupled_token_iss", "unknown preset"),
    ],
)
def test_settings_when_without_effect_then_refused(whole, tmp_path, text, told):
    (tmp_path / "c.yaml").write_text(text)
    args = Namespace(use_tis=True, rollout_correction_config=str(tmp_path / "c.yaml"))
    with pytest.raises(ValueError, match=told):
        correct(args, **arguments(whole, parallel_state=ALONE))
