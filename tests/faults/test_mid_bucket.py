"""A server dies or hangs in the middle of a bucket, and the push goes on with the others within its bound, or
ends within it by name.
"""

import os
import signal
import time

import psutil
import pytest

from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.weight_sync.transports.broadcast import UpdateGroup
from tests.faults.drills import RUNS_ALL, drill, long
from tests.faults.mid_bucket import interrupted
from tests.faults.pushing_trainer import Trainer

PUSH_S = 60.0
"""Of a whole push here: a server that is stuck has half of it."""


@pytest.fixture(scope="module")
def trainer(sglang_server_fp32, any_victim, vllm_server_fp32, tiny_moe_dir):
    any_victim.revive()
    urls = [sglang_server_fp32.url, any_victim.server.url, vllm_server_fp32.url]
    trainer = Trainer(urls, tiny_moe_dir, push_timeout_s=PUSH_S)
    yield trainer
    trainer.close()


@pytest.fixture
def victim(any_victim):
    any_victim.revive()
    yield any_victim
    go_on(any_victim)


def scheduler_of(server):
    """The process that holds the weights; the one that answers over HTTP is another."""
    below = psutil.Process(server.pid).children(recursive=True)
    (scheduler,) = [one.pid for one in below if "sglang::scheduler" in "".join(one.cmdline())]
    return scheduler


def go_on(victim):
    if not victim.killed:
        os.killpg(victim.server.pid, signal.SIGCONT)
        os.kill(scheduler_of(victim.server), signal.SIGCONT)


BLOWS = {
    "dies": lambda victim: victim.kill(),
    "hangs": lambda victim: os.killpg(victim.server.pid, signal.SIGSTOP),
    "its_scheduler_hangs": lambda victim: os.kill(scheduler_of(victim.server), signal.SIGSTOP),
}


def strike(monkeypatch, victim, blow):
    """In the middle of the first bucket from now on that it gets the victim is struck; when, once it was."""
    send, struck = UpdateGroup.send, []

    def struck_send(self, bucket):
        def now():
            struck.append(time.monotonic())
            BLOWS[blow](victim)

        if struck or victim.server.url not in self.urls:
            return send(self, bucket)
        return interrupted(send, self, bucket, now)

    monkeypatch.setattr(UpdateGroup, "send", struck_send)
    return struck


def wait_until_all_are_in(trainer):
    """Push until every server has the weights."""
    end = time.monotonic() + 120
    trainer.push()
    while trainer.servers.urls != trainer.client.base_urls:
        assert time.monotonic() < end
        time.sleep(0.2)
        trainer.push()


@pytest.mark.usefixtures("one_rank")
@drill(
    "a server is killed or stopped in the middle of a bucket, or its scheduler alone, and its HTTP process "
    "answers; two others (SGLang, vLLM) take part",
    promised="it is left out within half of --rollout-push-timeout-s, the others have the new weights by "
    "their checksums; the next push does not wait for it; it is taken in once it is well",
)
@pytest.mark.parametrize("blow", list(BLOWS) if RUNS_ALL else ["its_scheduler_hangs"])
def test_push_when_a_server_dies_or_hangs_within_a_bucket_then_the_others_have_the_weights_within_the_bound(
    trainer, victim, monkeypatch, told, seen, blow
):
    first, dead, last = trainer.client.base_urls
    wait_until_all_are_in(trainer)
    usual = trainer.push()
    trainer.check(first, dead, last)
    with monkeypatch.context() as patch:
        struck = strike(patch, victim, blow)
        took = trainer.push()  # which compares checksums
    assert struck and trainer.servers.urls == (first, last) and took < PUSH_S
    trainer.check(first, last)
    missed = [facts for kind, facts in told if kind == "server_missed_update" and facts["server"] == dead]
    assert len(missed) == 1 and ("holds its weights" in missed[0]["reason"]) == (
        blow == "its_scheduler_hangs"
    )
    assert [facts["server"] for kind, facts in told if kind == "server_left_out"] == [dead]
    after = trainer.push()
    assert trainer.servers.urls == (first, last)
    if blow == "dies":
        victim.start_again()
    go_on(victim)
    wait_until_all_are_in(trainer)
    trainer.check(first, dead, last)
    seen(f"a push took {usual:.1f} s, the struck one {took:.1f} s of {PUSH_S:g}, the next {after:.1f} s")


@long
@pytest.mark.usefixtures("one_rank")
@drill(
    "the only server's scheduler is stopped in the middle of a bucket",
    promised="the push ends within --rollout-push-timeout-s, with the server's name",
)
def test_push_when_the_only_server_hangs_within_a_bucket_then_it_ends_by_name_within_the_bound(
    victim, monkeypatch, tiny_moe_dir, seen
):
    trainer = Trainer([victim.server.url], tiny_moe_dir, push_timeout_s=PUSH_S)
    trainer.push()
    with monkeypatch.context() as patch:
        struck = strike(patch, victim, "its_scheduler_hangs")
        begun = time.monotonic()
        with pytest.raises(RolloutServerError) as raised:
            trainer.push()
        took = time.monotonic() - begun
    assert struck and raised.value.url == victim.server.url and took < PUSH_S
    go_on(victim)
    wait_until_all_are_in(trainer)
    trainer.check(victim.server.url)
    trainer.close()
    seen(f"after {took:.1f} s of {PUSH_S:g}: {str(raised.value)[:100]}")


@long
@pytest.mark.usefixtures("one_rank")
@drill(
    "a group that three servers share, as over NCCL, here over gloo: one is killed in the middle of a bucket",
    promised="the group is made anew for the others, by another name, and they have the new weights",
)
def test_push_when_a_server_of_a_shared_group_dies_within_a_bucket_then_the_others_get_a_new_group(
    sglang_server_fp32, victim, vllm_server_fp32, tiny_moe_dir, monkeypatch, seen
):
    urls = [sglang_server_fp32.url, victim.server.url, vllm_server_fp32.url]
    trainer = Trainer(urls, tiny_moe_dir, push_timeout_s=2 * PUSH_S)
    trainer.servers.transport._share = True
    trainer.push()
    (before,) = [group.name for group in trainer.servers.transport._groups]
    with monkeypatch.context() as patch:
        struck = strike(patch, victim, "dies")
        took = trainer.push()
    (after,) = trainer.servers.transport._groups
    assert struck and after.urls == (urls[0], urls[2]) == trainer.servers.urls and after.name != before
    trainer.check(urls[0], urls[2])
    victim.start_again()
    wait_until_all_are_in(trainer)
    trainer.check(*urls)
    trainer.close()
    seen(f"the struck push took {took:.1f} s")
