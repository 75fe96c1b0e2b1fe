"""Pushes to real SGLang servers over every transport: weights arrive, a lost one is noticed, a dead server left out."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import IncompletePush
from megatron_rl_corr.models.hf_folder import copy_model_files
from megatron_rl_corr.rollout import LoopThread, RolloutClient, RolloutProtocolError, RolloutServerError, SamplingParams
from megatron_rl_corr.weight_sync.coverage import make_coverage
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.transports import make_transport
from megatron_rl_corr.weight_sync.update import push_weights
from megatron_rl_corr.weight_sync.verify import make_verifiers
from tests.hf_truth import assert_is_truth

TRANSPORTS = ("distributed", "tensor", "disk")
SAMPLING = SamplingParams(6, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5]
BUCKET_BYTES = 300_000  # several buckets


class Pushing:
    """One trainer rank of one stage, that holds whole Hugging Face tensors."""

    def __init__(self, urls, kind, model_dir, folder):
        vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
        self.loop = LoopThread()
        self.client = RolloutClient(urls, vocab_size=vocab_size, timeout_s=60)
        self.transport = make_transport(
            kind, self.client, self.loop, backend="gloo", checkpoint=model_dir, folder=str(folder), stage=0, sends=True
        )
        verifiers = make_verifiers("checksum", model_dir, self.client.fleet.engines)
        (self.verifier,) = verifiers.values()
        self.compared = None
        self.servers = WeightServers(
            self.client, self.loop, self.transport, verifiers=verifiers,
            coverage=make_coverage(model_dir),
        )
        compare = self.verifier.compare

        def counting(checksums):
            self.compared = compare(checksums)

        self.verifier.compare = counting

    def push(self, weights, version):
        exporter = SimpleNamespace(
            leads=True, sends=True, stage=0, num_stages=1, units=lambda _: ([named] for named in weights.items())
        )
        push_weights(exporter, self.servers, version=version, bucket_bytes=BUCKET_BYTES)

    def sample(self):
        return self.loop.call(self.client.generate([PROMPT], SAMPLING), timeout=60)[0]

    def parameters(self):
        """Names of the first server's."""
        (answer, *_) = self.loop.call(self.client.control(self.client.base_urls[:1]).weights_checker())
        return set(answer["ranks"][0]["checksums"])

    def close(self):
        self.servers.close()
        self.loop.call(self.client.close())
        self.loop.close()


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def weights(tiny_moe_dir):
    return load_file(tiny_moe_dir / "model.safetensors")


@pytest.fixture
def pushing(sglang_server_fp32, tiny_moe_dir, weights, tmp_path):
    """pushing(kind, *more urls): a trainer rank; the shared server gets its weights and their name back."""
    made = []

    def make(kind, *urls):
        folder = tmp_path / f"weights{len(made)}" if kind == "disk" else None
        made.append(Pushing([sglang_server_fp32.url, *urls], kind, tiny_moe_dir, folder))
        return made[-1]

    before = None
    try:
        first = Pushing([sglang_server_fp32.url], "tensor", tiny_moe_dir, None)
        before = first.loop.call(first.client.model_info())[0]["weight_version"]
        yield make
        first.push(weights, before)
    finally:
        for one in (*made, first):
            one.close()


