"""The seed of each request: what it draws depends on its place in the run, and on nothing that
happens by chance.

A server with deterministic inference draws token p of a request with noise that is a function of (seed,
p, id) alone: requests of one seed and prompt have one and the same response. Other servers take the
seed and ignore it.

SGLang 0.5.23 draws by the rank of an id among the likeliest, in place of the id, from the moment a request
with top_p, top_k or temperature 0 joins a batch until that batch is empty. So a response may depend on
what else was asked.
"""

import hashlib
import struct
from dataclasses import dataclass

SEED_BITS = 63
"""Servers keep seeds as int64: without the sign no server can read one as another number."""


def sampling_seed(run_seed: int, group: int, sample: int, turn: int, sampled_tokens: int) -> int:
    """The seed of a request: the first 63 bits of BLAKE2b of the five int64, the same on every machine.

    A retry keeps its request's seed; a continuation, the next turn and a group in a failed one's
    place have others.

    Args:
        run_seed: of the run.
        group: the prompt's number since the run's beginning; negative for an evaluation.
        sample: number of the sample in its group, from 0.
        turn: number of the turn in its episode, from 0.
        sampled_tokens: tokens of this turn that the request continues.

    Returns:
        An integer in [0, 2**63).

    Raises:
        struct.error: an argument has more than 64 bits.
    """
    place = struct.pack("<5q", run_seed, group, sample, turn, sampled_tokens)
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little") >> (64 - SEED_BITS)


def evaluation_number(place: int) -> int:
    """The group number of an evaluation's sample, by its place among all: below 0, where no group of
    the training is.

    The same each time: where a server heeds seeds, two evaluations differ by their weights alone.
    """
    return -1 - place


@dataclass(frozen=True)
class Draw:
    """One response of the run, or one turn of an episode: what its seeds depend on, but the
    tokens sampled so far.
    """

    run_seed: int
    group: int
    sample: int
    turn: int = 0

    def seed(self, sampled_tokens: int) -> int:
        """The seed of the request that continues this many tokens of the turn."""
        return sampling_seed(self.run_seed, self.group, self.sample, self.turn, sampled_tokens)
