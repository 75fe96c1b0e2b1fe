"""pretrain_any.py, whose ranks count the collectives of each step, by name and size of the group.

Rank R writes COUNTS/R.json as a step begins: a list of the steps before, each {"all_reduce 2": 7, ...}. What
a collective of torch calls itself is not counted once more.
"""

import functools
import json
import os
import runpy
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from megatron_rl_corr.mcore.step_reports import StepReports

NAMES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "recv",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)
steps, within = [Counter()], [False]


def counted(name, collective):
    @functools.wraps(collective)
    def call(*arguments, **named):
        if within[0]:
            return collective(*arguments, **named)
        groups = [one for one in (*arguments, *named.values()) if isinstance(one, dist.ProcessGroup)]
        steps[-1][f"{name} {groups[0].size() if groups else dist.get_world_size()}"] += 1
        within[0] = True
        try:
            return collective(*arguments, **named)
        finally:
            within[0] = False

    return call


def begun(begin):
    @functools.wraps(begin)
    def begin_step(self):
        Path(os.environ["COUNTS"], f"{os.environ['RANK']}.json").write_text(json.dumps(steps[1:]))
        steps.append(Counter())
        return begin(self)

    return begin_step


for name in NAMES:
    setattr(dist, name, counted(name, getattr(dist, name)))
StepReports.begin_step = begun(StepReports.begin_step)
runpy.run_path(str(Path(__file__).with_name("pretrain_any.py")), run_name="__main__")
