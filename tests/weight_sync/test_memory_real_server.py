"""A trainer that takes turns with a real server on its GPUs: each right order of requests works, each
wrong one fails.

The server's memory saver is tools/cpu/sglang_memory.py: what is released is gone, what comes back is NaN.
"""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl_corr import cli
from megatron_rl_corr.engines.errors import (
    RolloutOutage,
    RolloutProtocolError,
    RolloutServerError,
    SampleFailure,
)
from megatron_rl_corr.engines.sglang.tensors import serialized
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.rollout import RolloutClient, SamplingParams
from megatron_rl_corr.weight_sync.colocated import ColocatedServers
from megatron_rl_corr.weight_sync.memory import ServerMemory
from megatron_rl_corr.weight_sync.update import release_servers
from tests.hf_truth import assert_is_truth
from tests.preloaded import PreloadedServer
from tests.server_load import wait_until_sampling
from tests.tiers import in_matrix, matrix
from tests.weight_sync.pushing import PROMPT, SAMPLING, Pushing
from tests.weight_sync.test_push_real_servers import model_of, noisy
from tools.cpu import environment, sglang_arguments

pytestmark = [matrix, pytest.mark.usefixtures("one_rank")]


@pytest.fixture(scope="module")
def weights(tiny_moe_dir):
    return load_file(tiny_moe_dir / "model.safetensors")


class Restartable:
    """A server that a test may end, and that the next one finds running again, with all of its memory."""

    def __init__(self, model_dir, folder, *flags):
        self._made = lambda: PreloadedServer(
            model_dir,
            dtype="float32",
            log_path=folder / "server.log",
            port=self.server and self.server.port or 0,
            extra_arguments=[*sglang_arguments(), *flags],
            environment=environment("sglang"),
        )
        self.server = None

    def running(self):
        if self.server is None or not self.server.is_running():
            if self.server is not None:
                self.server.stop()
            self.server = self._made()
            self.server.start().wait_ready()
        return self.server

    def log(self):
        return self.server.log_path.read_text()

    def kill(self):
        os.killpg(self.server.pid, signal.SIGKILL)

    def runs_after(self, seconds):
        """Whether the server still runs after that time, at most."""
        end = time.monotonic() + seconds
        while self.server.is_running() and time.monotonic() < end:
            time.sleep(0.1)
        return self.server.is_running()


@pytest.fixture(scope="module")
def saving(tiny_moe_dir, tmp_path_factory):
    server = Restartable(tiny_moe_dir, tmp_path_factory.mktemp("saving"), "--enable-memory-saver")
    yield server
    if server.server is not None:
        server.server.stop()


class Colocated(Pushing):
    """One trainer rank, whose servers release their memory."""

    def __init__(self, urls, model_dir):
        super().__init__(urls, "tensor", model_dir, None)
        one = self.servers
        self.servers = ColocatedServers(
            self.client,
            self.loop,
            self.transport,
            verifiers=one.verifiers,
            coverage=one.coverage,
            memory=ServerMemory(),
        )

    def release(self):
        release_servers(SimpleNamespace(leads=True), self.servers)

    def ask(self, make, *arguments):
        """The answer to one request of the engine's, sent as it is, in whatever order."""
        url = self.client.base_urls[0]
        engine = self.client.engine_of(url)
        return self.loop.call(
            self.client.ask(url, getattr(engine, make)(*arguments), timeout_s=30), timeout=60
        )

    def another(self, sampling=SAMPLING):
        """A response for a client that knows nothing of turns."""
        other = RolloutClient(self.client.base_urls[:1], vocab_size=83, timeout_s=60, max_retries=0)
        try:
            return self.loop.call(other.generate([PROMPT], sampling), timeout=90)[0]
        finally:
            self.loop.call(other.close())


@pytest.fixture
def trainer(saving, tiny_moe_dir):
    one = Colocated([saving.running().url], tiny_moe_dir)
    yield one
    one.close()


