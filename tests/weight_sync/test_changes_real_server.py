"""Pushes of changes alone to a real server of each engine: what it has afterwards is what a push of
everything makes, and what goes wrong on the way is found and mended by one.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.engines.weight_changes import ChangedTensor, end_of_stage, packed
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.models.layouts import Replicated
from megatron_rl_corr.models.names import ParameterRule
from megatron_rl_corr.models.shards import ShardRanks
from megatron_rl_corr.reduce.layout import StageGroups
from megatron_rl_corr.weight_sync import update
from megatron_rl_corr.weight_sync.changes import DeltaPushes, changed_units
from megatron_rl_corr.weight_sync.export import StageExporter
from megatron_rl_corr.weight_sync.update import push_weights
from tests.hf_truth import assert_is_truth
from tests.weight_sync.pushing import BUCKET_BYTES, Pushing
from tests.weight_sync.test_push_real_servers import model_of

pytestmark = pytest.mark.usefixtures("one_rank")


def exporter_of(weights):
    parameters = [
        SimpleNamespace(tensor=tensor, rule=lambda _, name=name: ParameterRule(Replicated(), (name,), False))
        for name, tensor in weights.items()
    ]
    return StageExporter(parameters, ShardRanks(), StageGroups(None, None, 0), stage=0, num_stages=1)


class Trainer(Pushing):
    """One rank of one stage whose parameters are Hugging Face tensors."""

    def __init__(self, server, model_dir, *others, full_every=20):
        urls = [one.url for one in (server, *others)]
        super().__init__(urls, "distributed", model_dir, None, server.engine)
        self.weights = load_file(model_dir / "model.safetensors")
        self.exporter = exporter_of(self.weights)
        self.deltas = DeltaPushes(self.exporter, full_every=full_every)
        self.sent = []
        send = self.transport.send

        def noted(bucket):
            self.sent.append(sum(tensor.nbytes for _, tensor in bucket))
            send(bucket)

        self.transport.send = noted

    def train(self, seed, share=0.02):
        """Change so many of the values."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.weights.values():
            changed = torch.rand(tensor.shape, generator=generator) < share
            tensor[changed] += 0.05 * torch.randn(int(changed.sum()), generator=generator)

    def push_changes(self, version):
        self.sent.clear()
        push_weights(
            self.exporter, self.servers, version=version, bucket_bytes=BUCKET_BYTES, deltas=self.deltas
        )
        return self.checksums()

    def checksums_of_everything(self, version):
        """Those of a push of the same weights by a trainer that knows nothing of the ones before."""
        self.push({name: tensor.clone() for name, tensor in self.weights.items()}, version)
        return self.checksums()


@pytest.fixture
def trainer(engine_server, tiny_moe_dir):
    trainer = Trainer(engine_server[1], tiny_moe_dir)
    before, whole = trainer.version(), {name: one.clone() for name, one in trainer.weights.items()}
    try:
        yield trainer
        trainer.push(whole, before)
    finally:
        trainer.close()


def test_push_when_a_few_values_change_then_only_they_are_sent_and_the_server_is_as_after_everything(
    trainer, tiny_moe_dir, tmp_path
):
    everything = sum(tensor.nbytes for tensor in trainer.weights.values())
    trainer.push_changes("0")
    assert sum(trainer.sent) == everything and trainer.deltas.share == 1
    trainer.train(seed=9)
    trainer.push_changes("proof")
    assert everything < sum(trainer.sent) < 1.05 * everything and trainer.deltas.share == 1
    for number in range(1, 4):
        trainer.train(seed=number)
        after = trainer.push_changes(str(number))
        assert 0.015 < trainer.deltas.share < 0.025 and sum(trainer.sent) < 0.05 * everything
        assert trainer.compared == len(trainer.parameters()) > 20  # of whole parameters, by the trainer's own
        sample = trainer.sample()
        assert sample.oldest_version == str(number)
    assert_is_truth(sample, model_of(tiny_moe_dir, trainer.weights, tmp_path / "hf"), atol=1e-5)
    assert after == trainer.checksums_of_everything("whole")


