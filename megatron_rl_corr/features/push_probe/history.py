"""Finds a server that computes with older weights than it has loaded, from its answers
after several pushes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.features.push_probe.answers import ProbeAnswer

MOVED = 1e-3
"""Nats by which one of the trainer's log-probs must have moved before a server's, which have
not, are an error.
"""


class Movement:
    """Compares each server's scores of the same texts with those of earlier pushes, bit for bit.

    In 16 bits the steps of hundreds of pushes may stay below what rounding explains. But then a server's
    log-probs change in some bit whenever the trainer's move; those of one that packs, caches or captures
    its weights once and for all do not. Equal bits of hundreds of tokens are no coincidence, so one answer
    is evidence enough.
    """

    def __init__(self):
        self._first: dict[str, tuple[np.ndarray, np.ndarray, int, str]] = {}
        """By server: its scores that are the same ever since, and what was the trainer's, loaded,
        and pushed then.
        """

    def check(
        self,
        answers: Mapping[str, ProbeAnswer],
        trained: Sequence[np.ndarray],
        loaded: Mapping[str, int],
        *,
        version: str,
    ) -> None:
        """Compare with the pushes before.

        Args:
            answers: of each server to the same texts.
            trained: [T] log-probs of the trainer, of each text.
            loaded: of each server whose weights were hashed, a number that differs if they do.
            version: of the weights that were pushed.

        Raises:
            RolloutProtocolError: weights and the trainer's log-probs have changed, and a server's
                log-probs have not.
        """
        own = np.concatenate(trained)
        for url, answer in answers.items():
            if url not in loaded:
                continue
            served = np.concatenate(answer.scores)
            if url not in self._first or not np.array_equal(served, self._first[url][0]):
                self._first[url] = served, own, loaded[url], version
                continue
            _, before, had, since = self._first[url]
            moved = np.abs(own - before).max()
            if loaded[url] != had and moved > MOVED:
                raise RolloutProtocolError(
                    url,
                    answer.endpoint,
                    f"its weights differ from the trainer's: it has loaded version {version!r}, and its "
                    f"log-probs of {len(own)} given ids are in every bit those of version {since!r}, while "
                    f"the trainer's have moved by up to {moved:.3g}; it computes with a copy of older "
                    "weights. Restart it; if it does so again, start it without what makes the copy (packed "
                    "kernels, graphs, caches)",
                )
