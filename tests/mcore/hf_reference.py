"""The corrected loss and its gradient by Hugging Face autograd in float64, one sequence at a time, without our code.

python hf_reference.py MODEL_DIR OUT.pt: makes samples, rollout and old log-probs, and saves them with the results.
"""

import math
import sys

import torch
from transformers import AutoModelForCausalLM

GROUPS, GROUP_SIZE = 4, 4
CLIP, DUAL_CLIP, UPPER, GEO_LOW, GEO_HIGH = 0.2, 3.0, 1.02, 0.98, 1.03


def make_samples(model, generator):
    """Prompts and responses of unequal lengths, drawn at random: the loss does not care who wrote them."""
    samples = []
    for group in range(GROUPS):
        prompt = torch.randint(0, 80, (3 + group,), generator=generator)
        for _ in range(GROUP_SIZE):
            length = int(torch.randint(1, 12, (), generator=generator))
            output = torch.randint(0, 80, (length,), generator=generator)
            samples.append({"prompt": prompt, "output": output, "group": group})
    return samples


def logprobs_of(model, sample):
    """Log-probs of the response under the model, with gradient."""
    ids = torch.cat([sample["prompt"], sample["output"]])
    logits = model(ids[None]).logits[0]
    start = len(sample["prompt"])
    return torch.log_softmax(logits[start - 1 : -1], dim=-1).gather(1, ids[start:, None])[:, 0]


def main(model_dir, out):
    torch.set_default_dtype(torch.float64)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(5)
    samples = make_samples(model, generator)
    for sample in samples:
        with torch.no_grad():
            now = logprobs_of(model, sample)
        # pi_old stands off pi_theta (so that the clip acts), and pi_rollout off pi_old (so that weights and rules act).
        sample["old_shift"] = 0.25 * torch.randn(now.shape, generator=generator)
        sample["rollout"] = now + sample["old_shift"] + 0.1 * torch.randn(now.shape, generator=generator)
        sample["reward"] = float(torch.rand((), generator=generator))
    total, valid, kept, clipped, dual_clipped, rejected = 0.0, 0, 0, 0, 0, 0
    accepted = {}
    for index, sample in enumerate(samples):
        with torch.no_grad():
            old = logprobs_of(model, sample) + sample["old_shift"]
        ratios = [float(a - b) for a, b in zip(old, sample["rollout"], strict=True)]
        accepted[index] = GEO_LOW <= math.exp(sum(ratios) / len(ratios)) <= GEO_HIGH
        sample["weights"] = [min(math.exp(d), UPPER) for d in ratios]
        sample["old"] = old
        valid += len(ratios)
        rejected += not accepted[index]
    for group in range(GROUPS):
        rows = [i for i, s in enumerate(samples) if s["group"] == group]
        counted = [samples[i]["reward"] for i in rows if accepted[i]]
        if counted:
            mean = sum(counted) / len(counted)
            std = math.sqrt(sum((r - mean) ** 2 for r in counted) / len(counted))
        for i in rows:
            samples[i]["advantage"] = (samples[i]["reward"] - mean) / (std + 1e-6) if counted else 0.0
    for index, sample in enumerate(samples):
        if not accepted[index]:
            continue
        logprobs = logprobs_of(model, sample)
        for t in range(len(logprobs)):
            ratio = torch.exp(logprobs[t] - sample["old"][t])
            free = ratio * sample["advantage"]
            bounded = ratio.clamp(1 - CLIP, 1 + CLIP) * sample["advantage"]
            surrogate = torch.minimum(free, bounded)
            if surrogate < DUAL_CLIP * min(sample["advantage"], 0.0):
                surrogate = torch.tensor(DUAL_CLIP * sample["advantage"])
                dual_clipped += 1
            total = total - sample["weights"][t] * surrogate
            kept += 1
            clipped += bool(bounded < free)
    assert 0 < rejected < len(samples) and 0 < clipped < kept, "the case must exercise rejection and clip"
    assert dual_clipped > 0, "and the dual clip"
    (total / valid).backward()
    given = ("prompt", "output", "group", "old_shift", "rollout", "reward")
    torch.save({
        "samples": [{name: sample[name] for name in given} for sample in samples],
        "grads": hf_named_grads(model),
        "policy": float(total) / kept,
        "clip_fraction": clipped / kept,
        "kept_fraction": kept / valid,
        "kept_sequence_fraction": 1 - rejected / len(samples),
    }, out)


def hf_named_grads(model):
    """Gradients under checkpoint names: transformers keeps all experts of a layer in one tensor in memory."""
    grads = {}
    for name, parameter in model.named_parameters():
        # An expert that no token chose has no gradient at all.
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(grad):
                gate, up = both.chunk(2, dim=0)
                base = name.removesuffix("gate_up_proj") + str(expert)
                grads[f"{base}.gate_proj.weight"], grads[f"{base}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(grad):
                grads[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            grads[name] = grad
    return grads


if __name__ == "__main__":
    main(*sys.argv[1:])
