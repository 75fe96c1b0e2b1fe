"""A step from logits to their gradient, under every preset and loss, that must never wait for the device.

On a GPU torch raises where it does, in its sync-debug mode; without one a watch raises at operators
that would wait.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl_corr.config.correction import PRESETS, RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.config.losses import KL_TYPES, LOSSES
from megatron_rl_corr.core.advantages import group_advantages
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.core.segments import flatten_padded
from megatron_rl_corr.core.token_baseline import gradient_energies, total_power
from megatron_rl_corr.logprobs.linear import linear_logprobs
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.sampling_mask import SamplingMasks, sampling_mask_logprobs
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs
from megatron_rl_corr.reduce.collectives import ParallelGroups
from tools.gpu_check.outcome import Finding, Outcome, require

ROWS, LENGTH = 4, 3
TOKENS = ROWS * LENGTH
EVERY_RULE = tuple(
    RejectionRule(level, kind, upper=2.0)
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for kind in ("ratio", "k2", "k3")
    if (level, kind) != ("seq_max", "ratio")
)
NEW_RULES = (
    RejectionRule("seq_max", "ratio", 1e-3, 1e3),
    RejectionRule("turn_mean", "ratio", 0.5, 2.0),
    RejectionRule("turn_mean", "k3", upper=0.5),
    RejectionRule("seq_mean", "abs_diff", upper=0.5),
    RejectionRule("seq_mean", "exp_abs", upper=3.0),
    RejectionRule("token", "rollout_prob", lower=1e-3),
    RejectionRule("seq_mean", "opsm", upper=0.1),
)
NEEDED = {"dr_grpo": {"loss_scale_length": 3}, "dro": {"dro_beta": 0.1}}
"""Settings that a loss has no default of."""
CONFIGS = {
    "every rule, batch-normalised": RolloutCorrectionConfig(
        rollout_is="sequence",
        rollout_is_mode="mask",
        rollout_is_lower=0.5,
        rollout_is_upper=2.0,
        rollout_is_batch_normalize=True,
        rollout_rs=EVERY_RULE,
    ),
    "geometric, clipped": RolloutCorrectionConfig(
        rollout_is="geometric",
        rollout_is_mode="clip",
        rollout_is_lower=0.5,
        rollout_is_upper=2.0,
        advantage="group_mean",
        loss_denominator="kept",
    ),
    "turns, M2PO, batch filter": RolloutCorrectionConfig(
        rollout_is="turn",
        rollout_is_upper=2.0,
        rollout_rs=NEW_RULES,
        rollout_m2_threshold=0.5,
        rollout_batch_filter_kl=1.0,
        clip_sat_tail=1.0,
    ),
    "turns, M2PO, lengths of what is kept": RolloutCorrectionConfig(
        rollout_is="turn",
        rollout_is_upper=2.0,
        rollout_rs=NEW_RULES,
        rollout_m2_threshold=0.5,
        loss="grpo",
        loss_denominator="kept",
    ),
    "tokens of sequences, kept lengths": RolloutCorrectionConfig(
        rollout_rs=(
            RejectionRule("seq_mean", "vaco", upper=0.1),
            RejectionRule("token", "binary_kl", upper=0.1),
        ),
        loss="sapo",
        loss_denominator="kept",
    ),
    "gamma": RolloutCorrectionConfig(
        rollout_is="sequence",
        rollout_is_mode="gamma",
        loss="dppo_kl",
    ),
    "dro": RolloutCorrectionConfig(loss="dro", dro_beta=0.1),
    "diagnostics only": RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_upper=2.0,
        rollout_rs=NEW_RULES,
        diagnostics_only=True,
    ),
    **{
        f"KL {kind}": RolloutCorrectionConfig(
            loss="reinforce", kl_loss_coef=0.1, kl_loss_type=kind, sampler_kl_coef=0.1, sampler_kl_type="k3"
        )
        for kind in KL_TYPES
    },
    **{f"loss {name}": RolloutCorrectionConfig(loss=name, **NEEDED.get(name, {})) for name in LOSSES},
    **PRESETS,
}


@dataclass(frozen=True)
class Prepared:
    """What a batch has on the device before any step."""

    masks: SamplingMasks
    """Every second token was drawn from its label alone, or from none."""

    @classmethod
    def on(cls, device: str) -> "Prepared":
        lengths = np.array([3, 1, 2, 0, 5, 1, 3, 1, 2, 0, 5, 1])
        ids = torch.zeros(lengths.sum(), dtype=torch.int32, device=device)
        return cls(SamplingMasks.of(ids, lengths))


def on_support(
    logits: torch.Tensor, labels: torch.Tensor, whole: SamplingMasks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of three microbatches, in chunks of four ids."""
    parts = [
        sampling_mask_logprobs(
            logits[t : t + 4],
            labels[t : t + 4],
            whole.at(np.arange(t, t + 4)),
            with_entropy=True,
            chunk_ids=4,
        )
        for t in (0, 4, 8)
    ]
    return tuple(torch.cat(values) for values in zip(*parts, strict=True))


