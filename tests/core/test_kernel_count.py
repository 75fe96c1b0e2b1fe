"""Operators that launch a kernel, counted on a batch of ordinary size; and that none of them
reads the device.

What counts, and what does not, is said in benchmarks/operators.py. 64 sequences of 2048 tokens.
"""

import dataclasses

import pytest
import torch

from benchmarks.correction import peak_bytes
from benchmarks.operators import OperatorCount
from megatron_rl_corr.config.correction import PRESETS, RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.config.losses import LOSSES
from megatron_rl_corr.core.correction import Correction, compute_correction
from megatron_rl_corr.core.losses import policy_loss

SEQUENCES, LENGTH = 64, 2048
WEIGHTS = {"rollout_is_mode": "mask", "rollout_is_lower": 0.5, "rollout_is_upper": 2.0}
THREE_RULES = {
    "token": [RejectionRule("token", kind, upper=2.0) for kind in ("ratio", "k2", "k3")],
    "sequence": [
        RejectionRule("seq_max", "ratio", 1e-4, 1e4),
        RejectionRule("seq_mean", "opsm", upper=0.1),
        RejectionRule("seq_sum", "k3", upper=2.0),
    ],
    "geometric": [
        RejectionRule("seq_mean", "exp_abs", upper=2.0),
        RejectionRule("token", "rollout_prob", lower=1e-4),
        RejectionRule("seq_max", "abs_diff", upper=0.9),
    ],
    "turn": [RejectionRule("turn_mean", kind, upper=0.9) for kind in ("k2", "k3", "abs_diff")],
}


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = SEQUENCES * LENGTH
    train = -torch.rand(tokens, generator=generator) * 4
    positions = torch.arange(tokens) % LENGTH
    return {
        "train_logprobs": train,
        "rollout_logprobs": train + 0.02 * torch.randn(tokens, generator=generator),
        "loss_mask": torch.rand(tokens, generator=generator) < 0.9,
        "seq_ids": torch.arange(SEQUENCES).repeat_interleave(LENGTH),
        "turn_ids": positions // 512,
        "advantages": torch.randn(SEQUENCES, generator=generator).repeat_interleave(LENGTH),
    }


