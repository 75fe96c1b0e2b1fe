"""New weights for a real SGLang server over gloo: sent while a request waits, and put back afterwards."""

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


class Trainer:
    """Rank 0 of a group with one server."""

    def __init__(self, url, vocab_size):
        self.loop = LoopThread()
        self.client = RolloutClient([url], vocab_size=vocab_size, timeout_s=120)
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

    def send(self, weights, version):
        """Broadcast from this thread while the request waits on the loop's."""
        receiving = self.loop.submit(
            self.client.update_weights_from_distributed(
                list(weights),
                [str(w.dtype).removeprefix("torch.") for w in weights.values()],
                [list(w.shape) for w in weights.values()],
                group_name=self.group_name,
                flush_cache=True,
                weight_version=version,
            )
        )
        for work in [dist.broadcast(w, src=0, group=self.group, async_op=True) for w in weights.values()]:
            work.wait()
        return receiving.result(60)

    def close(self):
        self.loop.call(self.client.destroy_weights_update_group(self.group_name))
        self.loop.call(self.client.close())
        self.loop.close()

    def checksum(self):
        (answer,) = self.loop.call(self.client.weights_checker())
        return answer["ranks"][0]["checksums"]

    def greedy(self):
        return self.loop.call(self.client.generate([PROMPT], GREEDY))[0]


@pytest.fixture(scope="module")
def weights(tiny_moe_dir):
    return load_file(tiny_moe_dir / "model.safetensors")


@pytest.fixture
def trainer(sglang_server_fp32, tiny_moe_dir, weights):
    """Puts the server's weights and their name back when the test is over."""
    vocab_size = json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]
    trainer = Trainer(sglang_server_fp32.url, vocab_size)
    (before,) = trainer.loop.call(trainer.client.model_info())
    checksum = trainer.checksum()
    try:
        yield trainer
        try:
            trainer.loop.call(trainer.client.begin_weight_update())
        except RolloutServerError as error:
            assert "already open" in str(error)  # by a test that failed halfway
        trainer.send(weights, before["weight_version"])
        trainer.loop.call(trainer.client.end_weight_update())
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
    assert trainer.loop.call(trainer.client.begin_weight_update()) is True
    (answer,) = trainer.send(changed(weights), "after")
    assert answer["success"] is True
    assert trainer.loop.call(trainer.client.end_weight_update()) is True
    after = trainer.greedy()
    assert after.output_ids.tolist() == before.output_ids.tolist()
    assert after.oldest_version == "after" != before.oldest_version
    assert_doubled_logits(before, after, model)
    now = trainer.checksum()
    assert [name for name in now if now[name] != checksum[name]] == ["model.norm.weight"]


def test_update_when_samples_are_retracted_then_their_spans_name_both_versions(
    trainer, weights, wait_until_sampling
):
    old = trainer.greedy().oldest_version
    long = SamplingParams(300, ignore_eos=True)
    future = trainer.loop.submit(trainer.client.generate([PROMPT], long, samples_per_prompt=2))
    wait_until_sampling(trainer.client.base_urls[0])
    try:
        trainer.loop.call(trainer.client.pause_generation("retract"))
        assert not future.done()
        trainer.loop.call(trainer.client.begin_weight_update())
        trainer.send(changed(weights), "after")
        trainer.loop.call(trainer.client.end_weight_update())
    finally:
        trainer.loop.call(trainer.client.continue_generation())
    for trajectory in future.result(60):
        first, second = trajectory.weight_versions
        assert (first.version, second.version) == (old, "after") and trajectory.oldest_version == old
        assert 0 == first.start < first.end == second.start < second.end == 300


def test_update_when_no_session_is_open_then_refused_at_once_and_nothing_changes(trainer, weights):
    checksum = trainer.checksum()
    with pytest.raises(RolloutServerError, match="begin_weight_update") as error:
        trainer.loop.call(
            trainer.client.update_weights_from_distributed(
                ["model.norm.weight"],
                ["float32"],
                [list(weights["model.norm.weight"].shape)],
                group_name=trainer.group_name,
                flush_cache=True,
            ),
            timeout=30,
        )
    assert error.value.status == 400 and trainer.checksum() == checksum


def test_session_when_opened_twice_or_closed_without_one_then_error(trainer):
    trainer.loop.call(trainer.client.begin_weight_update())
    with pytest.raises(RolloutServerError, match="already open"):
        trainer.loop.call(trainer.client.begin_weight_update())
    trainer.loop.call(trainer.client.end_weight_update())
    with pytest.raises(RolloutServerError, match="no weight-update session is open"):
        trainer.loop.call(trainer.client.end_weight_update())


def test_destroy_group_when_there_is_none_of_that_name_then_error_names_the_endpoint(trainer):
    with pytest.raises(RolloutServerError, match="POST /destroy_weights_update_group with HTTP 400"):
        trainer.loop.call(trainer.client.destroy_weights_update_group("no-such-group"))
