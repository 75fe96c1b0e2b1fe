"""Losses with KL penalties, and their gradients, by Hugging Face autograd in float64, one sequence at a time.

Shares no code with the package. python hf_kl.py MODEL_DIR OTHER_DIR OUT.pt makes another model by
moving every weight of the first one, saves it in OTHER_DIR, and takes it for the reference policy. The
policy loss is REINFORCE with pi_old and pi_rollout off pi_theta, and truncated token weights; each
case adds penalties.
"""

import sys

import torch
from hf_reference import advantages_of, hf_named_grads, load, logprobs_of, make_samples, truncated
from transformers import AutoModelForCausalLM

CASES = {
    "k1, squared": ({"loss": "k1"}, {"sampler": "squared"}),
    "k2, sampler k3": ({"loss": "k2"}, {"sampler": "k3"}),
    "k3, reward k1": ({"loss": "k3"}, {"reward": "k1"}),
    "k3+": ({"loss": "k3+"}, {}),
    "unbiased, reward k3": ({"loss": "unbiased"}, {"reward": "k3"}),
}
LOSS, SAMPLER, REWARD = 0.3, 0.2, 0.05


def estimate(kind, d):
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    return ((-d).exp() - 1 + d).clamp(max=10)


def penalty(kind, now, old, ref, weight):
    """(what is differentiated, its reported value) of one sequence's tokens."""
    d = now - ref
    if kind == "k3+":  # the gradient of k2, reported as k3
        return d * d / 2, estimate("k3", d.detach())
    if kind == "unbiased":  # as the paper has it: the product is differentiated through both factors
        product = (now - old).exp() * weight * ((ref - now).exp() - (ref - now) - 1)
        return product, product.detach()
    return estimate(kind, d), estimate(kind, d.detach())


def case(samples, now, kinds):
    """The loss (whose gradient counts), and the metrics."""
    taken = [0.0] * len(samples)
    if "reward" in kinds:
        taken = [REWARD * float(estimate(kinds["reward"], s["old"] - s["ref"]).sum()) for s in samples]
    lowered = [s | {"reward": s["reward"] - t} for s, t in zip(samples, taken, strict=True)]
    advantages = advantages_of(lowered, [True] * len(samples))
    count = sum(map(len, now))
    total, reference, sampler = 0.0, 0.0, 0.0
    for s, row, advantage in zip(samples, now, advantages, strict=True):
        weight = (s["old"] - s["rollout"]).exp().clamp(max=1.02)
        total = total - (weight * advantage * row).sum()
        through, value = penalty(kinds["loss"], row, s["old"], s["ref"], weight)
        total, reference = total + LOSS * through.sum(), reference + float(value.sum())
        if "sampler" in kinds:
            far = row - s["rollout"]
            own = far * far if kinds["sampler"] == "squared" else (far.exp() - 1 - far).clamp(max=10)
            total, sampler = total + SAMPLER * own.sum(), sampler + float(own.sum())
    metrics = {"loss/reference_kl": reference / count, "loss/reference_missing": 0.0}
    metrics |= {"loss/sampler_kl": sampler / count} if "sampler" in kinds else {}
    metrics |= {"reward/reference_kl": sum(taken) / len(taken)} if "reward" in kinds else {}
    return total / count, metrics


def results(model, other, samples, names, generator):
    for s in samples:
        with torch.no_grad():
            now, s["ref"] = logprobs_of(model, s)[0], logprobs_of(other, s)[0]
        s["old_shift"] = 0.25 * torch.randn(now.shape, generator=generator)
        s["old"] = now + s["old_shift"]
        s["rollout"] = s["old"] + 0.1 * torch.randn(now.shape, generator=generator)
        s["reward"] = float(torch.rand((), generator=generator))
    far = torch.cat([s["old"] - s["ref"] for s in samples])
    assert far.abs().max() > 0.5, "the reference must stand off"
    found = {}
    for name in names:
        model.zero_grad()
        now = [logprobs_of(model, s)[0] for s in samples]
        loss, metrics = case(samples, now, CASES[name][0] | CASES[name][1])
        loss.backward()
        found[name] = {"grads": hf_named_grads(model), "metrics": metrics}
    return {"samples": samples, "cases": found}


def main(model_dir, other_dir, out):
    torch.set_default_dtype(torch.float64)
    model, generator = load(model_dir), torch.Generator().manual_seed(11)
    other = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
    other.save_pretrained(other_dir)
    other, samples = load(other_dir), make_samples(generator)
    found = results(model, other, samples, CASES, generator)
    few = results(model, other, truncated(samples, generator), ["k3, reward k1"], generator)
    torch.save(found | {"truncated": few}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