def counted(
    batch: dict[str, torch.Tensor], config: RolloutCorrectionConfig
) -> tuple[OperatorCount, Correction]:
    """The operators of one correction, after one that made the constants."""
    sizes = {"num_sequences": SEQUENCES, "num_turns": LENGTH // 512}
    compute_correction(**batch, **sizes, config=config)
    with OperatorCount() as count:
        correction = compute_correction(**batch, **sizes, config=config)
    return count, correction


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_correction_when_of_a_preset_then_at_most_150_kernels_no_host_read_and_64_bytes_a_token(
    name, turns, batch
):
    given = batch if turns else {k: v for k, v in batch.items() if k != "turn_ids"}
    count, _ = counted(given, PRESETS[name])
    sizes = {"num_sequences": SEQUENCES, "num_turns": LENGTH // 512}
    peak = peak_bytes(lambda: compute_correction(**given, **sizes, config=PRESETS[name]), "cpu")
    print(f"{name}: {len(count.kernels)} kernels, {peak / (SEQUENCES * LENGTH):.1f} bytes a token")
    assert count.host_reads == []
    assert len(count.kernels) <= 150
    assert peak <= 64 * SEQUENCES * LENGTH


@pytest.mark.parametrize("level", THREE_RULES)
def test_correction_when_of_three_rules_and_normalised_weights_then_at_most_180_kernels(level, batch):
    config = RolloutCorrectionConfig(
        rollout_is=level,
        rollout_is_batch_normalize=True,
        rollout_rs=tuple(THREE_RULES[level]),
        **WEIGHTS,
        rollout_batch_filter_kl=0.1,
    )
    """No preset has three rules and normalised weights at once: 146 to 179 kernels were counted for these."""
    # Means over what is kept of each sequence need its length too.
    for settings in ({}, {"loss": "grpo", "loss_denominator": "kept"}):
        count, correction = counted(batch, dataclasses.replace(config, **settings))
        print(f"three rules, {level} weights, {settings}: {len(count.kernels)} kernels")
        assert len(count.kernels) <= 180 and count.host_reads == []
        assert len(correction.metrics) > 60


def test_correction_when_there_are_more_tokens_then_as_many_kernels_and_at_most_64_bytes_each():
    config = RolloutCorrectionConfig(
        rollout_is="turn",
        rollout_is_batch_normalize=True,
        rollout_rs=tuple(THREE_RULES["sequence"]),
        **WEIGHTS,
        rollout_m2_threshold=0.1,
    )

    def work(tokens: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        train, ids = -torch.rand(tokens, generator=generator), torch.arange(tokens)
        return {
            "train_logprobs": train,
            "rollout_logprobs": train * 1.01,
            "loss_mask": train < -0.1,
            "seq_ids": ids // LENGTH,
            "turn_ids": ids % LENGTH // 512,
            "advantages": train + 0.5,
        }

    peaks, counts = {}, {}
    for tokens in (1 << 17, 1 << 18, 3 << 18):
        given = work(tokens) | {"num_sequences": tokens // LENGTH, "num_turns": 4, "config": config}
        peaks[tokens] = peak_bytes(lambda given=given: compute_correction(**given), "cpu") / tokens
        with OperatorCount() as count:
            compute_correction(**given)
        counts[tokens] = len(count.kernels)
        assert count.host_reads == []
    print(f"peak bytes a token: {peaks}; kernels: {counts}")
    assert max(peaks.values()) <= 64
    assert len(set(counts.values())) == 1


@pytest.mark.parametrize("with_metrics", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_when_run_forward_then_few_kernels_and_no_host_read(name, with_metrics, batch):
    config = RolloutCorrectionConfig(
        loss=name,
        loss_scale_length=2048.0 if name == "dr_grpo" else None,
        rollout_is="token",
        rollout_is_upper=2.0,
        dro_beta=0.1 if name == "dro" else None,
    )
    correction = compute_correction(**batch, num_sequences=SEQUENCES, config=config)
    now = (batch["train_logprobs"] + 0.01).requires_grad_()

    def forward(metrics):
        return policy_loss(
            name,
            now,
            batch["train_logprobs"],
            batch["advantages"],
            correction,
            config,
            seq_ids=batch["seq_ids"],
            num_sequences=SEQUENCES,
            metrics=metrics,
        )

    forward({} if with_metrics else None)
    with OperatorCount() as count:
        forward({} if with_metrics else None)
    print(f"{name}{' and its metrics' if with_metrics else ''}: {len(count.kernels)} kernels")
    most = 40 if name == "dppo_kl" else 30  # a KL of two coins takes 18
    assert len(count.kernels) <= most + 10 * with_metrics and count.host_reads == []


@pytest.mark.parametrize(
    ("work", "kernels", "host_reads"),
    [
        (lambda x: x.clone() + 1, ["clone", "add"], []),
        (lambda x: (x.view(2, 3)[1:, None].expand(4, 1, 3).mT, x.detach(), torch.empty_like(x)), [], []),
        (lambda x: (x.new_zeros(3), x.sum(), x.mul_(2)), ["new_zeros", "sum", "mul_"], []),
        (lambda x: x.sum().item(), ["sum", "_local_scalar_dense"], ["_local_scalar_dense"]),
        # A GPU must count the hits before it can allocate the result.
        (lambda x: x[x > 0], ["gt", "index"], ["index by a mask"]),
    ],
)
def test_count_when_the_work_is_known_then_each_of_its_operators(work, kernels, host_reads):
    given = torch.ones(6)
    with OperatorCount() as count:
        work(given)
    assert (count.kernels, count.host_reads) == (kernels, host_reads)
