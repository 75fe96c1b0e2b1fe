"""Advantages of every kind over replicas and context-parallel ranks, of whole and parted groups,
are those of one.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl_corr.config.losses import WHITENED
from megatron_rl_corr.core.advantages import KINDS
from tests.reduce.advantages_worker import GROUP, KEPT, LAYOUTS, LENGTHS, REWARDS

HERE = Path(__file__).resolve().parent
OWN = """
import torch


def share(rewards, kept, tokens):
    counted = rewards.masked_fill(~kept, 0).sum(1, keepdim=True)
    return (rewards - counted) / (1 + tokens) + len(rewards)
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank saved."""
    folder = tmp_path_factory.mktemp("advantages")
    (folder / "own.py").write_text(OWN)
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, HERE / "advantages_worker.py", folder, f"{folder}/own.py:share"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # The files are this test's own.
    return f"{folder}/own.py:share", [
        torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)
    ]


def whiten(values, lengths):
    """verl's masked_whiten of a row's value on each of its tokens, in float64."""
    tokens = np.repeat(values, lengths)
    return (values - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)


def naive(kind, kept):
    """By the definitions, sample by sample."""
    rewards, lengths = np.array(REWARDS, dtype=np.float32).astype(np.float64), np.array(LENGTHS)
    groups = [list(range(first, first + GROUP)) for first in range(0, len(rewards), GROUP)]
    whole, made = np.where(kept, lengths, 0), np.zeros(len(rewards))
    if kind == "raw":
        return rewards
    if kind == "batch_mean":
        return rewards - rewards[kept].mean()
    if kind == "reinforce_plus_plus":
        return whiten(rewards, whole)
    for group in groups:
        counted = [rewards[i] for i in group if kept[i]]
        for i in group:
            others = [rewards[j] for j in group if kept[j] and j != i]
            if kind == "rloo":
                made[i] = rewards[i] - np.mean(others)
            elif kind == "own":
                made[i] = (rewards[i] - sum(counted)) / (1 + lengths[i]) + len(groups) if kept[i] else 0.0
            else:
                made[i] = (rewards[i] - np.mean(counted)) / (
                    np.std(counted) + 1e-6 if kind == "grpo" else 1.0
                )
    return whiten(made, whole) if kind == "reinforce_plus_plus_baseline" else made


@pytest.mark.parametrize("rejecting", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "own"])
def test_advantages_when_spread_over_ranks_then_those_of_the_definition(ranks, kind, rejecting):
    own, saved = ranks
    # Rejected samples have advantages that no loss uses.
    used = np.array(KEPT) if rejecting else np.ones(len(KEPT), dtype=bool)
    expected = naive(kind, used)
    for layout, (cp, dp) in LAYOUTS.items():
        for way in ("rows", "packed"):
            found = {}
            for made in saved[: cp * dp]:
                places, advantages, collectives = made[layout, way, own if kind == "own" else kind, rejecting]
                assert advantages.dtype == torch.float32
                for place, advantage in zip(places, advantages.tolist(), strict=True):
                    assert found.setdefault(place, advantage) == advantage  # context-parallel ranks agree
                expected_count = count_of(
                    kind, parted=way == "packed" and dp > 1, ranks=cp * dp, cp=cp, rejecting=rejecting
                )
                assert len(collectives) == expected_count, (layout, way, collectives)
            assert sorted(found) == list(range(len(REWARDS)))
            values = np.array([found[place] for place in range(len(REWARDS))])
            np.testing.assert_allclose(
                values[used], expected[used], rtol=2e-6, atol=1e-6, err_msg=f"{layout} {way}"
            )


def count_of(kind, *, parted, ranks, cp, rejecting):
    """Collectives that it takes."""
    whitened, global_kind = kind in WHITENED, kind == "own"
    lengths = (whitened or global_kind) and not rejecting and cp > 1
    table = parted and kind not in ("raw", "batch_mean", "reinforce_plus_plus", "own")
    of_batch = whitened or global_kind or kind == "batch_mean"
    return int(lengths) + int(table) + int(of_batch and ranks > 1)