def test_turns_when_taken_twice_then_every_sample_is_of_the_pushed_weights(
    trainer, weights, tiny_moe_dir, tmp_path
):
    trainer.push(weights, "turn-0")
    before = trainer.checksums()
    for turn in (1, 2):
        trainer.release()
        assert trainer.version() == f"released turn-{turn - 1}"
        moved = noisy(weights, turn)
        trainer.push(moved, f"turn-{turn}")
        assert trainer.version() == f"turn-{turn}" and not trainer.servers.memory.lacking
        sample = trainer.sample()
        assert [span.version for span in sample.weight_versions] == [f"turn-{turn}"]
        assert_is_truth(sample, model_of(tiny_moe_dir, moved, tmp_path / str(turn)), atol=1e-5)
    trainer.push(weights, "turn-3")
    assert trainer.checksums() == before
    assert trainer.servers.memory.take_resume_s() > 0 == trainer.servers.memory.take_resume_s()


def test_release_when_another_client_samples_then_its_response_waits_and_goes_on_with_the_new_weights(
    trainer, weights, tiny_moe_dir, tmp_path
):
    trainer.push(weights, "before")
    moved = noisy(weights, 7)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trainer.another, SamplingParams(120, ignore_eos=True))
        wait_until_sampling(trainer.client.base_urls[0])
        trainer.release()  # a server that runs something would end
        trainer.push(moved, "after")
        sample = waiting.result(90)
    span = sample.weight_versions[-1]
    assert span.version == "after" and sample.output_ids.numel() == 120
    truth = model_of(tiny_moe_dir, moved, tmp_path / "moved")
    ids = torch.cat([sample.prompt_ids, sample.output_ids])
    with torch.no_grad():
        logprobs = truth(ids[None]).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    of_ids = logprobs.gather(1, sample.output_ids[:, None])[:, 0]
    # A near tie of two experts may make one of them differ (tests/hf_truth.py).
    apart = (of_ids - sample.rollout_logprobs).abs()[span.start : span.end]
    assert (apart < 1e-4).float().mean() > 0.9


def test_client_when_it_is_the_trainers_turn_then_it_samples_nothing(trainer, weights):
    trainer.push(weights, "before")
    trainer.release()
    with pytest.raises(RuntimeError, match="push weights before sampling"):
        trainer.sample()
    trainer.release()  # nothing is sent that would end the server
    trainer.push(weights, "after")
    assert trainer.sample().finish_reason == "length"


NOT_A_NUMBER = None
ORDERS = {
    "weights pushed before their memory is back": (
        ["released", "pushed", "weights", "cache", "continued", "sampled"],
        NOT_A_NUMBER,
    ),
    "weights never pushed": (["released", "weights", "cache", "continued", "sampled"], NOT_A_NUMBER),
    "sampled before the cache is back": (
        ["released", "weights", "pushed", "continued", "sampled"],
        "illegal memory access: .*kv_cache",
    ),
    "released while it runs": (["runs", "release"], "should be called only when server is idle"),
    "released twice": (["released", "release"], "is released already"),
    "resumed what is there": (["weights"], "KeyError"),
}
"""Order of requests -> (its steps, what the log says of the server that the last of them ends).
NOT_A_NUMBER: it may also sample, with log-probs that are none.
"""


@pytest.mark.parametrize(
    "order",
    [
        "weights pushed before their memory is back",
        "sampled before the cache is back",
        "released while it runs",
        *in_matrix("weights never pushed", "released twice", "resumed what is there"),
    ],
)
def test_server_when_asked_in_a_wrong_order_then_it_ends(trainer, saving, weights, order):
    """What our own order keeps from happening: each of these requests is one that we send,
    at another moment.
    """
    steps, said = ORDERS[order]
    sample = None

    def push():
        trainer.ask("begin_weight_update")
        entry = serialized(list(weights.items()))
        trainer.ask("update_weights_from_tensor", [entry])
        trainer.ask("end_weight_update")

    with ThreadPoolExecutor(1) as pool:
        made = {
            "released": trainer.release,
            "weights": lambda: trainer.ask("resume_memory", ["weights"]),
            "cache": lambda: trainer.ask("resume_memory", ["cache"]),
            "pushed": push,
            "continued": lambda: trainer.ask("continue_generation"),
            "sampled": trainer.another,
            "runs": lambda: (
                pool.submit(trainer.another, SamplingParams(400, ignore_eos=True)),
                wait_until_sampling(trainer.client.base_urls[0]),
            ),
            "release": lambda: trainer.ask("release_memory", ["weights", "cache"]),
        }
        for step in steps[:-1]:
            made[step]()
        try:
            sample = made[steps[-1]]()
        except (RolloutServerError, RolloutOutage, SampleFailure):
            pass
        finally:
            if sample is not None:
                saving.kill()
    if sample is not None:
        assert said is NOT_A_NUMBER and bool(sample.rollout_logprobs.isnan().any()), sample.rollout_logprobs
    assert not saving.runs_after(15)
    assert said is NOT_A_NUMBER or re.search(said, saving.log())


