"""Corrected losses, gradients and log-probs by Hugging Face autograd in float64, one sequence at a time.

Shares no code with the package. python hf_reference.py MODEL_DIR OUT.pt makes samples, rollout and old
log-probs, and saves them with the results of each case: "token" (PPO clip, token weights, two rules,
mean over tokens), "sequence" (GSPO, sequence weights, seq_max rule, mean over sequences), "bypass" (two
policies, REINFORCE), and with pi_old the current policy "once token" (PPO clip, token weights) and
"once sequence" (GSPO, sequence weights). Under "truncated" "token" and "bypass" once more, for samples
whose tokens were each drawn from a few ids; under "odd" all cases for samples of odd lengths; under
"masked" two cases where some samples are not in the loss, and in their group's baseline. Under "centered"
samples with the likeliest ids of the policy that sampled, and two cases with score centering. Under "many"
more samples, alone.
"""

import math
import sys
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM

GROUPS, GROUP_SIZE = 4, 4
MANY = 6
"""Groups of the samples that several updates share."""
ODD = ((1, (24, 0, 1, 8)), (3, (0, 22, 9, 2)), (1, (0, 12, 14, 11)), (5, (17, 18, 11, 16)))
"""Prompts and responses of odd lengths, group by group: no response, a prompt of one token, 24
positions of 24.
"""
MASKED = (1, 2, 7, 12, 13, 14, 15)
"""Two of a group, one, none, and all of the last."""
TOP, UPPER = 6, 1.02
"""Ids of each token that score centering knows, and the upper bound of its weights where it has some."""
TRUNCATED_SEED = 0
"""One whose samples exercise every part of the cases."""


def make_samples(generator, groups=GROUPS):
    """Prompts and responses of unequal lengths, drawn at random: the loss does not care who wrote them."""
    samples = []
    for group in range(groups):
        prompt = torch.randint(0, 80, (3 + group,), generator=generator)
        for _ in range(GROUP_SIZE):
            length = int(torch.randint(1, 12, (), generator=generator))
            output = torch.randint(0, 80, (length,), generator=generator)
            samples.append({"prompt": prompt, "output": output, "group": group})
    return samples


def odd_samples(generator):
    """Samples of the lengths ODD."""
    samples = []
    for group, (start, lengths) in enumerate(ODD):
        prompt = torch.randint(0, 80, (start,), generator=generator)
        outputs = [torch.randint(0, 80, (length,), generator=generator) for length in lengths]
        samples += [{"prompt": prompt, "output": output, "group": group} for output in outputs]
    return samples


def distribution_of(model, sample):
    """Log-probs of all ids at each token of the response, [n, V], -inf for those that it can't have
    been drawn from.
    """
    ids = torch.cat([sample["prompt"], sample["output"]])
    start = len(sample["prompt"])
    logits = model(ids[None]).logits[0, start - 1 : -1]
    if "support" in sample:
        outside = torch.ones(logits.shape, dtype=torch.bool)
        for t, among in enumerate(sample["support"]):
            outside[t, among] = False
        logits = logits.masked_fill(outside, -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def logprobs_of(model, sample):
    """Log-probs of the response under the model, with gradient, and the entropies."""
    distribution = distribution_of(model, sample)
    entropy = -torch.where(distribution > -torch.inf, distribution.exp() * distribution, 0.0).sum(dim=-1)
    return distribution.gather(1, sample["output"][:, None])[:, 0], entropy.detach()


def truncated(samples, generator):
    """The same prompts and responses; every third token was drawn from itself alone, the others
    from up to 9 ids.
    """
    found = []
    for sample in samples:
        support = []
        for t, token in enumerate(sample["output"].tolist()):
            size = 0 if t % 3 == 1 else int(torch.randint(1, 9, (), generator=generator))
            others = [i for i in torch.randperm(80, generator=generator).tolist() if i != token][:size]
            at = int(torch.randint(0, size + 1, (), generator=generator))
            support.append(torch.tensor([*others[:at], token, *others[at:]]))
        found.append({name: sample[name] for name in ("prompt", "output", "group")} | {"support": support})
    return found


def advantages_of(samples, accepted):
    """(reward - mean) / (std + 1e-6) over the accepted and masked rows of each prompt; 0
    where there are none.
    """
    advantages = []
    for sample in samples:
        rows = [i for i, other in enumerate(samples) if other["group"] == sample["group"]]
        rewards = [samples[i]["reward"] for i in rows if accepted[i] or samples[i].get("masked")]
        mean = sum(rewards) / max(len(rewards), 1)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(len(rewards), 1))
        advantages.append((sample["reward"] - mean) / (std + 1e-6) if rewards else 0.0)
    return advantages