def test_push_when_nothing_or_most_changed_then_nothing_or_everything_is_sent(trainer):
    before = trainer.push_changes("0")
    assert trainer.push_changes("nothing") == before and trainer.deltas.share == 0
    trainer.train(seed=4)
    before = trainer.push_changes("proof")  # by the first push in which anything changed
    assert trainer.deltas.share == 1
    assert trainer.push_changes("1") == before and sum(trainer.sent) == 4 and trainer.deltas.share == 0
    trainer.train(seed=5, share=0.5)
    trainer.push_changes("2")
    assert trainer.deltas.share == 1
    trainer.train(seed=6)
    trainer.push_changes("3")
    assert trainer.deltas.share < 0.05
    trainer.weights["model.norm.weight"][0] = torch.nan  # which stands for no change on the way
    assert trainer.deltas.changes(same_servers=True) is None
    trainer.weights["model.norm.weight"][0] = 1.0


@pytest.mark.parametrize("way", ["lost", "doubled", "reordered", "spoilt", "not copied"])
def test_push_when_changes_go_wrong_then_it_is_found_and_everything_is_sent(trainer, monkeypatch, way):
    trainer.push_changes("0")
    trainer.train(seed=10)
    trainer.push_changes("proof")
    trainer.train(seed=11, share=0.09)
    sent, send_changes = [], trainer.servers.send_changes

    def planted(bucket):
        sent.append(bucket)
        if way == "lost" and len(sent) == 2:
            return
        if way == "spoilt" and len(sent) == 2:
            bucket = [*bucket[:1], (bucket[1][0], bucket[1][1] + 1), *bucket[2:]]
        if way == "reordered" and len(sent) == 2:
            return
        send_changes(bucket)
        trainer.servers.finish()
        if way == "doubled" and len(sent) == 2:
            send_changes(bucket)
        if way == "reordered" and len(sent) == 3:
            send_changes(sent[1])

    trainer.servers.send_changes = planted
    if way == "not copied":
        monkeypatch.setattr(update, "changed_units", lambda units: list(changed_units(units))[:-1])
    repeated = EVENTS.counts.get("push_repeated", 0)
    after = trainer.push_changes("1")
    assert EVENTS.counts["push_repeated"] == repeated + 1 and trainer.deltas.share == 1
    assert trainer.compared == len(trainer.parameters())
    assert after == trainer.checksums_of_everything("whole")


def test_push_when_the_server_has_other_weights_or_it_is_time_then_everything_is_sent(
    engine_server, tiny_moe_dir, trainer
):
    trainer.push_changes("0")
    other = Trainer(engine_server[1], tiny_moe_dir)
    try:
        other.push_changes("other")  # as a server that was started anew, it has weights of another name
    finally:
        other.close()
    trainer.push_changes("1")
    assert trainer.deltas.share == 1
    trainer.deltas = DeltaPushes(trainer.exporter, full_every=3)
    shares = []
    for number in range(2, 10):
        if number == 3:
            trainer.train(seed=number)
        trainer.push_changes(str(number))
        shares.append(trainer.deltas.share)
    # The first, then what proves the changes; of three pushes one sends everything, and proves them again.
    assert shares == [1, 1, 0, 0, 1, 0, 0, 1]


def test_push_when_everything_makes_other_weights_than_changes_then_no_push_sends_changes_any_more(trainer):
    trainer.push_changes("0")
    trainer.train(seed=7)
    read = trainer.verifier.read

    async def planted(servers):
        found = await read(servers)
        if trainer.deltas._pushed is not None and len(trainer.sent) < 3:  # after the changes
            [server] = found
            (rank, sums), *others = server.ranks
            name = next(iter(sums))
            found = [replace(server, ranks=((rank, sums | {name: "another"}), *others))]
        return found

    trainer.verifier.read, trainer.verifier.compare = planted, lambda checksums: None
    trainer.push_changes("proof")
    assert EVENTS.counts["changes_given_up"] >= 1
    trainer.push_changes("1")
    assert trainer.deltas.share == 1 and len(trainer.sent) > 2


