"""One of two trainer ranks, each the sender of a stage, in pushes that go wrong: push_worker.py
RANK STORE CASE...

Prints, as JSON, what was raised in each case and everything that was asked of the servers from this rank.
"""

import json
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_rl_corr.engines.errors import (
    RolloutError,
    RolloutProtocolError,
    RolloutServerError,
    UnreadableAnswer,
)
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.reduce import failure
from megatron_rl_corr.reduce.failure import PeerFailure
from megatron_rl_corr.weight_sync import update
from megatron_rl_corr.weight_sync.drafts import DraftLayers
from megatron_rl_corr.weight_sync.update import push_weights

COLLECTIVE_S = 2.0
RECEIVED = ("right", "late", "last", "lost", "slow", "long")
"""Cases in which b takes every bucket."""
rank, store, cases = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
store = dist.FileStore(store, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))


class Servers:
    """Two servers "a" and "b", of which b fails in the way of the case as stage 1 sends, or has sent."""

    client = SimpleNamespace(base_urls=("a", "b"))
    urls, in_session, broken, planned, rounding, quantization = ("a", "b"), True, False, {}, "none", None
    drafts = DraftLayers()

    def __init__(self, case):
        self.case, self.calls, self.pages, self.without = case, [], 0, [False, False]
        self.has_time = case != "over"
        self.transport = self.coverage = self  # one list of calls
        self.verifiers = {"of all": self}

    def find(self):
        self.calls.append("find")
        is_gone = self.case in ("dies", "breaks", "last") and self.calls.count("find") > 1
        return [1, 0 if is_gone or self.without[1] else 1]

    def use(self, states):
        self.urls = tuple(url for url, state in zip(("a", "b"), states, strict=True) if state)
        self.calls.append("use " + "".join(self.urls))

    def send(self, bucket, version):
        self.calls.append("send " + "".join(name for name, _ in bucket) + " to " + "".join(self.urls))
        if rank == 1 and "b" in self.urls and self.case not in RECEIVED:
            self.broken = self.case == "breaks"
            if self.case == "full":
                raise OSError("no space left on the device")
            if self.case in ("page", "pages"):
                self.pages += 1
                if self.pages > 1 and self.case == "page":
                    return
                raise UnreadableAnswer("b", "/update", "<html>")
            stuck = self.case in ("stuck", "over")
            raise RolloutServerError(
                "b", "/update", 500 if self.case == "refuses" else None, "why", timed_out=stuck
            )

    def finish(self):
        self.calls.append("finish")
        if rank == 1 and self.case == "last" and "b" in self.urls:
            raise RolloutServerError("b", "/update", None, "it died in the last bucket")

    def compare(self, checksums):
        self.calls.append(f"compare {checksums}")
        if self.case == "lost" and rank == 1:
            raise RolloutProtocolError("a", "/weights_checker", "x differs")

    def checksums(self):
        self.calls.append("checksums")
        if self.case == "slow":
            time.sleep(3 * COLLECTIVE_S)
        return "sums of " + "".join(self.urls)

    def abandon(self):
        self.calls.append("abandon, broken" if self.broken else "abandon")

    def expect(self, version):
        self.calls.append(f"expect {version}")
        if self.case == "late" and rank == 1:
            time.sleep(0.5)
            store.set("expected", "yes")

    def resume(self):
        early = self.case == "late" and not store.check(["expected"])
        self.calls.append("resume, too early" if early else "resume")

    def stuck(self, error):
        return [getattr(error, "timed_out", False) and url == error.url for url in self.client.base_urls]

    def leave_out_stuck(self, stuck):
        self.without = stuck

    def begin_push(self):
        pass

    begin_attempt = end_push = begin_push

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(" ".join([name, *arguments]))


def units(after_parameter):
    for name in ("pq", "rs")[rank]:
        after_parameter()
        if case == "long":
            time.sleep(0.7 * COLLECTIVE_S)
        yield [(name, torch.ones(1))]


exporter = SimpleNamespace(
    leads=rank == 0,
    sends=True,
    stage=rank,
    num_stages=2,
    senders=dist.group.WORLD,
    units=lambda after_parameter: units(after_parameter),
)
told = {}
for case in cases:
    if case == "slow":  # this and the next: than a collective may wait
        dist.barrier()
        _set_pg_timeout(timedelta(seconds=COLLECTIVE_S))
        failure.MEETING_INTERVAL_S, update.PARAMETERS_BETWEEN_MEETINGS = COLLECTIVE_S / 4, 1
    servers, raised = Servers(case), None
    try:
        push_weights(exporter, servers, version="v", bucket_bytes=1)
    except (RolloutError, OSError, PeerFailure) as error:
        raised = f"{type(error).__name__}: {error}"
    told[case] = raised, servers.calls
print(json.dumps(told | {"repeated": EVENTS.counts.get("push_repeated", 0)}))
dist.destroy_process_group()