def quadrants_of(tokens):
    """Shares of tokens, and of |w A|, by the signs of A and of D.

    tokens: (A, D of the current policy, w, divided as the loss is) of those in the loss.
    """
    signs = {"good_above": (1, 1), "bad_below": (-1, -1), "good_below": (1, -1), "bad_above": (-1, 1)}
    total, found = sum(abs(w * a) for a, _, w in tokens), {}
    for name, (of_a, of_d) in signs.items():
        mine = [(w, a) for a, d, w in tokens if a * of_a > 0 and d * of_d > 0]
        found[f"rollout_corr/quadrant/{name}"] = len(mine) / len(tokens)
        found[f"rollout_corr/quadrant/{name}_mass"] = sum(abs(w * a) for w, a in mine) / total
    return found


def token_case(samples, now, old):
    """Weights min(rho, 1.02) over their mean; geometric mean of rho in [0.98, 1.03] and each
    rho in [0.9, 1.12].
    """
    d = [(o - s["rollout"]).tolist() for o, s in zip(old, samples, strict=True)]
    accepted = [bool(row) and 0.98 <= math.exp(sum(row) / len(row)) <= 1.03 for row in d]
    advantages = advantages_of(samples, accepted)
    weights = [[min(math.exp(x), 1.02) for x in row] for row in d]
    valid = sum(map(len, d))
    average = sum(map(sum, weights)) / valid
    total, kept, clipped, dual, moved, directed = 0.0, 0, 0, 0, [], []
    for i, row in enumerate(d):
        for t, x in enumerate(row):
            if not accepted[i] or not 0.9 <= math.exp(x) <= 1.12:
                continue
            kept += 1
            directed.append((advantages[i], (now[i][t] - samples[i]["rollout"][t]).item(), weights[i][t]))
            moved.append((now[i][t] - old[i][t]).item())
            advantage, ratio = advantages[i], torch.exp(now[i][t] - old[i][t])
            free, bounded = ratio * advantage, ratio.clamp(0.8, 1.2) * advantage
            surrogate = torch.minimum(free, bounded)
            clipped += bool(bounded < free)
            if advantage < 0 and surrogate < 3.0 * advantage:
                surrogate, dual = torch.tensor(3.0 * advantage), dual + 1
            total = total - weights[i][t] / average * surrogate
    assert 0 < sum(accepted) < len(samples) and 0 < clipped < kept < valid and dual, (
        "the case must exercise them all"
    )
    return (
        total / valid,
        {
            "policy": total.item() / kept,
            "clip_fraction": clipped / kept,
            "dual_clip_fraction": dual / kept,
            "rollout_corr/kept_fraction": kept / valid,
            **quadrants_of(directed),
        },
        moved,
    )


def sequence_case(samples, now, old):
    """GSPO's sequence form; weights min(prod rho, 1.05); each rho in [0.8, 1.25]; mean
    over kept sequences.
    """
    d = [(o - s["rollout"]).tolist() for o, s in zip(old, samples, strict=True)]
    accepted = [bool(row) and all(0.8 <= math.exp(x) <= 1.25 for x in row) for row in d]
    advantages = advantages_of(samples, accepted)
    total, by_token, clipped, kept, moved, directed = 0.0, 0.0, 0, 0, [], []
    for i, row in enumerate(d):
        if not accepted[i]:
            continue
        weight = min(math.exp(sum(row)), 1.05) / len(row)
        directed += [
            (advantages[i], gap, weight) for gap in (now[i].detach() - samples[i]["rollout"]).tolist()
        ]
        ratio = (now[i] - old[i]).mean().exp()
        free, bounded = ratio * advantages[i], ratio.clamp(0.95, 1.08) * advantages[i]
        loss = -min(math.exp(sum(row)), 1.05) * torch.minimum(free, bounded)
        total, by_token = total + loss, by_token + len(row) * loss.item()
        clipped, kept = clipped + len(row) * bool(bounded < free), kept + len(row)
        moved += (now[i] - old[i]).tolist()
    assert 0 < sum(accepted) < len(samples) and 0 < clipped < kept, (
        "the case must exercise rejection and clip"
    )
    metrics = {"policy": by_token / kept, "clip_fraction": clipped / kept, **quadrants_of(directed)}
    return total / sum(accepted), metrics, moved


