"""Saved samples: files are written beside the training, and whole before the push."""

import threading
import types
from dataclasses import replace

import pytest
import torch

from megatron_rl_corr.engines.routes import ExpertShape, no_routes
from megatron_rl_corr.features.samples import feature as samples_feature
from megatron_rl_corr.features.samples.feature import SavedSamplesFeature
from megatron_rl_corr.rollout.sample_file import read_trajectories
from tests.rollout.test_sample_file import response

SHAPE = ExpertShape(num_layers=2, layers=(0, 1), top_k=2, experts=8)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A feature with an open folder, a batch of two samples, and what the ranks were told of failures."""
    told = []

    def all_reduce_results(file, read):
        told.append(file.exception())
        return file.result()

    monkeypatch.setattr(samples_feature, "all_reduce_results", all_reduce_results)
    options = types.SimpleNamespace(
        save_trajectories=str(tmp_path / "samples"),
        save_routed_experts=False,
        updates_of_batch=1,
        most_turns=None,
        hf_checkpoint=str(tmp_path),
        truncated_samples="train",
    )
    layout = types.SimpleNamespace(dp_rank=0, dp_size=1, pp_size=1, cp_group=None, is_data_leader=True)
    trajectories = [response(2), response(4)]
    collector = types.SimpleNamespace(
        trajectories=trajectories,
        reward_parts=None,
        origins=None,
        sampling=None,
        agent_branches=None,
        by_lag=True,
    )
    rewards = torch.tensor([1.0, 0.0])
    batch = types.SimpleNamespace(
        rollout_logprobs=torch.zeros(16),
        seq_ids=torch.arange(16) // 8,
        rewards=rewards,
        whole_rows=lambda values, group: values.view(len(values), 2, 8),
    )
    feature = SavedSamplesFeature(options)
    run = types.SimpleNamespace(
        settings=types.SimpleNamespace(options=options, layout=layout),
        collector=collector,
        shape=types.SimpleNamespace(group_size=2, packing=None),
    )
    feature.open(run)
    found = types.SimpleNamespace(
        batch=batch,
        iteration=4,
        has_old_logprobs=False,
        inputs=types.SimpleNamespace(
            old_logprobs=None, advantages=torch.ones(16), correction=types.SimpleNamespace(mask=None)
        ),
    )
    yield feature, found, tmp_path / "samples/step_000005_replica0.parquet", told
    feature.close()


def test_file_when_it_is_slow_then_the_step_goes_on_and_waits_before_the_push(saved, monkeypatch):
    feature, batch, path, told = saved
    may_write, write = threading.Event(), samples_feature.write_trajectories

    def slow(*arguments, **named):
        assert may_write.wait(60)
        return write(*arguments, **named)

    monkeypatch.setattr(samples_feature, "write_trajectories", slow)
    assert not feature.settle() and told == []  # nothing is under way: no exchange
    assert feature.save_batch(batch) and not path.exists()
    may_write.set()
    assert feature.settle() and path.is_file() and told == [None]
    assert not feature.settle() and told == [None]


def test_file_when_it_cannot_be_written_then_all_ranks_learn_it_before_the_push(saved):
    feature, batch, path, told = saved
    path.parent.rmdir()
    feature.save_batch(batch)
    with pytest.raises(OSError, match=r"^--rollout-save-trajectories .*samples: .*No such file"):
        feature.settle()
    assert len(told) == 1 and not feature.settle()


def test_file_when_the_disk_hangs_then_a_run_that_ends_does_not_wait_for_it(saved, monkeypatch):
    feature, batch, path, _ = saved
    goes_on = threading.Event()
    monkeypatch.setattr(samples_feature, "write_trajectories", lambda *_, **__: goes_on.wait(60))
    monkeypatch.setattr(samples_feature, "CLOSE_S", 0.01)
    feature.save_batch(batch)
    feature.close()
    assert not goes_on.is_set() and not path.exists()
    goes_on.set()


def test_file_when_the_run_ends_meanwhile_then_it_is_whole(saved):
    feature, batch, path, _ = saved
    feature.save_batch(batch)
    feature.close()
    assert path.is_file()


@pytest.mark.parametrize("kept", [False, True])
def test_file_when_samples_have_routes_then_it_has_them_only_if_asked(saved, kept):
    feature, batch, path, _ = saved
    feature.options.save_routed_experts = kept
    routed = [
        replace(one, routed_experts=no_routes(SHAPE, one.prompt_ids.numel() + one.output_ids.numel() - 1))
        for one in feature._samples.trajectories
    ]
    feature._samples.trajectories = routed
    assert feature.save_batch(batch) and feature.settle()
    for sample, one in zip(read_trajectories(path), routed, strict=True):
        if kept:
            assert torch.equal(sample.trajectory.routed_experts, one.routed_experts)
        else:
            assert sample.trajectory.routed_experts is None
    assert all(one.routed_experts is not None for one in feature._samples.trajectories)
