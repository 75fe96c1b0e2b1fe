"""Nothing between the log-probs and the gradient reads the device: it runs on tensors that hold no data at all.

On the meta device a value cannot be read, so .item(), .tolist(), .cpu(), `if tensor:` and boolean indexing raise.
"""

import contextlib

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl_corr.config.correction import PRESETS, RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.advantages import group_advantages
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.core.segments import flatten_padded
from megatron_rl_corr.logprobs.linear import linear_logprobs
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.sampling_mask import SamplingMasks, sampling_mask_logprobs
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs

EVERY_RULE = tuple(
    RejectionRule(level, kind, upper=2.0)
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for kind in ("ratio", "k2", "k3")
    if (level, kind) != ("seq_max", "ratio")
)
NEW_RULES = (
    RejectionRule("seq_max", "ratio", 1e-3, 1e3), RejectionRule("turn_mean", "ratio", 0.5, 2.0),
    RejectionRule("turn_mean", "k3", upper=0.5), RejectionRule("seq_mean", "abs_diff", upper=0.5),
    RejectionRule("seq_mean", "exp_abs", upper=3.0), RejectionRule("token", "rollout_prob", lower=1e-3),
    RejectionRule("seq_mean", "opsm", upper=0.1),
)
CONFIGS = {
    "every rule, batch-normalised": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_mode="mask", rollout_is_lower=0.5, rollout_is_upper=2.0,
        rollout_is_batch_normalize=True, rollout_rs=EVERY_RULE,
    ),
    "geometric, clipped": RolloutCorrectionConfig(
        rollout_is="geometric", rollout_is_mode="clip", rollout_is_lower=0.5, rollout_is_upper=2.0,
        advantage="group_mean", loss_denominator="kept",
    ),
    "turns, M2PO, batch filter": RolloutCorrectionConfig(
        rollout_is="turn", rollout_is_upper=2.0, rollout_rs=NEW_RULES, rollout_m2_threshold=0.5,
        rollout_batch_filter_kl=1.0,
    ),
    "turns, M2PO, lengths of what is kept": RolloutCorrectionConfig(
        rollout_is="turn", rollout_is_upper=2.0, rollout_rs=NEW_RULES, rollout_m2_threshold=0.5, loss="grpo",
        loss_denominator="kept",
    ),
    "tokens of sequences, kept lengths": RolloutCorrectionConfig(
        rollout_rs=(RejectionRule("seq_mean", "vaco", upper=0.1), RejectionRule("token", "binary_kl", upper=0.1)),
        loss="sapo", loss_denominator="kept",
    ),
    "gamma": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_is_mode="gamma", rollout_is_batch_normalize=True, loss="dppo_kl",
    ),
    "dro": RolloutCorrectionConfig(loss="dro", dro_beta=0.1),
    "diagnostics only": RolloutCorrectionConfig(
        rollout_is="token", rollout_is_upper=2.0, rollout_rs=NEW_RULES, diagnostics_only=True,
    ),
    **PRESETS,
}


def on_support(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of three microbatches, in chunks of four ids; every second token was drawn from its label alone, or from none."""
    lengths = np.array([3, 1, 2, 0, 5, 1, 3, 1, 2, 0, 5, 1])
    whole = SamplingMasks.of(torch.zeros(lengths.sum(), dtype=torch.int32, device=logits.device), lengths)
    parts = [
        sampling_mask_logprobs(
            logits[t : t + 4], labels[t : t + 4], whole.tokens(t, t + 4), with_entropy=True, chunk_ids=4
        )
        for t in (0, 4, 8)
    ]
    return tuple(torch.cat(values) for values in zip(*parts, strict=True))


def step(config: RolloutCorrectionConfig, device: str, truncated: bool = False) -> torch.Tensor:
    """From logits to their gradient, as a training step does it; two groups of two rows of three tokens."""
    vocab, rows, length = 11, 4, 3
    logits = torch.randn(rows * length, vocab, device=device).requires_grad_()
    labels = torch.zeros(rows * length, dtype=torch.int64, device=device)
    mask = torch.ones(rows, length, device=device)
    rollout, flat_mask, seq_ids, count = flatten_padded(-torch.rand(rows, length, device=device), mask)
    # A batch knows its sampled rows on the host: three of four tokens.
    sampled = SampledRows.of(np.arange(2 * rows * length) % 4 > 0, device).tokens(rows * length, 2 * rows * length)
    settings = {"vocab_size": 10, "with_entropy": True, "chunk_tokens": 5, "sampled": sampled}
    with torch.no_grad():
        old, _ = vocab_parallel_logprobs(logits, labels, **settings)
    rewards, group_ids = torch.rand(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    kinds = {"num_groups": 2, "kind": config.advantage_kind}
    correction = compute_correction(
        old, rollout, flat_mask, seq_ids, num_sequences=count, config=config, turn_ids=seq_ids % 2, num_turns=2,
        advantages=group_advantages(rewards, group_ids, **kinds).repeat_interleave(length),
    )
    advantages = group_advantages(
        rewards, group_ids, in_baseline=correction.kept_sequences, **kinds
    ).repeat_interleave(length)
    now, entropy = vocab_parallel_logprobs(logits, labels, **settings)
    if truncated:
        now, entropy = on_support(logits, labels)
    # From hidden states: the same labels over the same columns, once more.
    weight = torch.randn(vocab, vocab, device=device).requires_grad_()
    again, _ = linear_logprobs(logits, weight, labels, **settings)
    losses = policy_loss(
        config.loss, now, old, advantages, correction, config, seq_ids=seq_ids, num_sequences=count, metrics={},
        rollout_logprobs=rollout,
    )
    total = (losses * token_coefficients(correction, seq_ids, config)).sum()
    total = total - 0.01 * entropy.mean() + 0.01 * again.mean()
    total.backward()
    return logits.grad


@pytest.mark.parametrize("name", CONFIGS)
def test_step_when_tensors_hold_no_data_then_it_runs(name):
    assert step(CONFIGS[name], "meta").device.type == "meta"


class NoHostReads(TorchDispatchMode):
    """Raises where an operator would make the host wait for a value of the device."""

    READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in self.READS:
            raise AssertionError(f"{name} reads the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_step_when_samples_were_drawn_from_a_few_ids_then_none_reads_a_value_either(device):
    with contextlib.nullcontext() if device == "meta" else NoHostReads():
        assert step(CONFIGS["diagnostics only"], device, truncated=True).device.type == device


@pytest.mark.parametrize("name", CONFIGS)
def test_step_when_every_operator_is_watched_then_none_reads_a_value(name):
    with NoHostReads():
        gradient = step(CONFIGS[name], "cpu")
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: bool(x.sum() > 0), lambda x: x[x > 0],
        lambda x: x.cpu().numpy(), lambda x: torch.repeat_interleave(x.long()),
    ],
)
def test_the_watch_when_code_does_read_then_one_of_the_two_notices(read):
    noticed = 0
    for device, watch in (("meta", contextlib.nullcontext()), ("cpu", NoHostReads())):
        try:
            with watch:
                read(torch.ones(3, device=device))
        except (AssertionError, RuntimeError, NotImplementedError):
            noticed += 1
    assert noticed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_when_on_a_gpu_then_no_synchronisation():
    for config in CONFIGS.values():
        step(config, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for config in CONFIGS.values():
            step(config, "cuda")
        step(CONFIGS["diagnostics only"], "cuda", truncated=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