def bypass_case(samples, now, old):
    """The current policy against pi_rollout: weights min(rho, 1.1); geometric mean of rho in [0.8, 1.25]."""
    d = [(n.detach() - s["rollout"]).tolist() for n, s in zip(now, samples, strict=True)]
    accepted = [bool(row) and 0.8 <= math.exp(sum(row) / len(row)) <= 1.25 for row in d]
    advantages = advantages_of(samples, [bool(row) for row in d])
    total, kept, moved, directed = 0.0, 0, [], []
    for i, row in enumerate(d):
        for t, x in enumerate(row):
            if accepted[i]:
                directed.append((advantages[i], x, min(math.exp(x), 1.1)))
                total, kept = total - min(math.exp(x), 1.1) * advantages[i] * now[i][t], kept + 1
                moved.append(x)  # pi_rollout is pi_old
    assert 0 < sum(accepted) < sum(map(bool, d)), "the case must exercise rejection"
    return total / sum(map(len, d)), {"policy": total.item() / kept, **quadrants_of(directed)}, moved


def whitened_of(samples, accepted):
    """r - the group's mean, less its mean and over its deviation over the tokens of accepted rows;
    as masked_whiten.
    """
    values = []
    for sample in samples:
        rows = [
            other["reward"]
            for other, there in zip(samples, accepted, strict=True)
            if there and other["group"] == sample["group"]
        ]
        values.append(sample["reward"] - sum(rows) / len(rows) if rows else 0.0)
    tokens = [v for v, s, there in zip(values, samples, accepted, strict=True) for _ in s["output"] if there]
    mean = sum(tokens) / len(tokens)
    variance = sum((v - mean) ** 2 for v in tokens) / (len(tokens) - 1)
    return [(v - mean) / math.sqrt(variance + 1e-8) for v in values]


def token_advantages_of(samples, kept, weights):
    """r - B of each token, B the rewards of the group at its position weighed by sum_j w^2 (1 - 2
    p + sum_v p_v^2).

    A token that is not kept counts nowhere; one of a masked sample counts with weight 1. kept,
    weights: [tokens] each.
    """
    energies = []  # so far, by token; None where it does not count
    for i, sample in enumerate(samples):
        total, masked = 0.0, sample.get("masked", False)
        energies.append([])
        for t, (logprob, collision) in enumerate(zip(sample["now"], sample["collision"], strict=True)):
            counts, weight = (True, 1.0) if masked else (kept[i][t], weights[i][t])
            total += counts * weight**2 * (1 - 2 * math.exp(logprob) + collision.item())
            energies[-1].append(total if counts else None)
    advantages = []
    for sample in samples:
        rows = [j for j, other in enumerate(samples) if other["group"] == sample["group"]]
        advantages.append([])
        longest = max(len(energies[j]) for j in rows)
        if all(
            sum(t < len(energies[j]) and energies[j][t] is not None for j in rows) < 2 for t in range(longest)
        ):
            advantages[-1] = [0.0] * len(sample["output"])  # nobody to compare with anywhere
            continue
        for t in range(len(sample["output"])):
            there = [
                (samples[j]["reward"], energies[j][t] + 1e-8)
                for j in rows
                if t < len(energies[j]) and energies[j][t] is not None
            ]
            baseline = (
                sum(r * energy for r, energy in there) / sum(energy for _, energy in there) if there else 0.0
            )
            advantages[-1].append(sample["reward"] - (baseline if len(there) > 1 else 0.0))
    return advantages


def once_otb_case(samples, now, old):
    """Token advantages; weights min(rho, 1.02), each rho in [0.9, 1.12], mean over tokens."""
    ratios = [
        [math.exp(p.item() - q.item()) for p, q in zip(row, s["rollout"], strict=True)]
        for row, s in zip(now, samples, strict=True)
    ]
    kept = [[0.9 <= rho <= 1.12 for rho in row] for row in ratios]
    weights = [[min(rho, 1.02) for rho in row] for row in ratios]
    advantages, total, count = token_advantages_of(samples, kept, weights), 0.0, sum(map(len, now))
    directed = []
    for i, row in enumerate(now):
        for t, p in enumerate(row):
            if kept[i][t]:
                directed.append((advantages[i][t], math.log(ratios[i][t]), weights[i][t]))
                total = total - weights[i][t] * advantages[i][t] * (p - p.detach()).exp()
    left = sum(map(sum, kept))
    assert 0 < left < count, "the case must exercise rejection"
    metrics = {"policy": total.item() / left, "clip_fraction": 0.0, "dual_clip_fraction": 0.0}
    return total / count, metrics | quadrants_of(directed), [0.0] * left