def test_proof_when_a_server_is_lost_in_it_then_the_next_push_of_changes_is_proven_instead(monkeypatch):
    weights = {"w": torch.zeros(100)}
    deltas = DeltaPushes(exporter_of(weights), full_every=20)
    deltas.note_pushed("0", None)

    def changes():
        weights["w"][0] += 1
        return deltas.changes(same_servers=True)

    deltas.note_proof(changes(), is_right=True)
    assert not changes().due
    servers = SimpleNamespace(loaded={}, urls=("a", "b"))
    monkeypatch.setattr(update, "_use_reachable_servers", lambda *_: setattr(servers, "urls", ("a",)))
    monkeypatch.setattr(update, "_push_once", lambda *_: None)
    update._prove_changes(deltas._exporter, servers, "1", 1, deltas, changes())
    deltas.note_pushed("1", None)
    assert changes().due


def test_push_when_changes_fail_again_and_again_then_they_are_not_tried_any_more(trainer):
    trainer.push_changes("0")
    trainer.train(seed=8)
    trainer.push_changes("proof")

    def fails(bucket):
        raise RolloutServerError("http://a", "/update", 400, "no")

    trainer.servers.send_changes = fails
    given_up = EVENTS.counts.get("changes_given_up", 0)
    for number in range(3):
        assert EVENTS.counts.get("changes_given_up", 0) == given_up
        trainer.push_changes(f"failed {number}")
        assert trainer.deltas.share == 1
    assert EVENTS.counts["changes_given_up"] == given_up + 1
    repeated = EVENTS.counts["push_repeated"]
    trainer.push_changes("everything")
    assert EVENTS.counts["push_repeated"] == repeated


def test_push_when_no_answer_comes_again_and_again_then_changes_are_tried_on(trainer):
    trainer.push_changes("0")
    trainer.train(seed=8)
    trainer.push_changes("proof")

    def lost(bucket):
        raise RolloutServerError("http://a", "/update", None, "connection reset by peer")

    send, given_up = trainer.servers.send_changes, EVENTS.counts.get("changes_given_up", 0)
    for number in range(4):
        trainer.servers.send_changes = lost
        trainer.push_changes(f"lost {number}")
        assert trainer.deltas.share == 1
        trainer.servers.send_changes = send
    assert EVENTS.counts.get("changes_given_up", 0) == given_up
    trainer.train(seed=9)
    trainer.push_changes("changes")
    assert 0 < trainer.deltas.share < 0.2


class Sent:
    """Requests of an update to a vLLM server, one by one."""

    def __init__(self, trainer):
        self._call = trainer.loop.call
        self._control = trainer.client.control(trainer.client.base_urls)
        self._weights = trainer.weights
        self._shapes = {name: list(tensor.shape) for name, tensor in trainer.weights.items()}
        self._name, self._weight = next(item for item in trainer.weights.items() if "q_proj" in item[0])

    def everything(self, name):
        """An update of one tensor."""
        shapes = {name: self._shapes[name]}
        self._call(self._control.begin_weight_update(shapes, changes_follow=True))
        self.bucket([(name, self._weights[name])])
        self.end()

    def begin(self, base):
        self._call(self._control.begin_weight_update(self._shapes, changes_follow=True))
        self._call(self._control.begin_changes("1", base, 1))

    def bucket(self, bucket):
        entry = load_engine("vllm").serialized(bucket)
        self._call(self._control.update_weights_from_tensor([[entry]]))

    def changes(self, number=0, name=None):
        """A bucket: one value of a layer, as it is, or of another name."""
        one = torch.full_like(self._weight, torch.nan)
        one[0, 0] = self._weight[0, 0]
        return packed([(name or self._name, ChangedTensor.of(one))], stage=0, number=number)

    def end(self):
        self._call(self._control.end_weight_update())

    def checksums(self):
        return self._call(self._control.weights_checker())

    def is_mixed(self):
        state = Request("POST", "/collective_rpc", {"method": "rl_corr_state", "kwargs": {}})
        [url] = self._control.base_urls
        return self._call(self._control.ask(url, state))["results"][0]["mixed"]


