"""The most memory that each rank has held, by its number."""

import resource
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.features.peak_memory import feature
from megatron_rl_corr.features.peak_memory.feature import PeakMemoryFeature


def test_memory_after_a_push_then_the_peak_of_each_rank(one_rank, monkeypatch):
    watching = PeakMemoryFeature(SimpleNamespace(peak_memory=True))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = watching.after_push(None, "version")
    assert list(found) == ["memory/host_gib/rank_0"]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert before <= found["memory/host_gib/rank_0"] * 2**20 <= after
    # 3 GiB of a process that Linux counts in KiB, and 70.5 GiB of a GPU in bytes
    monkeypatch.setattr(feature.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3 * 2**20))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 705 * 2**30 // 10)
    monkeypatch.setattr(feature, "communication_device", lambda: torch.device("cpu"))
    assert watching.after_push(None, "version") == {
        "memory/host_gib/rank_0": 3.0,
        "memory/device_gib/rank_0": pytest.approx(70.5),
    }


def test_feature_then_where_it_is_asked_for():
    assert PeakMemoryFeature.is_asked_for(SimpleNamespace(peak_memory=True))
    assert not PeakMemoryFeature.is_asked_for(SimpleNamespace(peak_memory=False))
