"""The updates of packed_updates_worker.py by Hugging Face autograd in float64 and plain descent, one
sample at a time.

Shares no code with the package. packed_updates_reference.py MODEL_DIR REFERENCE.pt OUT.pt ORDERS CASE ...
takes the samples of each update as the worker found them: ORDERS is JSON, [orders][updates][samples].
"""

import json
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from hf_reference import advantages_of, hf_named, hf_named_grads, load, logprobs_of
from updates_cases import BYPASS_KEPT, KEPT, PACKED_RATE, REJECTING, WEIGHT, near
from updates_reference import update_loss, weights_of


def bypass_loss(samples, advantages, now):
    """REINFORCE with the policy of this very update against pi_rollout: weights, rule and
    loss are made anew.
    """
    low, high = BYPASS_KEPT
    total, kept, count = 0.0, 0, sum(map(len, now))
    for sample, advantage, row in zip(samples, advantages, now, strict=True):
        d = (row.detach() - sample["rollout"]).tolist()
        if low <= math.exp(sum(d) / len(d)) <= high:
            kept += len(d)
            for x, p in zip(d, row, strict=True):
                total = total - min(math.exp(x), WEIGHT) * advantage * p
    return total / count, {"policy": total.item() / kept, "kept_fraction": kept / count}


def descended(case, model_dir, samples, order):
    """(log-probs, metrics, gradients) of every update, and the weights after the last one."""
    model = load(model_dir)
    with torch.no_grad():
        old = [logprobs_of(model, sample)[0] for sample in samples]
    ratios = [(o - s["rollout"]).mean().exp().item() for o, s in zip(old, samples, strict=True)]
    left = [case not in REJECTING or KEPT[0] <= ratio <= KEPT[1] for ratio in ratios]
    advantages, found = advantages_of(samples, left), []
    for chosen in order:
        model.zero_grad()
        now = {i: logprobs_of(model, samples[i])[0] for i in chosen}
        part = [i for i in chosen if left[i]]
        if case == "bypass":
            loss, metrics = bypass_loss(
                *zip(*((samples[i], advantages[i], now[i]) for i in part), strict=True)
            )
        else:
            weights, name = weights_of(case.split()[0], samples, old), case.split()[0]
            counted = chosen if REJECTING.get(case) == "valid" else part
            loss, metrics = update_loss(
                name,
                [advantages[i] for i in part],
                [now[i] for i in part],
                [old[i] for i in part],
                [weights[i] for i in part],
                rows=len(counted),
                tokens=sum(len(old[i]) for i in counted),
            )
        loss.backward()
        found.append(({i: row.detach() for i, row in now.items()}, metrics, hf_named_grads(model)))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= PACKED_RATE * p.grad
    return found, hf_named((name, parameter.detach()) for name, parameter in model.named_parameters())


def main(model_dir, reference, out, orders, *cases):
    torch.set_default_dtype(torch.float64)
    samples = near(torch.load(reference, weights_only=True)["many"])
    labels = [tuple(torch.cat([s["prompt"], s["output"]])[1:].tolist()) for s in samples]
    made = {
        (at, case): descended(case, model_dir, samples, order)
        for at, order in enumerate(json.loads(orders))
        for case in cases
    }
    torch.save({"labels": labels, "made": made}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
