"""Which process groups this rank is in, and its place in each: the one description that all folders share.

Ranks of a replica are numbered tensor parallel first, then context, expert and data parallel, then
pipeline parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_rl_corr.models.shards import ShardRanks
from megatron_rl_corr.reduce.collectives import ParallelGroups


@dataclass(frozen=True)
class StageGroups:
    """Groups of one pipeline stage that a parameter is gathered over, and the rank that sends
    it to the servers.
    """

    tp: ProcessGroup | None
    """Tensor parallel."""
    expert: ProcessGroup | None
    """Expert tensor x expert parallel: together its ranks hold every expert of the stage once."""
    sender: int
    """Global rank of the stage's sender: tensor rank 0 of the first data-parallel replica."""
    senders: ProcessGroup | None = None
    """This rank and its like in all stages; a sender's are the senders. None: there is one stage."""


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of one pipeline stage that sums over an expert's tokens are reduced over; None means
    this rank alone.

    Together they are all ranks of the stage.
    """

    expert: ProcessGroup | None = None
    """Ranks that hold other experts: expert parallelism."""
    replicas: tuple[ProcessGroup | None, ...] = ()
    """Their product is the ranks that hold the same experts, whole or cut: expert tensor and
    data parallelism.
    """

    @property
    def size(self) -> int:
        """Expert-parallel ranks."""
        return 1 if self.expert is None else self.expert.size()


@dataclass(frozen=True)
class Layout:
    """This rank's place in the job: TP x CP x DP ranks on each of PP stages."""

    dp_rank: int
    dp_size: int
    cp_size: int
    pp_rank: int
    pp_size: int
    is_last_stage: bool
    """The stage that has logits, and so the loss. The last rank of pp_group."""
    tp_group: ProcessGroup
    """Same tokens, other columns of the weights (under sequence parallelism: other tokens
    of the same rows).
    """
    cp_group: ProcessGroup
    """Other tokens of the same rows."""
    dp_cp_group: ProcessGroup
    """Together they hold each token of the global batch once; expert-parallel ranks lie inside."""
    pp_group: ProcessGroup
    """Same tokens, other layers."""
    tp_cp_group: ProcessGroup
    """One stage of one replica."""
    shard: ShardRanks
    """How this rank's parameters are cut."""
    stage_groups: StageGroups
    expert_groups: ExpertGroups
    sequence_parallel: bool = False
    """Tensor-parallel ranks hold other tokens between the layers' matrix products, so in the routers too."""

    @property
    def is_data_leader(self) -> bool:
        """True on exactly one rank of each data-parallel replica: the one that talks to the
        rollout servers.
        """
        return self.pp_rank == 0 and self.tp_cp_group.rank() == 0

    @property
    def is_job_reporter(self) -> bool:
        """True on the job's last rank, which is on the last stage: it prints and logs the metrics."""
        return dist.get_rank() == dist.get_world_size() - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of this pipeline's last stage."""
        return dist.get_process_group_ranks(self.pp_group)[-1]

    def replica_rank(self, stage: int, context: int) -> int:
        """Global rank of this replica's first tensor-parallel rank of a stage and a context-parallel rank."""
        stages = dist.get_process_group_ranks(self.pp_group)
        # Tensor ranks are numbered before context ranks, and stages are equally far apart everywhere.
        first = dist.get_process_group_ranks(self.tp_cp_group)[context * self.tp_group.size()]
        return first + stages[stage] - stages[self.pp_rank]

    @property
    def groups(self) -> ParallelGroups:
        """The groups that the correction is reduced over."""
        return ParallelGroups(cp=self.cp_group, dp_cp=self.dp_cp_group)

    @property
    def router_group(self) -> ProcessGroup:
        """Ranks of one stage whose routers see other tokens of the same rows."""
        return self.tp_cp_group if self.sequence_parallel else self.cp_group
