"""The updates of branches_worker.py by Hugging Face autograd in float64, one sequence at a time.

Shares no code with the package. branches_reference.py MODEL_DIR REFERENCE.pt samples SAMPLES.pt saves the
sequences with the experts that the model chooses for their tokens; ... updates OUT.pt ORDERS makes the
updates of each case. ORDERS is JSON: case, behind "R3 " where experts are replayed -> orders -> updates ->
numbers of sequences.
"""

import json
import math
import statistics
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from branches_cases import CASES, KEPT, RATE, SCALE_LENGTH, WEIGHT, branched, labels_of
from hf_reference import hf_named_grads, load, logprobs_of


def with_routes(model, samples):
    """Each sequence with the experts of its tokens in each layer, [tokens, layers, k]."""
    found = []
    for sample in samples:
        ids = torch.cat([sample["prompt"], sample["output"]])
        with torch.no_grad():
            chosen = model(ids[None], output_router_logits=True).router_logits
        k = model.config.num_experts_per_tok
        found.append(sample | {"routes": torch.stack([one.topk(k).indices for one in chosen], dim=1)})
    return found


def replay(model, sample):
    """The next pass takes the sequence's experts, and not those that the routers would choose."""
    for layer, one in enumerate(model.model.layers):
        one.mlp.gate.forward = partial(_routed, one.mlp.gate, sample["routes"][:, layer])


def _routed(router, indices, hidden):
    logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    values = logits.softmax(dim=-1).gather(1, indices)
    if router.norm_topk_prob:
        values = values / values.sum(dim=-1, keepdim=True)
    return logits, values, indices


def episode_of(sample):
    return sample["group"], sample["sample"]


def advantages_of(kind, samples, old, kept):
    """The advantage of each sequence: a group's episodes count once, by the mean of their kept sequences."""
    values = []
    for sample in samples:
        rewards = {}
        for other, there in zip(samples, kept, strict=True):
            if there and other["group"] == sample["group"]:
                rewards.setdefault(episode_of(other), []).append(other["reward"])
        means = {name: sum(own) / len(own) for name, own in rewards.items()}
        others = [mean for name, mean in means.items() if name != episode_of(sample)]
        if kind == "rloo":
            values.append(sample["reward"] - sum(others) / len(others) if others else 0.0)
        elif kind == "own":
            tokens = sum(
                len(row)
                for row, other in zip(old, samples, strict=True)
                if episode_of(other) == episode_of(sample)
            )
            own = means.get(episode_of(sample), 0.0)
            baseline = sum(others) / max(len(others), 1)
            values.append((own - baseline) / math.sqrt(tokens) if episode_of(sample) in means else 0.0)
        else:
            mean = statistics.fmean(means.values())
            std = statistics.pstdev(means.values()) + 1e-6 if kind == "grpo" else 1.0
            values.append((sample["reward"] - mean) / std)
    if kind != "reinforce_plus_plus_baseline":
        return values
    tokens = [v for v, row, there in zip(values, old, kept, strict=True) for _ in row if there]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def loss_of(case, samples, advantages, old, now, kept, weights):
    """PPO's clip over an update's sequences. Returns (loss, mean over the tokens that are in it)."""
    aggregation, denominator, _, unit = CASES[case]
    sizes = {}
    for i, sample in enumerate(samples):
        name = episode_of(sample) if unit == "episode" else i
        counted = len(old[i]) if denominator == "valid" or kept[i] else 0
        sizes[name] = sizes.get(name, 0) + counted
    units, tokens = sum(size > 0 for size in sizes.values()), sum(sizes.values())
    total, plain, count = 0.0, 0.0, 0
    for i, sample in enumerate(samples):
        if not kept[i]:
            continue
        name = episode_of(sample) if unit == "episode" else i
        ratio = (now[i] - old[i]).exp()
        surrogate = torch.minimum(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i])
        losses = -torch.tensor(weights[i]) * surrogate
        share = {
            "token-mean": 1 / tokens,
            "seq-mean-token-mean": 1 / (sizes[name] * units),
            "seq-mean-token-sum": 1 / units,
            "seq-mean-token-sum-norm": 1 / (units * SCALE_LENGTH),
        }[aggregation]
        total, plain, count = total + share * losses.sum(), plain + losses.sum().item(), count + len(losses)
    return total, plain / count


def descended(case, replays, model_dir, samples, order):
    """([(log-probs by number, metrics, gradients) of every update], whether each sequence is kept)."""
    model = load(model_dir)

    def scored(sample):
        if replays:
            replay(model, sample)
        return logprobs_of(model, sample)[0]

    with torch.no_grad():
        old = list(map(scored, samples))
    d = [o - s["rollout"].float() for o, s in zip(old, samples, strict=True)]
    kept = [case == "unscored" or KEPT[0] <= x.mean().exp().item() <= KEPT[1] for x in d]
    weights = [x.exp().clamp(max=WEIGHT).tolist() for x in d]
    advantages, found = advantages_of(CASES[case][2], samples, old, kept), []
    for chosen in order:
        model.zero_grad()
        now = {i: scored(samples[i]) for i in chosen}
        lists = ((values[i] for i in chosen) for values in (samples, advantages, old, now, kept, weights))
        loss, policy = loss_of(case, *map(list, lists))
        loss.backward()
        metrics = {"loss/policy": policy}
        if not found:
            metrics |= batch_metrics(samples, old, kept)
        found.append(({i: row.detach() for i, row in now.items()}, metrics, hf_named_grads(model)))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= RATE * p.grad
    return found, {(s["group"], s["sample"], s["branch"]): k for s, k in zip(samples, kept, strict=True)}


def batch_metrics(samples, old, kept):
    """An episode counts once, a token once."""
    rewards, tokens = {}, sum(map(len, old))
    for sample in samples:
        rewards.setdefault(episode_of(sample), []).append(sample["reward"])
    means = [sum(own) / len(own) for own in rewards.values()]
    return {
        "reward/mean": statistics.fmean(means),
        "reward/std": statistics.pstdev(means),
        "reward/max": max(means),
        "reward/min": min(means),
        "response_length/mean": tokens / len(means),
        "rollout/by_fate/kept_length_mean": tokens / len(means),
        "rollout_corr/kept_fraction": sum(len(row) for row, there in zip(old, kept, strict=True) if there)
        / tokens,
    }


def main(model_dir, reference, what, out, orders="{}"):
    torch.set_default_dtype(torch.float64)
    if what == "samples":
        samples = torch.load(reference, weights_only=True)["many"]
        torch.save(with_routes(load(model_dir), samples), out)
        return
    samples = branched(torch.load(reference, weights_only=True))
    made = {
        (name, at): descended(name.removeprefix("R3 "), name.startswith("R3 "), model_dir, samples, order)
        for name, of_case in json.loads(orders).items()
        for at, order in enumerate(of_case)
    }
    plain = [{name: one[name] for name in ("group", "sample", "branch")} for one in samples]
    torch.save({"labels": [labels_of(one) for one in samples], "made": made, "samples": plain}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
