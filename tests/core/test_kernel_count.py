"""Operators that launch a kernel, counted on a batch of ordinary size; and that none of them reads the device.

What counts, and what does not, is said in benchmarks/operators.py. 64 sequences of 2048 tokens.
"""

import dataclasses

import pytest
import torch

from benchmarks.correction import peak_bytes
from benchmarks.operators import OperatorCount
from megatron_rl_corr.config.correction import PRESETS, RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.config.losses import LOSSES
from megatron_rl_corr.core.chunks import CHUNK_TOKENS
from megatron_rl_corr.core.correction import Correction, compute_correction
from megatron_rl_corr.core.losses import policy_loss

SEQUENCES, LENGTH = 64, 2048
SINGLE = [
    name for name, config in PRESETS.items()
    if (config.rollout_is is not None) + len(config.rollout_rs) + (config.rollout_m2_threshold is not None) <= 1
]  # fmt: skip
WEIGHTS = {"rollout_is_mode": "mask", "rollout_is_lower": 0.5, "rollout_is_upper": 2.0}
THREE_RULES = {
    "token": [RejectionRule("token", kind, upper=2.0) for kind in ("ratio", "k2", "k3")],
    "sequence": [
        RejectionRule("seq_max", "ratio", 1e-4, 1e4), RejectionRule("seq_mean", "opsm", upper=0.1),
        RejectionRule("seq_sum", "k3", upper=2.0),
    ],
    "geometric": [
        RejectionRule("seq_mean", "exp_abs", upper=2.0), RejectionRule("token", "rollout_prob", lower=1e-4),
        RejectionRule("seq_max", "abs_diff", upper=0.9),
    ],
    "turn": [RejectionRule("turn_mean", kind, upper=0.9) for kind in ("k2", "k3", "abs_diff")],
}  # fmt: skip


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


def counted(batch: dict[str, torch.Tensor], config: RolloutCorrectionConfig) -> tuple[OperatorCount, Correction]:
    """The operators of one correction, after one that made the constants."""
    sizes = {"num_sequences": SEQUENCES, "num_turns": LENGTH // 512}
    compute_correction(**batch, **sizes, config=config)
    with OperatorCount() as count:
        correction = compute_correction(**batch, **sizes, config=config)
    return count, correction


@pytest.mark.parametrize("name", PRESETS)
def test_correction_when_of_a_preset_then_few_kernels_and_no_host_read(name, batch):
    config = PRESETS[name]
    count, _ = counted({k: v for k, v in batch.items() if k != "turn_ids"}, config)
    print(f"{name}: {len(count.kernels)} kernels")
    assert count.host_reads == []
    # M2PO makes its histogram before the rest.
    allowed = 46 if name == "m2po" else 40 if name in SINGLE else 44 if not config.rollout_is_batch_normalize else 62
    assert len(count.kernels) <= allowed


@pytest.mark.parametrize("name", ["decoupled_token_is", "decoupled_geo_rs"])
def test_correction_when_turns_are_told_apart_then_two_kernels_more(name, batch):
    with_turns, _ = counted(batch, PRESETS[name])
    without, _ = counted({k: v for k, v in batch.items() if k != "turn_ids"}, PRESETS[name])
    assert len(with_turns.kernels) == len(without.kernels) + 2


@pytest.mark.parametrize("level", THREE_RULES)
def test_correction_when_of_three_rules_and_normalised_weights_then_at_most_90_kernels(level, batch):
    config = RolloutCorrectionConfig(
        rollout_is=level, rollout_is_batch_normalize=True, rollout_rs=tuple(THREE_RULES[level]), **WEIGHTS,
        rollout_batch_filter_kl=0.1,
    )
    # Means over what is kept of each sequence need its length too.
    for settings in ({}, {"loss": "grpo", "loss_denominator": "kept"}):
        count, correction = counted(batch, dataclasses.replace(config, **settings))
        print(f"three rules, {level} weights, {settings}: {len(count.kernels)} kernels")
        assert len(count.kernels) <= 90 and count.host_reads == []
        assert len(correction.metrics) > 60


def test_correction_when_there_are_many_tokens_then_a_table_of_bounded_size_and_few_bytes_a_token():
    config = RolloutCorrectionConfig(
        rollout_is="turn", rollout_is_batch_normalize=True, rollout_rs=tuple(THREE_RULES["sequence"]), **WEIGHTS,
        rollout_m2_threshold=0.1,
    )

    def work(tokens: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        train, ids = -torch.rand(tokens, generator=generator), torch.arange(tokens)
        return {
            "train_logprobs": train, "rollout_logprobs": train * 1.01, "loss_mask": train < -0.1,
            "seq_ids": ids // LENGTH, "turn_ids": ids % LENGTH // 512, "advantages": train + 0.5,
        }  # fmt: skip

    peaks, counts = {}, {}
    for chunks in (1, 2, 6):
        tokens = chunks * CHUNK_TOKENS
        given = work(tokens) | {"num_sequences": tokens // LENGTH, "num_turns": 4, "config": config}
        peaks[chunks] = peak_bytes(lambda given=given: compute_correction(**given), "cpu")
        with OperatorCount() as count:
            compute_correction(**given)
        counts[chunks] = len(count.kernels)
        assert count.host_reads == []
    print(f"peak bytes by chunks: {peaks}; kernels: {counts}")
    # The rows of one chunk are there once, or twice while the next are made.
    assert peaks[1] <= 450 * CHUNK_TOKENS
    assert (peaks[6] - peaks[2]) / (4 * CHUNK_TOKENS) <= 40
    assert (counts[6] - counts[2]) / 4 < counts[1]


@pytest.mark.parametrize("with_metrics", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_when_run_forward_then_few_kernels_and_no_host_read(name, with_metrics, batch):
    config = RolloutCorrectionConfig(
        loss=name, loss_scale_length=2048.0 if name == "dr_grpo" else None, rollout_is="token", rollout_is_upper=2.0
    )
    correction = compute_correction(**batch, num_sequences=SEQUENCES, config=config)
    now = (batch["train_logprobs"] + 0.01).requires_grad_()

    def forward(metrics):
        return policy_loss(
            name, now, batch["train_logprobs"], batch["advantages"], correction, config,
            seq_ids=batch["seq_ids"], num_sequences=SEQUENCES, metrics=metrics,
        )  # fmt: skip

    forward({} if with_metrics else None)
    with OperatorCount() as count:
        forward({} if with_metrics else None)
    print(f"{name}{' and its metrics' if with_metrics else ''}: {len(count.kernels)} kernels")
    assert len(count.kernels) <= (40 if with_metrics else 30) and count.host_reads == []


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