def test_changes_when_a_vllm_server_does_not_know_what_they_are_of_then_refused_before_a_byte(
    vllm_server_fp32, tiny_moe_dir
):
    trainer = Trainer(vllm_server_fp32, tiny_moe_dir)
    sent, before = Sent(trainer), trainer.version()
    try:
        trainer.push_changes("kept")
        whole = trainer.checksums_of_everything(before)  # by a trainer that sends everything always
        with pytest.raises(
            RolloutServerError, match="does not know what the changes are of; send everything"
        ):
            sent.begin("0")
        sent.everything("model.norm.weight")
        sent.begin("0")
        with pytest.raises(RolloutServerError, match="qkv_proj.weight was not kept as it was loaded; send"):
            sent.bucket(sent.changes())
        assert not sent.is_mixed()
        trainer.deltas.note_failure()
        trainer.push_changes("0")
        sent.begin("0")
        sent.bucket(sent.changes())
        with pytest.raises(RolloutServerError, match="weights are being loaded; their checksums can be told"):
            sent.checksums()
        sent.bucket(end_of_stage(stage=0, buckets=1))
        sent.end()
        for _ in range(2):
            with pytest.raises(RolloutServerError, match="changes of '0' do not fit weights that are '1'"):
                sent.begin("0")
        assert not sent.is_mixed() and trainer.checksums() == whole
    finally:
        trainer.checksums_of_everything(before)
        trainer.close()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("none", "not all buckets of changes have come"),
        ("whole", "whole weights came where changes were expected"),
        ("unknown", "x.weight is not part of this update"),
        ("doubled", "bucket 0 of stage 0 came where 1 was expected"),
    ],
)
def test_changes_when_they_break_off_at_a_vllm_server_then_it_takes_everything_next(
    vllm_server_fp32, tiny_moe_dir, wrong, told
):
    trainer = Trainer(vllm_server_fp32, tiny_moe_dir)
    sent, before = Sent(trainer), trainer.version()
    try:
        whole = trainer.push_changes("0")
        sent.begin("0")
        sent.bucket(sent.changes())
        buckets = {
            "whole": [item for item in trainer.weights.items() if "k_proj" in item[0]][:1],
            "unknown": sent.changes(1, "x.weight"),
            "doubled": sent.changes(0),
        }
        with pytest.raises(RolloutServerError, match=told):
            if wrong in buckets:
                sent.bucket(buckets[wrong])
            sent.end()
        assert sent.is_mixed()
        with pytest.raises(RolloutServerError, match="send everything first"):
            sent.begin("0")
        trainer.deltas.note_failure()
        assert trainer.push_changes("1") == whole and trainer.deltas.share == 1 and not sent.is_mixed()
    finally:
        trainer.checksums_of_everything(before)
        trainer.close()


def test_checksums_after_an_update_without_them_then_not_those_of_the_weights_before(
    vllm_server_fp32, tiny_moe_dir
):
    trainer = Trainer(vllm_server_fp32, tiny_moe_dir)
    before, verifiers = trainer.version(), trainer.servers.verifiers
    whole = {name: tensor.clone() for name, tensor in trainer.weights.items()}
    try:
        old = trainer.checksums_of_everything("0")
        trainer.train(seed=12, share=0.5)
        trainer.servers.verifiers = {}
        trainer.checksums_of_everything("1")
        found, trainer.servers.verifiers = trainer.checksums(), verifiers
        new = trainer.checksums_of_everything("2")
        assert old != new and "unknown" in found.values()  # of what kernels pack
        assert all(one in ("unknown", new[name]) for name, one in found.items())
    finally:
        trainer.servers.verifiers = verifiers
        trainer.push(whole, before)
        trainer.close()
