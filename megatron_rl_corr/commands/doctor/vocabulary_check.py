"""Asks a server for next-token distributions, as whole as it gives them, to compare them with the model's."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from megatron_rl_corr.core.listed_distances import listed_distances
from megatron_rl_corr.doctor.findings import Row
from megatron_rl_corr.doctor.probe import NotAnswered, Probe, if_supported
from megatron_rl_corr.doctor.vocabulary import (
    Comparison,
    IdLogprobs,
    Model,
    Seen,
    id_chunks,
    judge_vocabulary,
)
from megatron_rl_corr.engines.inspection import DetailedSample, TokenScores

LISTED = 1024
"""Likeliest ids of a token: an answer of 72 tokens has 2 MB."""
MOST_REQUESTS = 64
"""Requests for single ids, of one scan of the vocabulary."""
SCANS = 2
"""Places at which each id is asked for."""
AGAIN = 16
"""Places at which suspects are asked for again."""
SEED = 20
UNCOVERED = "ids that are never among the likeliest are not covered"


async def ask_vocabulary(
    probe: Probe,
    half: bool,
    answers: Sequence[DetailedSample],
    exact: Sequence[torch.Tensor],
    rounded: Sequence[torch.Tensor],
    text_of: Callable[[int], str],
) -> Row:
    """Compare the likeliest ids at each token of some responses, and all ids at some of them.

    Args:
        probe: of the server.
        half: it computes in 16 bits.
        answers: sampled at temperature 1, of R tokens each.
        exact, rounded: the model's logits of each, [R, V], in float32 and in bfloat16.
        text_of: an id as a text.

    Raises:
        RolloutError: the server could not be asked.
        UnsupportedByEngine: it can't list likeliest ids of given tokens.
    """
    vocab_size = min(probe.client.vocab_size, exact[0].shape[1])
    count = min(vocab_size, LISTED, probe.engine.most_likeliest(await probe.info()))
    scores = [await probe.score(one.prompt, one.output, likeliest=count) for one in answers]
    model = Model(*(_log_probs(logits, vocab_size) for logits in (exact, rounded)))
    top, ids = _lists(scores)
    listed = IdLogprobs(np.repeat(np.arange(len(top)), top.shape[1]), ids.ravel(), top.ravel())
    comparison = Comparison(model, listed, half)
    prefixes = [[*one.prompt, *one.output[:at]] for one in answers for at in range(len(one.output))]
    seen = await _ask_ids(probe, comparison, prefixes)
    return judge_vocabulary(comparison, seen, _distances(model, top, ids), text_of)


def _log_probs(logits: Sequence[torch.Tensor], vocab_size: int) -> np.ndarray:
    return torch.log_softmax(torch.cat(list(logits))[:, :vocab_size].float(), -1).numpy()


def _lists(scores: Sequence[TokenScores]) -> tuple[np.ndarray, np.ndarray]:
    """(log-probs, -inf of an id without mass; ids) of the likeliest at all places, [C, K] each."""
    top, ids = (np.concatenate([vars(one)[name] for one in scores]) for name in ("top", "top_ids"))
    return np.where(np.isnan(top), -np.inf, top), ids


def _distances(model: Model, top: np.ndarray, ids: np.ndarray) -> dict[str, float]:
    """Means over the places: KL(server || model), bounds of the total variation, the listed mass."""
    own = np.pad(model.exact, ((0, 0), (0, 1)), constant_values=-np.inf)  # of ids that the model lacks
    train = np.take_along_axis(own, np.minimum(ids, own.shape[1] - 1), axis=1)
    far = listed_distances(torch.from_numpy(top), torch.from_numpy(train))
    return {name: float(vars(far)[name].mean()) for name in ("kl", "least_tv", "most_tv", "mass")}


async def _ask_ids(probe: Probe, comparison: Comparison, prefixes: list[list[int]]) -> Seen:
    """Single ids: all at some places, or a sample of them; then those that are off at more places."""
    none = IdLogprobs.joined([])
    size, vocab_size = probe.engine.most_scored_ids, comparison.vocab_size
    if not size:
        return Seen(none, none, f"{UNCOVERED}: {probe.engine.name} has no request for them")
    ask, order = partial(_of_ids, probe, prefixes), np.random.default_rng(SEED).permutation(len(prefixes))
    chunks = SCANS * id_chunks(vocab_size, size, MOST_REQUESTS, SEED)
    places = [int(order[n % len(order)]) for n in range(len(chunks))]
    scanned = await if_supported(_all(ask, list(zip(places, chunks, strict=True))))
    if isinstance(scanned, NotAnswered):
        return Seen(none, none, f"{UNCOVERED}: {scanned}")
    suspects = comparison.suspects(IdLogprobs.joined([comparison.listed, scanned])).tolist()
    again = [int(one) for one in order[::-1][:AGAIN]] if suspects else []
    more = await _all(ask, [(place, suspects) for place in again])
    all_chunks = id_chunks(vocab_size, size, vocab_size, SEED)
    left = f"{UNCOVERED}, but for a sample of {len(np.unique(scanned.ids))}"
    return Seen(scanned, more, left if SCANS * len(all_chunks) > len(chunks) else "")


async def _all(ask: Callable, asked: Sequence[tuple[int, list[int]]]) -> IdLogprobs:
    places = asyncio.Semaphore(8)

    async def one(place: int, ids: list[int]) -> IdLogprobs:
        async with places:
            return await ask(place, ids)

    return IdLogprobs.joined(await asyncio.gather(*[one(*pair) for pair in asked]))


async def _of_ids(probe: Probe, prefixes: list[list[int]], place: int, ids: list[int]) -> IdLogprobs:
    logprobs = await probe.score_ids(prefixes[place], ids)
    return IdLogprobs(np.full(len(ids), place), np.array(ids), logprobs)
