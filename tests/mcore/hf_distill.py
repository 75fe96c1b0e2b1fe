"""Losses of on-policy distillation and their gradients by Hugging Face autograd in float64, sample by sample.

Shares no code with the package. python hf_distill.py MODEL_DIR OUT.pt makes a teacher by moving every weight
of the model. The policy loss is REINFORCE, pi_old and pi_rollout are off pi_theta; one sample was not scored.
The KL over the teacher's likeliest ids is differentiated as that of distributions whose other ids are one
outcome.
"""

import math
import sys

import torch
from hf_reference import advantages_of, distribution_of, hf_named_grads, load, make_samples

X, TOP, UNSCORED = 0.6, 5, 6
CASES = ("sampled", "top", "top, sequences, rejected", "once, top")


def exact(distribution, sample):
    """(KL of H and the rest [n], with the gradient; sum_H p and sum_H t; log P - log Q) of each token."""
    inside = distribution.gather(1, sample["top_ids"])
    theirs = sample["top_logprobs"]
    p, t = inside.exp().sum(dim=1), theirs.exp().sum(dim=1)
    of_rest = (1 - p).log() - (1 - t).log()
    return (inside.exp() * (inside - theirs)).sum(dim=1) + (1 - p) * of_rest, p, t, of_rest.detach()


def weights_of(sample, row, name):
    old = row.detach() if name.startswith("once") else sample["old"]
    rho = (old - sample["rollout"]).exp()
    if "sequences" in name:
        return rho.prod().clamp(max=1.05).expand(len(rho)), (rho >= 0.9) & (rho <= 1.12)
    return rho.clamp(max=1.02), torch.ones_like(rho, dtype=torch.bool)


def case(samples, distributions, name):
    """The loss, and the metrics."""
    rewards = [s["reward"] for s in samples]
    advantages = rewards if "rejected" in name else advantages_of(samples, [True] * len(samples))
    total, count = 0.0, sum(len(s["output"]) for s in samples)
    kept, kls, tops, masses, missing = 0, 0.0, 0.0, torch.zeros(2), 0
    for number, (s, distribution, reward) in enumerate(zip(samples, distributions, advantages, strict=True)):
        row = distribution.gather(1, s["output"][:, None])[:, 0]
        weights, accepted = weights_of(s, row, name)
        taught = torch.zeros_like(row)
        if number != UNSCORED:
            far = (row - s["teacher"]).detach()
            if "top" in name:
                of_top, p, t, of_rest = exact(distribution, s)
                outside = ~(s["top_ids"] == s["output"][:, None]).any(dim=1)
                far = torch.where(outside, far - of_rest, 0.0)
                factor = weights if "sequences" in name else 1.0
                total = total + X * (factor * of_top)[accepted].sum()
                tops += float(of_top[accepted].sum())
                masses += torch.stack([p.detach()[accepted].sum(), t[accepted].sum()])
                kls += float(of_top[accepted].sum())
            kls += float(far[accepted].sum())
            taught, kept = -X * far, kept + int(accepted.sum())
        else:
            missing += int(accepted.sum())
        total = total - (weights * (reward + taught) * row)[accepted].sum()
    metrics = {"distill_kl": kls / kept, "distill_missing": missing}
    if "top" in name:
        metrics |= {"distill_top_kl": tops / kept}
        metrics |= dict(
            zip(("distill_student_mass", "distill_teacher_mass"), (masses / kept).tolist(), strict=True)
        )
    return total / count, {f"loss/{key}": value for key, value in metrics.items()}


def main(model_dir, out):
    torch.set_default_dtype(torch.float64)
    model, generator = load(model_dir), torch.Generator().manual_seed(17)
    teacher = load(model_dir)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    samples, found = make_samples(generator), {}
    for s in samples:
        with torch.no_grad():
            now = distribution_of(model, s).gather(1, s["output"][:, None])[:, 0]
            theirs = distribution_of(teacher, s)
        s["teacher"] = theirs.gather(1, s["output"][:, None])[:, 0]
        s["top_logprobs"], s["top_ids"] = theirs.topk(TOP, dim=1)
        s["old_shift"] = 0.25 * torch.randn(now.shape, generator=generator)
        s["old"] = now + s["old_shift"]
        s["rollout"] = s["old"] + 0.1 * torch.randn(now.shape, generator=generator)
        s["reward"] = float(torch.rand((), generator=generator))
    hits = torch.cat([(s["top_ids"] == s["output"][:, None]).any(dim=1) for s in samples])
    assert 0 < hits.sum() < len(hits) and math.isfinite(samples[0]["reward"])
    for name in CASES:
        model.zero_grad()
        loss, metrics = case(samples, [distribution_of(model, s) for s in samples], name)
        loss.backward()
        found[name] = {"grads": hf_named_grads(model), "metrics": metrics}
    torch.save({"samples": samples, "cases": found, "unscored": UNSCORED}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