def test_trainer_when_it_is_killed_in_its_turn_then_the_next_one_goes_on(trainer, weights, tiny_moe_dir):
    """At three moments: nothing is there; memory for weights is there; they are half sent."""
    trainer.push(weights, "first")
    for moment in ("release", "resume", "send"):
        trainer.release()
        if moment != "release":
            trainer.servers.use(trainer.servers.find())
            trainer.servers.start("lost")
            trainer.servers.begin()
            assert trainer.version() == "unfinished without cache lost"
        if moment == "send":
            name = next(iter(weights))
            trainer.servers.send([(name, torch.zeros_like(weights[name]))], "lost")
        next_one = Colocated(trainer.client.base_urls, tiny_moe_dir)
        try:
            next_one.release()
            assert next_one.version().startswith("released ")
            next_one.push(weights, f"after {moment}")
            assert next_one.sample().finish_reason == "length"
        finally:
            next_one.close()
        trainer.push(weights, "first")


def test_trainer_when_nobody_knows_what_a_server_has_or_it_can_not_give_it_back_then_named(
    trainer, weights, tiny_moe_dir, capsys
):
    trainer.push(weights, "first")
    trainer.release()
    apart = Pushing(trainer.client.base_urls, "tensor", tiny_moe_dir, None)
    try:
        with pytest.raises(
            RolloutProtocolError, match="'released first': it has released its memory .* `colocate`"
        ):
            apart.push(weights, "second")
    finally:
        apart.close()
    # The doctor asks nothing of it: it would get no answer, and end the server on a GPU.
    status = cli.main(["doctor", "--url", trainer.client.base_urls[0], "--model", str(tiny_moe_dir)])
    assert status == 2 and "it has released its memory" in capsys.readouterr().out
    assert trainer.version() == "released first"
    trainer.push(weights, "second")
    trainer.ask("update_weight_version", "changing memory second")
    said = "'changing memory second': .*nobody knows which it has; restart"
    for call in (trainer.release, lambda: trainer.push(weights, "third")):
        with pytest.raises(RolloutProtocolError, match=said):
            call()
    trainer.ask("update_weight_version", "second")


def test_release_when_the_server_answers_no_then_named_and_it_samples_on(trainer, weights, monkeypatch):
    trainer.push(weights, "first")
    engine = type(trainer.client.engine_of(trainer.client.base_urls[0]))
    monkeypatch.setattr(
        engine, "release_memory", staticmethod(lambda parts: Request("POST", "/release_nothing", {}))
    )
    with pytest.raises(RolloutServerError, match="answered POST /release_nothing with HTTP 404"):
        trainer.release()
    assert trainer.version() == "first" and not trainer.servers.memory.lacking
    assert trainer.another().finish_reason == "length"


def test_release_when_the_server_was_started_without_memory_saver_then_named_and_it_samples_on(
    companion, tiny_moe_dir, weights
):
    trainer = Colocated([companion.url], tiny_moe_dir)
    before = trainer.version()
    try:
        with pytest.raises(
            RolloutProtocolError, match="`colocate` needs a server started with --enable-memory-saver"
        ):
            trainer.release()
        assert trainer.another().finish_reason == "length" and trainer.version() == before
    finally:
        trainer.close()


def test_push_when_a_released_server_was_killed_and_started_again_then_it_is_taken_in_with_all_of_its_memory(
    trainer, saving, weights, told
):
    trainer.push(weights, "first")
    trainer.release()
    saving.kill()
    with pytest.raises(RolloutServerError):
        trainer.push(weights, "second")
    trainer.servers.memory.tell_left()
    assert [facts["servers"] for kind, facts in told if kind == "memory_left_released"] == [
        [saving.server.url]
    ]
    saving.running()
    trainer.push(weights, "second")
    assert trainer.version() == "second" and not trainer.servers.memory.lacking
    trainer.release()
    trainer.push(weights, "third")
    assert trainer.version() == "third"