def step(
    config: RolloutCorrectionConfig, device: str, truncated: bool = False, prepared: Prepared | None = None
) -> torch.Tensor:
    """From logits to their gradient, as a training step does it; two groups of two rows of three tokens."""
    prepared = prepared or Prepared.on(device)
    vocab, rows, length = 11, ROWS, LENGTH
    logits = torch.randn(rows * length, vocab, device=device).requires_grad_()
    labels = torch.zeros(rows * length, dtype=torch.int64, device=device)
    mask = torch.ones(rows, length, device=device)
    rollout, flat_mask, seq_ids, count = flatten_padded(-torch.rand(rows, length, device=device), mask)
    sampled = SampledRows.of(
        np.arange(TOKENS) % 4 > 0, device
    )  # as a microbatch has it, three of four tokens
    settings = {"vocab_size": 10, "with_entropy": True, "chunk_tokens": 5, "sampled": sampled}
    with torch.no_grad():
        old, _, collision = vocab_parallel_logprobs(logits, labels, with_collision=True, **settings)
    rewards, group_ids = torch.rand(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    kinds = {"num_groups": 2, "kind": "group_mean" if config.advantage_by_token else config.advantage_kind}
    correction = compute_correction(
        old,
        rollout,
        flat_mask,
        seq_ids,
        num_sequences=count,
        config=config,
        turn_ids=seq_ids % 2,
        num_turns=2,
        advantages=group_advantages(rewards, group_ids, **kinds).repeat_interleave(length),
    )
    advantages = group_advantages(
        rewards, group_ids, in_baseline=correction.kept_sequences, **kinds
    ).repeat_interleave(length)
    if config.advantage_by_token:
        # needs more than torch
        from megatron_rl_corr.mcore.batch_advantages import token_advantages_of_batch

        batch = SimpleNamespace(
            loss_mask=flat_mask,
            seq_ids=seq_ids,
            num_sequences=rows,
            host_starts=np.arange(rows + 1) * length,
            rewards=rewards,
            group_ids=group_ids,
            parted_groups=0,
            flat=lambda values: values,
            spread=lambda values: values[seq_ids],
            in_loss=torch.ones(rows, dtype=torch.bool, device=device),
        )
        energies = gradient_energies(old, collision)
        advantages = token_advantages_of_batch(
            batch, correction, energies, ParallelGroups(), group_size=2, seq_length=length
        )
        total_power(
            energies, advantages, correction.weights, correction.mask, correction.kept_sequences, owner=False
        )
    now, entropy = vocab_parallel_logprobs(logits, labels, **settings)
    if truncated:
        now, entropy = on_support(logits, labels, prepared.masks)
    # From hidden states: the same labels over the same columns, once more.
    weight = torch.randn(vocab, vocab, device=device).requires_grad_()
    again, _ = linear_logprobs(logits, weight, labels, **settings)
    losses = policy_loss(
        config.loss,
        now,
        old,
        advantages,
        correction,
        config,
        seq_ids=seq_ids,
        num_sequences=count,
        metrics={},
        rollout_logprobs=rollout,
        ref_logprobs=rollout - 0.1 if config.kl_loss_coef else None,
    )
    total = (losses * token_coefficients(correction, seq_ids, config)).sum()
    total = total - 0.01 * entropy.mean() + 0.01 * again.mean()
    total.backward()
    return logits.grad


class NoHostReads(TorchDispatchMode):
    """Raises where an operator would make the host wait for a value of the device."""

    READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in self.READS:
            raise AssertionError(f"{name} reads the device")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def sync_debug_mode() -> Iterator[None]:
    """Torch raises RuntimeError within where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(device: str) -> Outcome:
    """All configurations whose advantages are of sequences, then the samples that were
    drawn from a few ids.
    """
    runs = [(name, config, False) for name, config in CONFIGS.items() if not config.advantage_by_token]
    return _check([*runs, ("samples drawn from a few ids", CONFIGS["diagnostics only"], True)], device)


def check_token_baseline(device: str) -> Outcome:
    """Those whose advantages are of tokens."""
    return _check(
        [(name, config, False) for name, config in CONFIGS.items() if config.advantage_by_token], device
    )


def _check(runs: Sequence[tuple[str, RolloutCorrectionConfig, bool]], device: str) -> Outcome:
    """Run each (name, configuration, truncated).

    Raises:
        RuntimeError: on a GPU, where the host waited for it.
        AssertionError: without one, naming the operator.
        DoesNotHold: a gradient is not finite.
    """
    prepared = Prepared.on(device)
    for name, config, truncated in runs:
        if device == "cuda":  # what is compiled, or copied once as a constant, may wait
            step(config, device, truncated, prepared)
        try:
            with sync_debug_mode() if device == "cuda" else NoHostReads():
                gradient = step(config, device, truncated, prepared)
        except (RuntimeError, AssertionError) as error:
            error.add_note(f"in the step of {name!r}")
            raise
        require(bool(gradient.isfinite().all()), f"the gradient of {name!r} is not finite")
    how = "sync-debug mode" if device == "cuda" else "operators that would wait"
    return Outcome(
        [Finding(f"steps without a wait for the device, by {how}", f"{len(runs)}", f"{len(runs)}")]
    )
