"""New weights for a real server of each engine over gloo: sent while a request waits, and put
back afterwards.
"""

import json
import socket
import uuid
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

from megatron_rl_corr.rollout import LoopThread, RolloutClient, RolloutServerError, SamplingParams

GREEDY = SamplingParams(6, temperature=0, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5]
REFUSALS = {
    "bucket without a session": {"sglang": "begin_weight_update", "vllm": "no update is open; begin one"},
    "session opened twice": {"sglang": "already open", "vllm": None},
    "session closed without one": {"sglang": "no weight-update session is open", "vllm": "no update is open"},
    "left a group that is not there": {
        "sglang": "POST /destroy_weights_update_group with HTTP 400",
        "vllm": None,
    },
}
"""What is wrong -> what each engine's server says; None: it takes it. A vLLM server ends what a
killed trainer left.
"""


class Trainer:
    """Rank 0 of a group with one server."""

    def __init__(self, engine, url, vocab_size):
        self.engine, self.loop = engine, LoopThread()
        self.client = RolloutClient([url], vocab_size=vocab_size, timeout_s=120, engine=engine)
        self.group_name = f"test-{uuid.uuid4().hex}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        joining = self.loop.submit(
            self.client.init_weights_update_group(
                "127.0.0.1", port, group_name=self.group_name, backend="gloo"
            )
        )
        timeout = timedelta(seconds=60)
        store, _, _ = next(distributed_c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout))
        self.group, _ = distributed_c10d._new_process_group_helper(
            2,
            0,
            [],
            distributed_c10d.Backend("gloo"),
            distributed_c10d.PrefixStore(self.group_name, store),
            group_name=self.group_name,
            timeout=timeout,
        )
        distributed_c10d._world.pg_group_ranks[self.group] = {0: 0, 1: 1}
        joining.result(60)

    def update(self, weights, version, *, paused=False):
        """A whole update of one bucket."""
        if not paused:
            self.ask(self.client.pause_generation("retract"))
        try:
            self.ask(self.client.reopen_weight_update())
            self.send(weights)
            self.ask(self.client.end_weight_update())
            self.ask(self.client.update_weight_version(version))
            self.ask(self.client.flush_cache())
        finally:
            self.ask(self.client.continue_generation())

    def send(self, weights):
        """Broadcast from this thread while the request waits on the loop's."""
        receiving = self.loop.submit(self.bucket(weights))
        for work in [dist.broadcast(w, src=0, group=self.group, async_op=True) for w in weights.values()]:
            work.wait()
        return receiving.result(60)

    def bucket(self, weights):
        return self.client.update_weights_from_distributed(
            list(weights),
            [str(w.dtype).removeprefix("torch.") for w in weights.values()],
            [list(w.shape) for w in weights.values()],
            group_name=self.group_name,
        )

    def ask(self, call, timeout=60):
        return self.loop.call(call, timeout=timeout)

    def close(self):
        self.ask(self.client.destroy_weights_update_group(self.group_name))
        self.ask(self.client.close())
        self.loop.close()

    def checksum(self):
        """Parameter -> checksum."""
        (url,), (answer,) = self.client.base_urls, self.ask(self.client.weights_checker())
        (ranks,) = self.client.engine_of(url).all_checksums(url, answer)
        return ranks

    def version(self):
        return self.ask(self.client.reported_versions())[0]

    def greedy(self):
        return self.ask(self.client.generate([PROMPT], GREEDY))[0]

    def assert_refused(self, what, call):
        """Raises what REFUSALS has for the engine, or nothing."""
        words = REFUSALS[what][self.engine]
        if words is None:
            self.ask(call)
            return
        with pytest.raises(RolloutServerError, match=words):
            self.ask(call)


@pytest.fixture(scope="module")
def weights(tiny_moe_dir):
    return load_file(tiny_moe_dir / "model.safetensors")


@pytest.fixture
def trainer(engine_server, tiny_moe_dir, weights):
    """Puts the server's weights and their name back when the test is over."""
    engine, server = engine_server
    vocab_size = json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]
    trainer = Trainer(engine, server.url, vocab_size)
    before = trainer.version()
    trainer.update(weights, before)  # a vLLM server on a CPU tells checksums of what an update brought
    checksum = trainer.checksum()
    try:
        yield trainer
        trainer.update(weights, before)
        assert trainer.checksum() == checksum
    finally:
        trainer.close()


def changed(weights):
    """The weights with a final norm of twice the size: logits double, so the greedy tokens stay."""
    return weights | {"model.norm.weight": 2 * weights["model.norm.weight"]}


def assert_doubled_logits(before, after, model):
    """`after` has the log-probs that the Hugging Face model gives `before`'s tokens with doubled logits."""
    ids = torch.cat([before.prompt_ids, before.output_ids])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, before.prompt_ids.numel() - 1 : -1]
    expected = torch.log_softmax(2 * logits, -1).gather(1, before.output_ids[:, None])[:, 0]
    torch.testing.assert_close(after.rollout_logprobs, expected, atol=5e-5, rtol=0)


@pytest.fixture(scope="module")
def model(tiny_moe_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_moe_dir, dtype=torch.float32).eval()


def test_update_when_sent_in_a_session_then_samples_are_of_the_new_weights_and_carry_their_version(
    trainer, weights, model
):
    before, checksum = trainer.greedy(), trainer.checksum()
    trainer.update(changed(weights), "after")
    after = trainer.greedy()
    assert after.output_ids.tolist() == before.output_ids.tolist()
    assert after.oldest_version == "after" != before.oldest_version
    assert_doubled_logits(before, after, model)
    now = trainer.checksum()
    assert [name for name in now if now[name] != checksum[name]] == ["model.norm.weight"]


def test_update_when_samples_are_retracted_then_their_spans_name_both_versions(
    trainer, weights, wait_until_sampling
):
    old = trainer.version()
    long = SamplingParams(300, ignore_eos=True)
    future = trainer.loop.submit(trainer.client.generate([PROMPT], long, samples_per_prompt=2))
    wait_until_sampling(trainer.client.base_urls[0])
    trainer.ask(trainer.client.pause_generation("retract"))
    assert not future.done()
    trainer.update(changed(weights), "after", paused=True)
    for trajectory in future.result(60):
        first, second = trajectory.weight_versions
        assert (first.version, second.version) == (old, "after") and trajectory.oldest_version == old
        assert 0 == first.start < first.end == second.start < second.end == 300


def test_requests_of_an_update_when_out_of_order_then_refused_at_once_or_harmless_and_nothing_changes(
    trainer, weights
):
    client, checksum = trainer.client, trainer.checksum()
    trainer.ask(client.pause_generation("retract"))
    try:
        norm = {"model.norm.weight": weights["model.norm.weight"]}
        trainer.assert_refused("bucket without a session", trainer.bucket(norm))
        trainer.assert_refused("session closed without one", client.end_weight_update())
        trainer.ask(client.begin_weight_update())
        trainer.assert_refused("session opened twice", client.begin_weight_update())
        trainer.assert_refused(
            "left a group that is not there", client.destroy_weights_update_group("no-such-group")
        )
        if trainer.engine == "sglang":
            trainer.ask(client.end_weight_update())
    finally:
        trainer.ask(client.continue_generation())
    assert trainer.checksum() == checksum and trainer.greedy().output_ids.numel() == 6
