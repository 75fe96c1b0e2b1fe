"""Policies small enough that every response can be listed, and the tasks that they are rewarded for.

B policies side by side (instances of the map, seeds of a training), V tokens in the vocabulary, T tokens in
a response, S = V^T responses, C contexts that have logits of their own, W prefixes (nodes of the tree of all
responses that have a next token: 1 + V + ... + V^(T-1)). All is float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad


@dataclass(frozen=True)
class World:
    """All responses of T tokens over V, and which row of a policy's table gives each next token.

    A policy is a table theta [B, C, V] of logits. Its row is chosen by the token before (C = V + 1, the last
    row begins a response), so tokens of all places share their weights, as in a language model. The sampler
    need not be such a table: what mismatch adds may differ from prefix to prefix.

    Example: World(vocabulary=4, length=2) has 16 responses, 5 contexts and 5 prefixes.
    """

    vocabulary: int
    length: int

    @property
    def contexts(self) -> int:
        """C."""
        return self.vocabulary + 1

    @cached_property
    def responses(self) -> Tensor:
        """int64 [S, T], in the order of their digits."""
        digits = torch.arange(self.vocabulary**self.length)[:, None]
        return digits // self.vocabulary ** torch.arange(self.length - 1, -1, -1) % self.vocabulary

    @property
    def prefixes(self) -> int:
        """W."""
        return self.first_prefix(self.length)

    def first_prefix(self, place: int) -> int:
        """The number of the first prefix of `place` tokens: 1 + V + ... + V^(place - 1)."""
        return (self.vocabulary**place - 1) // (self.vocabulary - 1)

    def contexts_of(self, tokens: Tensor) -> Tensor:
        """The context of each token: int64, the shape of tokens [..., T]."""
        return pad(tokens[..., :-1], (1, 0), value=self.vocabulary)

    def prefixes_of(self, tokens: Tensor) -> Tensor:
        """The number of the prefix of each token in [0, W): int64, the shape of tokens [..., T]."""
        found, digits = [], torch.zeros_like(tokens[..., 0])
        for place in range(tokens.shape[-1]):
            found.append(self.first_prefix(place) + digits)
            digits = digits * self.vocabulary + tokens[..., place]
        return torch.stack(found, dim=-1)

    @cached_property
    def context_of_prefix(self) -> Tensor:
        """int64 [W]."""
        last = [torch.tensor([self.vocabulary])]
        for place in range(1, self.length):
            last.append(torch.arange(self.vocabulary).repeat(self.vocabulary ** (place - 1)))
        return torch.cat(last)

    @cached_property
    def place_of_prefix(self) -> Tensor:
        """int64 [W]: tokens of each prefix."""
        return torch.repeat_interleave(
            torch.arange(self.length), self.vocabulary ** torch.arange(self.length)
        )

    def log_conditionals(self, theta: Tensor) -> Tensor:
        """log p(v | prefix) of a table: [B, W, V] of theta [B, C, V]."""
        return theta.log_softmax(dim=-1)[:, self.context_of_prefix]

    def token_logprobs(self, conditionals: Tensor) -> Tensor:
        """log-prob of each token of each response: [B, S, T] of log-probs of next tokens [B, W, V]."""
        return conditionals[:, self.prefixes_of(self.responses), self.responses]

    def scores(self, theta: Tensor) -> Tensor:
        """psi = grad log p(y_t | s_t) in theta, of each token of all responses: [B, S, T, C V].

        The row of the token's context has (1 if v is the token) - p(v); the other rows are 0.
        """
        rows = one_hot(self.contexts_of(self.responses), self.contexts).double()
        from_mean = (
            one_hot(self.responses, self.vocabulary).double()
            - theta.softmax(dim=-1)[:, self.contexts_of(self.responses)]
        )
        return (rows[..., :, None] * from_mean[..., None, :]).flatten(start_dim=-2)


def right_share(tokens: Tensor, vocabulary: int) -> Tensor:
    """The share of tokens that count on from the one before, modulo V; the first should be 0: [...] of
    tokens [..., T].
    """
    wanted = (pad(tokens[..., :-1], (1, 0), value=-1) + 1) % vocabulary
    return (tokens == wanted).double().mean(dim=-1)


def dense(tokens: Tensor, vocabulary: int) -> Tensor:
    """Reward of each token by itself: the share that is right, in [0, 1]."""
    return right_share(tokens, vocabulary)


def outcome(tokens: Tensor, vocabulary: int) -> Tensor:
    """Reward of the whole response alone: 1 if at least half of its tokens are right, else 0."""
    return (right_share(tokens, vocabulary) >= 0.5).double()


def parity(tokens: Tensor, vocabulary: int) -> Tensor:
    """Reward of the whole response, to which every token matters: 1 if their sum is even, else 0."""
    return 1.0 - (tokens.sum(dim=-1) % 2).double()


TASKS = {"dense": dense, "outcome": outcome, "parity": parity}
"""Name -> reward [...] of tokens [..., T]."""


def expected_reward(world: World, theta: Tensor, rewards: Tensor) -> Tensor:
    """J = sum over all responses of p(y) r(y): [B].

    Args:
        theta: [B, C, V].
        rewards: [S].
    """
    p = theta.softmax(dim=-1)
    # grown place by place, so that no [B, S, T] is made: this is asked at every step of a training
    whole = p[:, world.vocabulary]
    for _ in range(1, world.length):
        last = p[:, : world.vocabulary].repeat(1, whole.shape[1] // world.vocabulary, 1)
        whole = (whole[:, :, None] * last).flatten(start_dim=1)
    return whole @ rewards


def random_tables(world: World, batch: int, *, spread: float, seed: int) -> Tensor:
    """theta [B, C, V] of independent normal logits with this standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, world.contexts, world.vocabulary)
    return spread * torch.randn(shape, generator=generator, dtype=torch.float64)
