"""The seed of each request: what it draws depends on its place in the run, and on nothing that happens by chance.

A server with deterministic inference draws token p of a request with noise that is a function of (seed, p, id) alone:
requests of one seed and prompt have one and the same response. Other servers take the seed and ignore it.
"""

import hashlib
import struct
from dataclasses import dataclass

SEED_BITS = 63
"""Servers keep seeds as int64: without the sign no server can read one as another number."""


def sampling_seed(run_seed: int, group: int, sample: int, turn: int, sampled_tokens: int) -> int:
    """The first 63 bits of BLAKE2b of the five int64: in [0, 2**63), the same on every machine.

    group: the prompt's number since the run's beginning, negative for what is not trained on. sampled_tokens: those of
    this turn that the request continues. So a request that is sent once more keeps its seed, and a continuation, the
    next turn and a group that takes a failed one's place have another. Raises struct.error beyond 64 bits.
    """
    place = struct.pack("<5q", run_seed, group, sample, turn, sampled_tokens)
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little") >> (64 - SEED_BITS)


def evaluation_number(place: int) -> int:
    """The group number of an evaluation's prompt, by its place in the data: below 0, where no group of the training is.

    The same each time: where a server heeds seeds, two evaluations differ by their weights alone.
    """
    return -1 - place


@dataclass(frozen=True)
class Draw:
    """One response of the run, or one turn of an episode: everything of its seeds but the tokens sampled so far."""

    run_seed: int
    group: int
    sample: int
    turn: int = 0

    def seed(self, sampled_tokens: int) -> int:
        """Of the request that continues so many tokens."""
        return sampling_seed(self.run_seed, self.group, self.sample, self.turn, sampled_tokens)
