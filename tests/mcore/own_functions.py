"""An advantage and a loss as a user writes them."""

import torch

from megatron_rl_corr.reduce.metrics import Mean


def leave_best_out(rewards, kept, tokens):
    """r - the mean of the others' rewards, less for long responses."""
    counted = torch.where(kept, rewards, 0.0)
    others = (counted.sum(1, keepdim=True) - counted) / (kept.sum(1, keepdim=True) - kept.long()).clamp(min=1)
    return (rewards - others) / tokens.clamp(min=1).sqrt()


def soft_gate(inputs, config, *, metrics):
    """-w A r sigmoid gate, in the manner of SAPO."""
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    gate = torch.sigmoid(4 * (ratio - 1)) * 2
    used = torch.stack(
        [(gate.detach() * inputs.mask).sum(dtype=torch.float64), inputs.mask.sum(dtype=torch.float64)]
    )
    metrics["gate"] = Mean(used)
    return -inputs.correction.weights * inputs.advantages * ratio * gate


def distance(inputs, config):
    """A loss that needs no advantage."""
    return inputs.logprobs - inputs.old_logprobs