def own_of(samples, accepted):
    """own_functions.leave_best_out, sample by sample."""
    advantages = []
    for i, sample in enumerate(samples):
        others = [
            other["reward"]
            for j, (other, there) in enumerate(zip(samples, accepted, strict=True))
            if there and j != i and other["group"] == sample["group"]
        ]
        baseline = sum(others) / max(len(others), 1)
        advantages.append((sample["reward"] - baseline) / math.sqrt(max(len(sample["output"]), 1)))
    return advantages


def soft_gated(ratio):
    """own_functions.soft_gate's factor of -w A."""
    return ratio * 2 * torch.sigmoid(4 * (ratio - 1))


def once_token_case(samples, now, old, advantages_of=advantages_of, of_ratio=lambda ratio: ratio):
    """pi_old is the current policy, so r = 1; weights min(rho, 1.02), mean over tokens."""
    advantages, total, count, cut = advantages_of(samples, [len(row) > 0 for row in now]), 0.0, 0, 0
    directed = []
    for sample, advantage, row in zip(samples, advantages, now, strict=True):
        for p, rollout in zip(row, sample["rollout"], strict=True):
            rho = math.exp(p.item() - rollout.item())
            directed.append((advantage, math.log(rho), min(rho, 1.02)))
            total = total - min(rho, 1.02) * advantage * of_ratio((p - p.detach()).exp())
            count, cut = count + 1, cut + (rho > 1.02)
    assert 0 < cut < count, "the case must exercise the bound"
    metrics = {"policy": total.item() / count, "clip_fraction": 0.0, "dual_clip_fraction": 0.0}
    return total / count, metrics | quadrants_of(directed), [0.0] * count


def once_sequence_case(samples, now, old):
    """The same with weights min(prod rho, 1.05), and the mean over sequences of the mean
    over their tokens.
    """
    there = [len(row) > 0 for row in now]
    advantages, total, by_token, directed = advantages_of(samples, there), 0.0, 0.0, []
    for sample, advantage, row in zip(samples, advantages, now, strict=True):
        if not len(row):
            continue
        weight = min(math.exp((row.detach() - sample["rollout"]).sum().item()), 1.05)
        gaps = (row.detach() - sample["rollout"]).tolist()
        directed += [(advantage, gap, weight / len(row)) for gap in gaps]
        losses = -weight * advantage * (row - row.detach()).exp()
        total, by_token = total + losses.mean(), by_token + losses.sum().item()
    count = sum(map(len, now))
    metrics = {"policy": by_token / count, "clip_fraction": 0.0, **quadrants_of(directed)}
    return total / sum(there), metrics, [0.0] * count


def once_centered_case(samples, now, old, upper=None):
    """pi_old is the current policy; weights min(rho, upper), or none; and to the loss of each token is added
    A sum_H (m - alpha p) log p, m and alpha constant.
    """
    advantages, total, by_token, sizes = advantages_of(samples, [len(row) > 0 for row in now]), 0.0, 0.0, []
    directed = []
    for sample, advantage, row in zip(samples, advantages, now, strict=True):
        for t, p in enumerate(row):
            rho = math.exp(p.item() - sample["rollout"][t].item())
            directed.append((advantage, math.log(rho), 1.0 if upper is None else min(rho, upper)))
            loss = -(1.0 if upper is None else min(rho, upper)) * advantage * (p - p.detach()).exp()
            by_token += loss.item()
            of_p = sample["top_now"][t].detach().exp().tolist()
            of_q = sample["top_logprobs"][t].exp().tolist()
            tails = 1 - sum(of_p), 1 - sum(of_q)
            ratio, drift = tails[1] / max(tails[0], 1e-6), 0.0
            alpha = ratio if upper is None else min(1.0, upper * ratio)
            for x, y, log_p in zip(of_p, of_q, sample["top_now"][t], strict=True):
                m = y if upper is None else min(x, upper * y)
                loss = loss + advantage * (m - alpha * x) * log_p
                drift += abs(m - alpha * x)
            total = total + loss
            sizes.append([*tails, drift])
    count = len(sizes)
    train_tail, rollout_tail, drift = (sum(column) / count for column in zip(*sizes, strict=True))
    metrics = {"policy": by_token / count, "clip_fraction": 0.0, "dual_clip_fraction": 0.0}
    metrics |= quadrants_of(directed) | {
        "centering_train_tail": train_tail,
        "centering_rollout_tail": rollout_tail,
        "centering_drift": drift,
    }
    return total / count, metrics, [0.0] * count