def noisy(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def model_of(model_dir, weights, folder):
    """The Hugging Face model with these weights, saved in `folder`."""
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    copy_model_files(model_dir, folder)
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_push_when_all_weights_changed_then_every_parameter_is_verified_and_samples_are_of_them(
    pushing, weights, tiny_moe_dir, tmp_path, kind
):
    trainer, new = pushing(kind), noisy(weights, seed=TRANSPORTS.index(kind))
    trainer.push(new, "new")
    assert trainer.compared == len(trainer.parameters()) > 20
    sample = trainer.sample()
    assert sample.oldest_version == "new"
    assert_is_truth(sample, model_of(tiny_moe_dir, new, tmp_path / "hf"), atol=5e-5)
    trainer.push(new, "again")  # a skipped step changes nothing
    assert trainer.compared == len(trainer.parameters()) and trainer.sample().oldest_version == "again"


@pytest.mark.parametrize(
    ("kind", "lost", "told"),
    [
        ("tensor", "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("tensor", "model.layers.2.mlp.experts.3.up_proj.weight", "model.layers.2.mlp.experts.w13_weight"),
        ("distributed", "model.norm.weight", "model.norm.weight"),
    ],
)
def test_push_when_a_tensor_is_lost_on_its_way_then_error_names_the_server_and_the_parameter(
    pushing, weights, monkeypatch, kind, lost, told
):
    trainer = pushing(kind)
    send = trainer.transport.send
    monkeypatch.setattr(trainer.transport, "send", lambda bucket: send([one for one in bucket if one[0] != lost]))
    with pytest.raises(RolloutProtocolError, match=f"1 of .* not those that were sent: {told};") as error:
        trainer.push(noisy(weights, seed=3), "new")
    assert error.value.url == trainer.client.base_urls[0] and error.value.endpoint == "/weights_checker"
    assert trainer.sample().output_ids.numel() == 6  # it is not left paused


def test_push_when_a_tensor_is_not_sent_then_its_name_ends_it_and_the_server_goes_on(pushing, weights):
    trainer = pushing("tensor")
    new = noisy(weights, seed=8)
    del new["model.layers.1.self_attn.q_norm.weight"]
    with pytest.raises(IncompletePush, match="nothing was sent for 1 of .*: model.layers.1.self_attn.q_norm.weight;"):
        trainer.push(new, "new")
    assert trainer.sample().output_ids.numel() == 6


def test_push_when_the_server_cannot_read_the_folder_then_error_says_so_and_the_old_weights_stay(
    pushing, weights, monkeypatch
):
    trainer = pushing("disk")
    trainer.push(weights, "old")
    (before,) = trainer.loop.call(trainer.client.weights_checker())

    async def elsewhere(path):  # as on a host where nothing is mounted there
        return await ServerControl.update_weights_from_disk(trainer.client, f"/nowhere{path}")

    deliver = trainer.transport.deliver

    def delivering(version):
        monkeypatch.setattr(trainer.transport.servers, "update_weights_from_disk", elsewhere)
        deliver(version)

    monkeypatch.setattr(trainer.transport, "deliver", delivering)
    with pytest.raises(RolloutServerError, match="HTTP 400.*`weight_dir` under the same path"):
        trainer.push(noisy(weights, seed=7), "new")
    (after,) = trainer.loop.call(trainer.client.weights_checker())
    assert after["ranks"][0]["checksums"] == before["ranks"][0]["checksums"]
    assert trainer.sample().oldest_version == "old"


def test_push_when_only_one_of_two_servers_misses_a_tensor_then_it_is_named(pushing, weights, victim, tiny_moe_dir):
    trainer = pushing("tensor", victim.server.url)
    trainer.push(noisy(weights, seed=4), "both")
    assert {t.server for t in trainer.loop.call(trainer.client.generate([PROMPT] * 8, SAMPLING))} == set(
        trainer.client.base_urls
    )
    alone = Pushing([victim.server.url], "tensor", tiny_moe_dir, None)
    try:
        alone.push(noisy(weights, seed=5), "other")  # another trainer
    finally:
        alone.close()
    shown = trainer.loop.call(trainer.client.weights_checker())
    assert shown[0]["ranks"][0]["checksums"].keys() == shown[1]["ranks"][0]["checksums"].keys()
    with pytest.raises(RolloutProtocolError, match="of its weights differ from those of") as error:
        trainer.loop.call(trainer.verifier.read(trainer.client))
    assert error.value.url == victim.server.url


def test_push_when_a_server_is_killed_in_the_middle_then_the_others_have_all_weights_and_sample(
    pushing, weights, victim, monkeypatch
):
    trainer = pushing("tensor", victim.server.url)
    survivor = trainer.client.base_urls[0]
    trainer.push(weights, "1")
    send, sent = trainer.transport.send, []

    def killing(bucket):
        sent.append(bucket)
        if len(sent) == 3:
            victim.kill()
        send(bucket)

    monkeypatch.setattr(trainer.transport, "send", killing)
    trainer.push(noisy(weights, seed=6), "2")
    assert trainer.compared == len(trainer.parameters()) and len(sent) > 5  # again from the first bucket
    samples = trainer.loop.call(trainer.client.generate([PROMPT] * 8, SAMPLING), timeout=60)
    assert {(t.server, t.oldest_version) for t in samples} == {(survivor, "2")}
