"""What a rank's place in the job says of it, with groups that only know their ranks."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_rl_corr.reduce.layout import ExpertGroups, Layout


def layout(*, pp_rank: int = 0, rank: int = 0, **settings) -> Layout:
    """Of a rank that is `rank` in its stage's replica."""
    groups = {name: SimpleNamespace(name=name) for name in ("tp", "cp", "dp_cp", "pp")}
    return Layout(
        dp_rank=0,
        dp_size=2,
        cp_size=2,
        pp_rank=pp_rank,
        pp_size=2,
        is_last_stage=pp_rank == 1,
        **{f"{name}_group": group for name, group in groups.items()},
        tp_cp_group=SimpleNamespace(name="tp_cp", rank=lambda: rank),
        shard=None,
        stage_groups=None,
        expert_groups=ExpertGroups(),
        **settings,
    )


@pytest.mark.parametrize(
    ("pp_rank", "rank", "leads"), [(0, 0, True), (0, 1, False), (1, 0, False), (1, 1, False)]
)
def test_data_leader_then_the_first_rank_of_the_first_stage_alone(pp_rank, rank, leads):
    assert layout(pp_rank=pp_rank, rank=rank).is_data_leader is leads


@pytest.mark.parametrize(("rank", "reports"), [(0, False), (6, False), (7, True)])
def test_job_reporter_then_the_last_rank(monkeypatch, rank, reports):
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    assert layout().is_job_reporter is reports


def test_last_stage_rank_then_the_last_of_the_pipeline(monkeypatch):
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [2, 6, 9] * (group.name == "pp"))
    assert layout().last_stage_rank == 9


def test_groups_then_those_of_tokens_and_of_sequence_parallel_routers():
    own = layout()
    assert (own.groups.cp.name, own.groups.dp_cp.name) == ("cp", "dp_cp")
    assert own.router_group.name == "cp" and layout(sequence_parallel=True).router_group.name == "tp_cp"


def test_expert_groups_when_alone_or_not_then_their_size():
    assert ExpertGroups().size == 1 and ExpertGroups(SimpleNamespace(size=lambda: 4)).size == 4