CASES = {
    "token": token_case,
    "sequence": sequence_case,
    "bypass": bypass_case,
    "once token": once_token_case,
    "once sequence": once_sequence_case,
    "once plus plus": partial(once_token_case, advantages_of=whitened_of),
    "once own": partial(once_token_case, advantages_of=own_of, of_ratio=soft_gated),
    "once otb": once_otb_case,
}
CENTERED_CASES = {
    "once centered": once_centered_case,
    "once centered token": partial(once_centered_case, upper=UPPER),
}


def main(model_dir, out):
    torch.set_default_dtype(torch.float64)
    model, generator = load(model_dir), torch.Generator().manual_seed(5)
    samples = make_samples(generator)
    found = results(model, samples, generator, CASES)
    generator = torch.Generator().manual_seed(TRUNCATED_SEED)
    few = results(model, truncated(samples, generator), generator, ("token", "bypass", "once otb"))
    odd = results(model, odd_samples(generator), generator, CASES)
    masked = [dict(one) | {"masked": number in MASKED} for number, one in enumerate(make_samples(generator))]
    masked = results(model, masked, generator, ("token", "once sequence", "once otb"))
    many = sampled(model, make_samples(generator, MANY), generator)
    centered = [one | {"top": TOP} for one in make_samples(generator)]
    centered = results(model, centered, generator, CENTERED_CASES)
    torch.save(
        found | {"truncated": few, "odd": odd, "masked": masked, "many": many, "centered": centered}, out
    )


def load(folder):
    """The model in float64, in the plainest code that transformers has."""
    sparse = AutoConfig.from_pretrained(folder).model_type in ("qwen3_moe", "deepseek_v3")
    experts = {"experts_implementation": "eager"} if sparse else {}
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", **experts
    ).eval()


def sampled(model, samples, generator):
    """The samples with their log-probs and rewards."""
    for sample in samples:
        with torch.no_grad():
            now, _ = logprobs_of(model, sample)
            sample["collision"] = distribution_of(model, sample).exp().square().sum(dim=-1)
        # pi_old stands off pi_theta (so that the clip acts), and pi_rollout off pi_old (so that
        # weights and rules act).
        sample["now"] = now
        sample["old_shift"] = 0.25 * torch.randn(now.shape, generator=generator)
        sample["old_shift"][::4] *= 5.0  # far enough for the dual clip
        sample["old"] = now + sample["old_shift"]
        sample["rollout"] = sample["old"] + 0.1 * torch.randn(now.shape, generator=generator)
        sample["reward"] = float(torch.rand((), generator=generator))
        if "top" in sample:
            with torch.no_grad():
                distribution = distribution_of(model, sample)
            noise = 0.3 * torch.randn(distribution.shape, generator=generator)
            distribution = (distribution + noise).log_softmax(dim=-1)
            sample["rollout"] = distribution.gather(1, sample["output"][:, None])[:, 0]
            sample["top_logprobs"], sample["top_ids"] = distribution.topk(sample["top"], dim=-1)
    return samples


def results(model, samples, generator, names):
    """The samples with their log-probs, what each case of these names gives, and the entropy."""
    samples, cases = sampled(model, samples, generator), {}
    for name in names:
        model.zero_grad()
        scored = [logprobs_of(model, sample) for sample in samples]
        now, old = [logprobs for logprobs, _ in scored], [sample["old"] for sample in samples]
        given = [
            one | {"top_now": distribution_of(model, one).gather(1, one["top_ids"])} if "top" in one else one
            for one in samples
        ]
        # A masked sample has no token that the loss sees.
        loss, metrics, moved = (CASES | CENTERED_CASES)[name](
            [one | {"rollout": one["rollout"][:0]} if one.get("masked") else one for one in given],
            *(
                [row[:0] if one.get("masked") else row for one, row in zip(samples, rows, strict=True)]
                for rows in (now, old)
            ),
        )
        loss.backward()
        cases[name] = {"grads": hf_named_grads(model), "metrics": metrics, "moved": moved}
    entropy = torch.cat([entropy for _, entropy in scored]).mean().item()
    return {"samples": samples, "cases": cases, "entropy": entropy}


def hf_named_grads(model):
    """Gradients under checkpoint names."""
    # An expert that no token chose has no gradient at all.
    return hf_named(
        (name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
        for name, parameter in model.named_parameters()
    )


def hf_named(named):
    """(name, tensor) pairs under checkpoint names: transformers keeps all experts of a
    layer in one tensor.
    """
    found = {}
    for name, tensor in named:
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                base = name.removesuffix("gate_up_proj") + str(expert)
                found[f"{base}.gate_proj.weight"], found[f"{base}.up_proj.weight"] = both.chunk(2, dim=0)
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                found[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            found[name] = tensor
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
