"""The correction and its metrics written plainly: padded rows, one masked mean after the other,
each read at once.

B rows of L tokens. What `benchmarks/correction.py` compares with; float32, as such code is.
"""

import math

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig

EDGES = {
    "below_1e-4": 1e-4,
    "1e-4_to_1e-3": 1e-3,
    "1e-3_to_1e-2": 1e-2,
    "1e-2_to_1e-1": 1e-1,
    "above_1e-1": math.inf,
}


_DECADES = [float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 2, 5)]
BIN_ENDS = sorted([*_DECADES, math.log(2), 100.0])


def jensen_shannon(ratio: Tensor) -> Tensor:
    return (ratio * (2 * ratio / (1 + ratio)).log() + (2 / (1 + ratio)).log()) / 2


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def keep_mask(rule: RejectionRule, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[B, L] 1 for keep; ratio and k3, at token and sequence levels."""
    value = log_ratio if rule.divergence == "ratio" else log_ratio.exp() - 1 - log_ratio
    value = value * mask
    if rule.level != "token":
        assert rule.level in ("seq_sum", "seq_mean"), rule
        value = (value.sum(dim=1) if rule.level == "seq_sum" else row_means(value, mask))[:, None]
    if rule.divergence == "ratio":
        value = value.exp()
    keep = torch.ones_like(value)
    if rule.lower is not None:
        keep = keep * (value >= rule.lower)
    if rule.upper is not None:
        keep = keep * (value <= rule.upper)
    return keep.expand_as(mask)


def plain_correction(
    train: Tensor, rollout: Tensor, mask: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Weights [B, L], keep mask [B, L] and metrics, of token or sequence weights, truncated or masked."""
    exact = train - rollout
    log_ratio = exact.clamp(-20, 20)
    ratio = log_ratio.exp()
    metrics = token_metrics(train, rollout, exact, log_ratio, mask) | row_metrics(train, rollout, exact, mask)
    weights = mask
    if config.rollout_is is not None:
        if config.rollout_is == "sequence":
            ratio = (log_ratio * mask).sum(dim=1, keepdim=True).clamp(-20, 20).exp().expand_as(mask)
        low, high = config.rollout_is_lower or 0.0, config.rollout_is_upper
        outside = (ratio < low) | (ratio > high)
        weights = (ratio * ~outside if config.rollout_is_mode == "mask" else ratio.clamp(max=high)) * mask
        mean = masked_mean(weights, mask)
        metrics["weight_mean"] = mean.item()
        metrics["weight_std"] = masked_mean((weights - mean) ** 2, mask).sqrt().item()
        metrics["weight_max"] = weights.max().item()
        metrics["weight_min"] = weights[mask.bool()].min().item()
        metrics["ess"] = (1 / masked_mean((weights / mean) ** 2, mask)).item()
        metrics["weight_out_of_bounds"] = masked_mean(outside.float(), mask).item()
    kept = mask
    for rule in config.rollout_rs:
        keep = keep_mask(rule, log_ratio, mask)
        metrics[f"rejected_fraction/{rule.name}"] = 1 - masked_mean(keep, mask).item()
        kept = kept * keep
    metrics["kept_fraction"] = masked_mean(kept, mask).item()
    return weights, kept, metrics


def token_metrics(
    train: Tensor, rollout: Tensor, exact: Tensor, log_ratio: Tensor, mask: Tensor
) -> dict[str, float]:
    ratio, clamped = log_ratio.exp(), exact.clamp(-11.0, 2.6109)
    p, q = train.exp(), rollout.exp()
    metrics = {
        "valid_tokens": mask.sum().item(),
        "kl": masked_mean(-exact, mask).item(),
        "kl_clamped": masked_mean(-clamped, mask).item(),
        "k3_kl": masked_mean(ratio - 1 - log_ratio, mask).item(),
        "k3_kl_clamped": masked_mean(clamped.exp() - 1 - clamped, mask).item(),
        "log_ratio_abs_mean": masked_mean(exact.abs(), mask).item(),
        "log_ratio_abs_mean_clamped": masked_mean(exact.abs().clamp(max=2.6109), mask).item(),
        "log_ratio_abs_max": (exact.abs() * mask).max().item(),
        "log_ratio_large_fraction": masked_mean((exact.abs() > math.log(2)).float(), mask).item(),
        "token_mult_prob_error": masked_mean(log_ratio.abs().exp(), mask).item(),
        "token_mult_prob_error_clamped": masked_mean(exact.abs().clamp(max=2.6109).exp(), mask).item(),
        "prob_diff_abs_mean": masked_mean((p - q).abs(), mask).item(),
        "prob_diff_abs_max": ((p - q).abs() * mask).max().item(),
        "prob_diff_std": (p - q)[mask.bool()].std(unbiased=False).item(),
        "chi2_token": masked_mean(ratio**2, mask).item() - 1,
        "chi2_token_clamped": masked_mean(clamped.exp() ** 2, mask).item() - 1,
        "jsd": masked_mean(jensen_shannon(ratio), mask).item(),
        "jsd_clamped": masked_mean(jensen_shannon(clamped.exp()), mask).item(),
        "pearson": torch.corrcoef(torch.stack([p[mask.bool()], q[mask.bool()]]))[0, 1].item(),
    }
    sizes = exact.abs()[mask.bool()]
    counts = torch.bincount(torch.bucketize(sizes, sizes.new_tensor(BIN_ENDS)), minlength=len(BIN_ENDS) + 1)
    for end, share in zip(BIN_ENDS, (counts / len(sizes)).tolist(), strict=False):
        metrics[f"log_ratio_abs_bin/upto_{end:.3g}"] = share
    low = 0.0
    for band, high in EDGES.items():
        inside = mask * (q >= low) * (q < high)
        low = high
        metrics[f"by_prob/{band}/tokens"] = inside.sum().item()
        if inside.sum().item():
            metrics[f"by_prob/{band}/kl"] = masked_mean(-exact, inside).item()
            metrics[f"by_prob/{band}/kl_clamped"] = masked_mean(-clamped, inside).item()
            metrics[f"by_prob/{band}/k3_kl"] = masked_mean(ratio - 1 - log_ratio, inside).item()
            metrics[f"by_prob/{band}/k3_kl_clamped"] = masked_mean(clamped.exp() - 1 - clamped, inside).item()
            metrics[f"by_prob/{band}/log_ratio_abs_mean"] = masked_mean(exact.abs(), inside).item()
            metrics[f"by_prob/{band}/log_ratio_abs_mean_clamped"] = masked_mean(
                exact.abs().clamp(max=2.6109), inside
            ).item()
    return metrics


def row_metrics(train: Tensor, rollout: Tensor, exact: Tensor, mask: Tensor) -> dict[str, float]:
    """Metrics over rows, all of which have tokens."""
    train_mean, rollout_mean, gap = (row_means(values, mask) for values in (train, rollout, -exact))
    total, near = (exact * mask).sum(dim=1), gap.clamp(-2.6109, 2.6109)
    longest = math.log(100)
    return {
        "training_log_ppl": (-train_mean).mean().item(),
        "rollout_log_ppl": (-rollout_mean).mean().item(),
        "training_ppl": (-train_mean).exp().mean().item(),
        "rollout_ppl": (-rollout_mean).exp().mean().item(),
        "ppl_ratio": gap.exp().mean().item(),
        "log_ppl_diff": gap.mean().item(),
        "log_ppl_diff_abs": gap.abs().mean().item(),
        "log_ppl_diff_max": gap.max().item(),
        "log_ppl_diff_min": gap.min().item(),
        "chi2_geo": (-2 * gap).exp().mean().item() - 1,
        "chi2_seq": (2 * total.clamp(-20, 20)).exp().mean().item() - 1,
        "training_log_ppl_clamped": (-train_mean).clamp(max=longest).mean().item(),
        "rollout_log_ppl_clamped": (-rollout_mean).clamp(max=longest).mean().item(),
        "training_ppl_clamped": (-train_mean).clamp(max=longest).exp().mean().item(),
        "rollout_ppl_clamped": (-rollout_mean).clamp(max=longest).exp().mean().item(),
        "ppl_ratio_clamped": near.exp().mean().item(),
        "log_ppl_diff_clamped": near.mean().item(),
        "log_ppl_diff_abs_clamped": near.abs().mean().item(),
        "chi2_geo_clamped": (-2 * near).exp().mean().item() - 1,
        "chi2_seq_clamped": (2 * total.clamp(-2.6109, 2.6109)).exp().mean().item() - 1,
        "sequences": len(mask),
    }


def plain_loss(now: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, kept: Tensor) -> Tensor:
    """PPO's clipped loss with dual clip, weighted, and its clip fraction, k3 and clamped k3 read at once."""
    ratio = (now - old).exp()
    clipped = ratio.clamp(0.8, 1.2)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    gain = torch.where(advantages < 0, torch.maximum(gain, 3.0 * advantages), gain)
    losses = -gain * weights * kept
    masked_mean(((ratio - clipped).abs() > 0).float(), kept).item()
    masked_mean(ratio - 1 - (now - old), kept).item()
    masked_mean((ratio - 1 - (now - old)).clamp(max=10), kept).item()
    masked_mean(losses, kept).item()
    return losses
