"""A second policy beside the table: a causal transformer so small that its responses can be listed too.

B policies, V tokens, T tokens in a response, S responses, W prefixes, P parameters, D its width. One layer:
embeddings of token and place, one head of attention, a tanh network of 2 D units, both with a residual, and
logits. All is float64. Other than in a table, all tokens before matter, and what one prefix learns moves
others.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import jvp, vmap

from lab.policies import World

WIDTH = 4
DIRECTIONS_AT_ONCE = 16


def _shapes(world: World) -> dict[str, tuple[int, int]]:
    square = (WIDTH, WIDTH)
    return {
        "tokens": (world.contexts, WIDTH),
        "places": (world.length, WIDTH),
        "queries": square,
        "keys": square,
        "values": square,
        "inner": (WIDTH, 2 * WIDTH),
        "outer": (2 * WIDTH, WIDTH),
        "logits": (WIDTH, world.vocabulary),
    }


def random_weights(world: World, batch: int, *, spread: float, seed: int) -> Tensor:
    """theta [B, P]: independent normal weights; spread is about the standard deviation of a logit."""
    generator = torch.Generator().manual_seed(seed)
    scales = {"tokens": 1.0, "places": 1.0, "logits": spread / WIDTH**0.5}
    drawn = [
        scales.get(name, shape[0] ** -0.5)
        * torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
        for name, shape in _shapes(world).items()
    ]
    return torch.cat([one.flatten(start_dim=1) for one in drawn], dim=1)


def logits_of(world: World, theta: Tensor) -> Tensor:
    """The logits of the next token behind each prefix: [W, V] of theta [P]."""
    parts = theta.split([rows * columns for rows, columns in _shapes(world).values()])
    weights = {
        name: part.view(shape) for part, (name, shape) in zip(parts, _shapes(world).items(), strict=True)
    }
    # each prefix is the beginning of the responses that go on with zeros, and is read off the first of them
    last = world.vocabulary ** (world.length - 1)
    contexts = world.contexts_of(world.responses[:: world.vocabulary])
    hidden = weights["tokens"][contexts] + weights["places"]
    scores = (hidden @ weights["queries"]) @ (hidden @ weights["keys"]).transpose(1, 2) / WIDTH**0.5
    later = torch.ones(world.length, world.length, dtype=torch.bool).triu(diagonal=1)
    hidden = hidden + scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ (hidden @ weights["values"])
    hidden = hidden + (hidden @ weights["inner"]).tanh() @ weights["outer"]
    logits = hidden @ weights["logits"]
    return torch.cat([logits[:: last // world.vocabulary**place, place] for place in range(world.length)])


def log_conditionals(world: World, theta: Tensor) -> Tensor:
    """log p(v | prefix): [B, W, V] of theta [B, P]."""
    return torch.stack([logits_of(world, one).log_softmax(dim=-1) for one in theta])


def expected_reward(world: World, theta: Tensor, rewards: Tensor) -> Tensor:
    """J = sum over all responses of p(y) r(y): [B] of theta [B, P] and rewards [S]."""
    return world.token_logprobs(log_conditionals(world, theta)).sum(dim=2).exp() @ rewards


def scores(world: World, theta: Tensor) -> Tensor:
    """psi = grad log p(y_t | s_t) of each token of all responses: [S, T, P] of theta [P]."""

    def along(direction: Tensor) -> Tensor:
        return jvp(lambda weights: logits_of(world, weights).log_softmax(dim=-1), (theta,), (direction,))[1]

    basis = torch.eye(len(theta), dtype=torch.float64)
    columns = [vmap(along)(some) for some in basis.split(DIRECTIONS_AT_ONCE)]  # all at once take gigabytes
    return torch.cat(columns).permute(1, 2, 0)[world.prefixes_of(world.responses), world.responses]
