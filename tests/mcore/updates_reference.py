"""Several updates of one batch by Hugging Face autograd in float64 and plain gradient descent, one
sample at a time.

Shares no code with the package. python updates_reference.py MODEL_DIR REFERENCE.pt OUT.pt '["gspo", 2]' ...
saves, of each loss and number of replicas, the metrics of every update and the weights after the last one.
"""

import json
import math
import sys
from pathlib import Path

import torch

from tests import tensor_files

sys.path.insert(0, str(Path(__file__).parent))
from hf_reference import advantages_of, hf_named, load, logprobs_of, token_advantages_of
from updates_cases import (
    BY_SAMPLE,
    BYPASS,
    CLIP,
    EPOCHS,
    KEPT,
    OTB,
    RATE,
    REJECTING,
    SAT,
    SAT_TAIL,
    SOFT,
    TRUNCATED,
    WEIGHT,
    near,
    parts_of,
    sample_part,
)


def update_loss(name, advantages, now, old, weights, *, rows=None, tokens=None, narrowed=None):
    """(loss with gradient, metrics) of the samples of one update that are left; rows, tokens: what
    divides the loss; narrowed: SAT's factor of the bounds, of each token.

    advantages: of each sample, or of each of its tokens.
    """
    ppo_low, ppo_high = low, high = CLIP.get(name, (None, None))
    total, by_token, clipped, k3, count = 0.0, 0.0, 0, 0.0, sum(map(len, now))
    in_tail, by_sat = 0, 0
    for i, row in enumerate(now):
        sequence = (row.detach() - old[i]).mean().exp().item()
        row_total = 0.0
        for t, p in enumerate(row):
            a, w, q = advantages[i], weights[i][t], old[i][t]
            a = a[t] if isinstance(a, list) else a
            r = (p - q).exp()
            k3 += r.item() - 1 - math.log(r.item())
            if narrowed is not None:
                factor = narrowed[i][t]
                # The end that the sign selects alone.
                low, high = (ppo_low, ppo_high * factor) if a > 0 else (ppo_low * factor, ppo_high)
                in_tail += factor < 1
                outside = r > 1 + high if a > 0 else r < 1 - low
                by_sat += bool(outside and 1 - ppo_low <= r <= 1 + ppo_high)
            if name == "gspo":
                r = sequence * (p - p.detach()).exp()
            if name in ("ppo_clip", "gspo"):
                free, bounded = r * a, r.clamp(1 - low, 1 + high) * a
                loss, clips = -w * torch.minimum(free, bounded), bool(bounded < free)
            elif name == "cispo":
                bounded = min(max(r.item(), 1 - low), 1 + high)
                loss, clips = -w * bounded * a * p, bounded != r.item()
            elif name == "sapo":
                temperature = SOFT["sapo"]["sapo_temperature_pos" if a > 0 else "sapo_temperature_neg"]
                loss, clips = -w * a * 4 / temperature / (1 + (-temperature * (r - 1)).exp()), False
            elif name == "dro":
                loss, clips = -w * (a * p - SOFT["dro"]["dro_beta"] / 2 * (p - q) ** 2), False
            elif name == "dppo_kl":
                p_now, p_old = p.exp().item(), q.exp().item()
                kl = p_old * math.log(p_old / p_now) + (1 - p_old) * math.log((1 - p_old) / (1 - p_now))
                clips = (kl > high and p_now > p_old) if a > 0 else (kl > low and p_now < p_old)
                loss = -w * r.item() * a * p * (not clips)
            else:
                gain = p.exp().item() - q.exp().item()
                clips = gain > high if a > 0 else gain < -low
                loss = -w * r.item() * a * p * (not clips)
            row_total, by_token, clipped = row_total + loss, by_token + loss.item(), clipped + clips
        total = total + (row_total / len(row) if name in BY_SAMPLE else row_total)
    mean = total / (rows if name in BY_SAMPLE else tokens)
    metrics = {"policy": by_token / count, "clip_fraction": clipped / count, "old_new_k3_kl": k3 / count}
    if narrowed is not None:
        metrics |= {"sat_tail_fraction": in_tail / count, "sat_clip_fraction": by_sat / count}
    return mean, metrics


def narrowings(samples, old):
    """SAT's factor of each token: tail mean / |D| where that is below 1, the mean over all samples."""
    sizes = [(o - s["rollout"]).abs().tolist() for o, s in zip(old, samples, strict=True)]
    mean = sum(map(sum, sizes)) / sum(map(len, sizes))
    return [[min(1.0, SAT_TAIL * mean / size) if size else 1.0 for size in row] for row in sizes]


def weights_of(name, samples, old):
    """Truncated weights pi_old / pi_rollout of each token: its own, or its sequence's."""
    d = [(o - s["rollout"]).tolist() for o, s in zip(old, samples, strict=True)]
    if name == "gspo":
        return [[min(math.exp(sum(row)), WEIGHT)] * len(row) for row in d]
    return [[min(math.exp(x), WEIGHT) for x in row] for row in d]


def trained(case, model_dir, samples, replicas):
    name = case.split()[0]
    model = load(model_dir)
    with torch.no_grad():
        old = [logprobs_of(model, sample)[0] for sample in samples]
    if case == BYPASS:  # no weights, and the ratio is the one to pi_rollout
        old = [sample["rollout"] for sample in samples]
    ratios = [(o - s["rollout"]).mean().exp().item() for o, s in zip(old, samples, strict=True)]
    left = [case not in REJECTING or KEPT[0] <= ratio <= KEPT[1] for ratio in ratios]
    weights, advantages, steps = weights_of(name, samples, old), advantages_of(samples, left), []
    if case == OTB:
        advantages = token_advantages_of(samples, [[True] * len(row) for row in old], weights)
    narrowed = narrowings(samples, old) if case == SAT else None
    for update in range(parts_of(case) * EPOCHS):
        whole = sample_part(update, replicas, parts_of(case))
        part = [i for i in whole if left[i]]
        counted = whole if REJECTING.get(case) == "valid" else part
        model.zero_grad()
        now = [logprobs_of(model, samples[i])[0] for i in part]
        loss, metrics = update_loss(
            name,
            [advantages[i] for i in part],
            now,
            [old[i] for i in part],
            [weights[i] for i in part],
            rows=len(counted),
            tokens=sum(len(old[i]) for i in counted),
            narrowed=narrowed and [narrowed[i] for i in part],
        )
        if case == OTB:
            metrics["power"] = sum(
                (w * a) ** 2 * (1 - 2 * math.exp(p) + c)
                for i in part
                for w, a, p, c in zip(
                    weights[i], advantages[i], old[i].tolist(), samples[i]["collision"].tolist(), strict=True
                )
            ) / len(part)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        metrics["grad_norm"] = math.sqrt(sum(g.square().sum().item() for g in grads))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= RATE * p.grad
        steps.append(metrics)
    weights = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return {"steps": steps, "weights": hf_named(weights)}


def main(model_dir, reference, out, *cases):
    torch.set_default_dtype(torch.float64)
    made = torch.load(reference, weights_only=True)
    samples, few = near(made["samples"]), near(made["truncated"]["samples"])
    tensor_files.save(
        {
            (case, replicas): trained(case, model_dir, few if case == TRUNCATED else samples, replicas)
            for case, replicas in map(json.loads, cases)
        },
        out,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
