"""The response log-probs that a Hugging Face MoE in float32 gives, and where another engine can
be held to them.

S tokens, R response tokens, V words. Two engines round a router's logits by about 1e-7 each. Where the
last expert chosen and the first left out are nearer than that, each may take another one, and from that
token on the two are apart by 1e-3 and more, both right. One of the tiny model's tokens in several thousand
is so near that it is left out here.
"""

from itertools import pairwise

import torch

TIE = 1e-5
"""Two router logits, of order 1, that are further apart are ranked alike by both engines."""


def scored(model, ids, **options):
    """(logits [S, V], settled [S] bool, the model's output). Settled: no near tie at the token or
    at an earlier one.
    """
    with torch.no_grad():
        out = model(ids[None], output_router_logits=True, **options)
    chosen = model.config.num_experts_per_tok
    nearest = torch.full(ids.shape, torch.inf)
    for router in out.router_logits:  # of each layer, [S, experts]
        best = router.topk(chosen + 1).values
        nearest = torch.minimum(nearest, best[:, -2] - best[:, -1])
    return out.logits[0], (nearest > TIE).cummin(0).values, out


def response(model, trajectory):
    """(logits [R, V] that the response's tokens were drawn from, settled [R])."""
    ids = torch.cat([trajectory.prompt_ids, trajectory.output_ids])
    logits, settled, _ = scored(model, ids)
    at = slice(trajectory.prompt_ids.numel() - 1, -1)
    return logits[at], settled[at]


def over_changes(models, trajectory, starts, *, in_place):
    """([R] log-probs, [R] settled) of a response whose weights were changed while it was sampled.

    Args:
        models: by weights' name.
        starts: [(first token, weights), ...].
        in_place: keys and values were kept over a change; else they were computed anew.
    """
    ids = torch.cat([trajectory.prompt_ids, trajectory.output_ids])
    prompt, total = trajectory.prompt_ids.numel(), ids.numel()
    # The pass that samples token t has token t - 1 as its last input.
    bounds = [0, *(prompt - 1 + start for start, _ in starts[1:]), total - 1]
    logits, settled, cache = [], [], None
    for (begin, end), (_, name) in zip(pairwise(bounds), starts, strict=True):
        if in_place:
            out, sure, whole = scored(models[name], ids[begin:end], past_key_values=cache, use_cache=True)
            cache = whole.past_key_values
        else:
            out, sure = (each[begin:] for each in scored(models[name], ids[:end])[:2])
        logits.append(out)
        settled.append(sure)
    settled = torch.cat(settled).cummin(0).values if in_place else torch.cat(settled)
    logprobs = torch.log_softmax(torch.cat(logits)[prompt - 1 :], -1)
    return logprobs.gather(1, trajectory.output_ids[:, None])[:, 0], settled[prompt - 1 :]


def inside(trajectory, vocab_size):
    """[R, V] bool: the ids in the support of each of the response's tokens."""
    support = trajectory.support
    sets = [set(ids.tolist()) for ids in support.ids.split(support.lengths.tolist())]
    return torch.tensor([[token in ids for token in range(vocab_size)] for ids in sets])


def assert_is_truth(trajectory, model, *, atol, temperature=1.0, tokens=slice(None)):
    """The rollout log-probs are log softmax(logits / temperature), on the support if it is known,
    at `tokens` [R].
    """
    logits, settled = response(model, trajectory)
    logits = logits / temperature
    if trajectory.support is not None:
        logits = logits.masked_fill(~inside(trajectory, logits.shape[1]), -torch.inf)
    expected = torch.log_softmax(logits, -1).gather(1, trajectory.output_ids[:, None])[:, 0]
    compared = torch.zeros_like(settled)
    compared[tokens] = settled[tokens]
    torch.testing.assert_close(trajectory.rollout_logprobs[compared], expected[compared], atol=atol, rtol=0)
