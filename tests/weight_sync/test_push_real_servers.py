"""Pushes to real servers of every engine over every transport: what arrives, and what goes
wrong on the way.
"""

from contextlib import contextmanager

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import IncompletePush
from megatron_rl_corr.models.hf_folder import copy_model_files
from megatron_rl_corr.rollout import RolloutProtocolError, RolloutServerError, SamplingParams
from megatron_rl_corr.weight_sync import transports
from megatron_rl_corr.weight_sync.rounding import is_rounded, round_fp8_blockwise
from tests.asking_processes import asking_processes
from tests.faults.drills import drill
from tests.hf_truth import assert_is_truth
from tests.server_load import wait_until_sampling
from tests.weight_sync.pushing import PROMPT, SAMPLING, Pushing

TRANSPORTS = ("distributed", "tensor", "disk")

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def weights(tiny_moe_dir):
    return load_file(tiny_moe_dir / "model.safetensors")


@contextmanager
def trainers(server, engine, model_dir, weights, folder):
    """make(kind, *more urls): a trainer rank; the shared server gets its weights and their name back."""
    made = []

    def make(kind, *urls):
        disk = folder / f"weights{len(made)}" if kind == "disk" else None
        made.append(Pushing([server.url, *urls], kind, model_dir, disk, engine))
        return made[-1]

    first = Pushing([server.url], "tensor", model_dir, None, engine)
    try:
        before = first.version()
        yield make
        first.push(weights, before)
    finally:
        for one in (*made, first):
            one.close()


@pytest.fixture
def pushing(companion, victim, tiny_moe_dir, weights, tmp_path):
    """To the server beside the victim, which is the second one, and may be killed."""
    victim.revive()
    with trainers(companion, victim.engine, tiny_moe_dir, weights, tmp_path) as make:
        yield make


@pytest.fixture
def any_pushing(engine_server, tiny_moe_dir, weights, tmp_path):
    """(engine, make): to a server of each engine."""
    engine, server = engine_server
    with trainers(server, engine, tiny_moe_dir, weights, tmp_path) as make:
        yield engine, make


def noisy(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def listening():
    """Where this process listens."""
    return {one.laddr for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"}


def model_of(model_dir, weights, folder):
    """The Hugging Face model with these weights, saved in `folder`."""
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    copy_model_files(model_dir, folder)
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_push_when_all_weights_changed_then_every_parameter_is_verified_and_samples_are_of_them(
    any_pushing, weights, tiny_moe_dir, tmp_path, kind
):
    _, make = any_pushing
    trainer, new, before = make(kind), noisy(weights, seed=TRANSPORTS.index(kind)), listening()
    trainer.push(new, "new")
    assert {place.ip for place in listening() - before} == ({"127.0.0.1"} if kind == "distributed" else set())
    assert trainer.compared == len(trainer.parameters()) > 20
    sample = trainer.sample()
    assert sample.oldest_version == "new"
    assert_is_truth(sample, model_of(tiny_moe_dir, new, tmp_path / "hf"), atol=1e-5)
    trainer.push(new, "again")  # a skipped step changes nothing
    assert trainer.compared == len(trainer.parameters()) and trainer.sample().oldest_version == "again"


@pytest.mark.parametrize("kind", ["tensor", "disk"])
def test_push_when_rounded_then_all_is_verified_and_samples_are_of_the_rounded_weights(
    any_pushing, weights, tiny_moe_dir, tmp_path, kind
):
    _, make = any_pushing
    # A large weight makes the scale of its block, and rounding, coarse: log-probs move by much
    # more than the bound.
    trainer, new = (
        make(kind),
        {name: 4 * w if w.ndim == 2 else w for name, w in noisy(weights, seed=12).items()},
    )
    trainer.servers.rounding = "fp8_blockwise"
    trainer.push(new, "rounded")
    assert trainer.compared == len(trainer.parameters()) > 20
    sample = trainer.sample()
    rounded = {name: round_fp8_blockwise(w) if is_rounded(name, w) else w for name, w in new.items()}
    assert_is_truth(sample, model_of(tiny_moe_dir, rounded, tmp_path / "rounded"), atol=1e-5)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_is_truth(sample, model_of(tiny_moe_dir, new, tmp_path / "whole"), atol=1e-3)


LOST = {
    "sglang": (RolloutProtocolError, "1 of .* not those that were sent: {parameter};"),
    "vllm": (RolloutServerError, "not complete: 1 of 135 tensors have not come: {name}"),
}
"""An update that lacks a tensor: SGLang keeps the old one, and its checksum tells; vLLM's is
broken off at its end.
"""


@drill("a tensor is lost on its way to a server", promised="server and parameter are named")
@pytest.mark.parametrize(
    ("kind", "lost", "parameter"),
    [
        ("tensor", "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("tensor", "model.layers.2.mlp.experts.3.up_proj.weight", "model.layers.2.mlp.experts.w13_weight"),
        ("distributed", "model.norm.weight", "model.norm.weight"),
    ],
)
def test_push_when_a_tensor_is_lost_on_its_way_then_error_names_the_server_and_the_parameter(
    any_pushing, weights, monkeypatch, kind, lost, parameter
):
    engine, make = any_pushing
    trainer = make(kind)
    send = trainer.transport.send
    monkeypatch.setattr(
        trainer.transport, "send", lambda bucket: send([one for one in bucket if one[0] != lost])
    )
    kind_of_error, told = LOST[engine]
    with pytest.raises(kind_of_error, match=told.format(parameter=parameter, name=lost)) as error:
        trainer.push(noisy(weights, seed=3), "new")
    assert error.value.url == trainer.client.base_urls[0]
    assert trainer.paused_response().output_ids.numel() == 6  # it is not left paused


def test_push_when_a_tensor_is_not_sent_then_its_name_ends_it_and_the_server_goes_on(any_pushing, weights):
    _, make = any_pushing
    trainer = make("tensor")
    new = noisy(weights, seed=8)
    del new["model.layers.1.self_attn.q_norm.weight"]
    with pytest.raises(
        IncompletePush, match="nothing was sent for 1 of .*: model.layers.1.self_attn.q_norm.weight;"
    ):
        trainer.push(new, "new")
    assert trainer.version() == "unfinished new"  # what has half arrived passes for no version
    assert trainer.paused_response().output_ids.numel() == 6


MISFITS = [
    ({"model.layers.9.x.weight": torch.ones(2)}, "its checkpoint has none of model.layers.9.x.weight"),
    (
        {"model.norm.weight": torch.ones(3)},
        r"model.norm.weight has shape \[3\], and \[64\] in its checkpoint",
    ),
    (
        {"model.layers.1.self_attn.k_proj.weight": None},
        "qkv_proj is one layer there, of which .*k_proj.weight",
    ),
]
"""What is wrong with an update for a vLLM server -> what it is refused with."""


@drill("weights of another model for a server", promised="refused by name before the first byte")
@pytest.mark.parametrize("kind", ["tensor", "distributed", "disk"])
def test_push_when_it_does_not_fit_a_vllm_server_then_refused_by_name_before_the_first_byte(
    vllm_server_fp32, tiny_moe_dir, weights, tmp_path, kind
):
    with trainers(vllm_server_fp32, "vllm", tiny_moe_dir, weights, tmp_path) as make:
        trainer = make(kind)
        trainer.push(weights, "old")
        before = trainer.checksums()
        trainer.servers.coverage = None  # which would find it too, once all has been sent
        for changed, told in MISFITS:
            wrong = {name: t for name, t in (noisy(weights, seed=2) | changed).items() if t is not None}
            with pytest.raises(RolloutServerError, match=told):
                trainer.push(wrong, "new")
            assert trainer.checksums() == before
            if kind != "disk":  # whose folder is read after the name has changed
                assert trainer.version() == "old"
        if kind != "disk":
            assert trainer.sample().oldest_version == "old"


UNREADABLE = {"sglang": "HTTP 400.*`weight_dir` under the same path", "vllm": "there is no folder /nowhere"}


def test_push_when_the_server_cannot_read_the_folder_then_error_says_so_and_the_old_weights_stay(
    any_pushing, weights, monkeypatch
):
    engine, make = any_pushing
    trainer = make("disk")
    trainer.push(weights, "old")
    before = trainer.checksums()

    async def elsewhere(path):  # as on a host where nothing is mounted there
        return await ServerControl.update_weights_from_disk(trainer.client, f"/nowhere{path}")

    deliver = trainer.transport.deliver

    def delivering(version):
        monkeypatch.setattr(trainer.transport.servers, "update_weights_from_disk", elsewhere)
        deliver(version)

    monkeypatch.setattr(trainer.transport, "deliver", delivering)
    with pytest.raises(RolloutServerError, match=UNREADABLE[engine]):
        trainer.push(noisy(weights, seed=7), "new")
    assert trainer.checksums() == before and trainer.paused_response().output_ids.numel() == 6
    trainer.transport.deliver = deliver
    monkeypatch.undo()
    trainer.push(weights, "next")  # and takes the next one
    assert trainer.sample().oldest_version == "next"


@drill(
    "a trainer killed in the middle of a push",
    promised="half sent weights pass for no version; the next push heals",
)
def test_push_when_a_trainer_was_killed_in_the_middle_then_the_next_one_heals(
    any_pushing, weights, tiny_moe_dir, tmp_path, monkeypatch
):
    _, make = any_pushing
    killed = make("tensor")
    killed.push(weights, "old")
    sent, send = [], killed.transport.send

    def dying(bucket):
        if len(sent) == 3:
            raise KeyboardInterrupt
        sent.append(bucket)
        send(bucket)

    monkeypatch.setattr(killed.transport, "send", dying)
    monkeypatch.setattr(killed.servers, "abandon", lambda: None)  # a dead process asks nobody
    with pytest.raises(KeyboardInterrupt):
        killed.push(noisy(weights, seed=9), "new")
    assert len(sent) == 3 and killed.version() == "unfinished new"
    trainer, new = make("distributed"), noisy(weights, seed=10)
    trainer.push(new, "healed")
    assert trainer.compared == len(trainer.parameters())
    assert_is_truth(trainer.sample(), model_of(tiny_moe_dir, new, tmp_path / "hf"), atol=1e-5)


def test_push_when_a_response_is_running_then_tokens_after_it_are_of_the_new_weights_and_spans_say_so(
    any_pushing, weights, tiny_moe_dir, tmp_path
):
    _, make = any_pushing
    trainer, new = make("tensor"), noisy(weights, seed=11)
    trainer.push(weights, "old")
    url, long = trainer.client.base_urls[0], SamplingParams(400, ignore_eos=True)
    running = trainer.loop.submit(trainer.client.generate([PROMPT], long))
    wait_until_sampling(url)
    trainer.push(new, "new")
    (sample,) = running.result(120)
    old_span, new_span = sample.weight_versions
    assert (old_span.version, new_span.version, new_span.end) == ("old", "new", 400)
    for model, span in (
        (model_of(tiny_moe_dir, weights, tmp_path / "a"), old_span),
        (model_of(tiny_moe_dir, new, tmp_path / "b"), new_span),
    ):
        ids = torch.cat([sample.prompt_ids, sample.output_ids])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, sample.prompt_ids.numel() - 1 : -1]
        truth = torch.log_softmax(logits, -1).gather(1, sample.output_ids[:, None])[:, 0]
        away = (truth - sample.rollout_logprobs)[span.start : span.end].abs()
        assert away.max() < 1e-5


@drill("one of two servers misses a tensor", promised="it is named")
def test_push_when_only_one_of_two_servers_misses_a_tensor_then_it_is_named(
    pushing, weights, victim, tiny_moe_dir
):
    trainer = pushing("tensor", victim.server.url)
    trainer.push(noisy(weights, seed=4), "both")
    assert {t.server for t in trainer.loop.call(trainer.client.generate([PROMPT] * 8, SAMPLING))} == set(
        trainer.client.base_urls
    )
    alone = Pushing([victim.server.url], "tensor", tiny_moe_dir, None, victim.engine)
    try:
        alone.push(noisy(weights, seed=5), "other")  # another trainer
    finally:
        alone.close()
    with pytest.raises(RolloutProtocolError, match="of its weights differ from those of") as error:
        trainer.loop.call(trainer.verifier.read(trainer.client))
    assert error.value.url == victim.server.url


def push_with_a_death(trainer, victim, new, monkeypatch):
    """Push version 2 to two servers, the second of which is killed at the third bucket: the other has all."""
    survivor = trainer.client.base_urls[0]
    send, sent = trainer.transport.send, []

    def killing(bucket):
        sent.append(bucket)
        if len(sent) == 3:
            victim.kill()
        send(bucket)

    monkeypatch.setattr(trainer.transport, "send", killing)
    trainer.push(new, "2")
    assert trainer.compared == len(trainer.parameters()) and len(sent) > 5  # again from the first bucket
    samples = trainer.loop.call(trainer.client.generate([PROMPT] * 8, SAMPLING), timeout=60)
    assert {(t.server, t.oldest_version) for t in samples} == {(survivor, "2")}


@drill("SIGKILL of a server in the middle of a push", promised="the others have all weights, and sample")
def test_push_when_a_server_is_killed_in_the_middle_then_the_others_have_all_weights_and_sample(
    pushing, weights, victim, monkeypatch
):
    trainer = pushing("tensor", victim.server.url)
    trainer.push(weights, "1")
    push_with_a_death(trainer, victim, noisy(weights, seed=6), monkeypatch)


def test_push_when_processes_announce_then_all_is_verified_and_a_server_that_is_killed_is_left_out(
    pushing, weights, victim, monkeypatch
):
    monkeypatch.setattr(transports, "announcing_processes", lambda servers: servers)
    trainer = pushing("distributed", victim.server.url)
    trainer.push(noisy(weights, seed=14), "1")
    assert trainer.compared == len(trainer.parameters())
    samples = trainer.loop.call(trainer.client.generate([PROMPT] * 8, SAMPLING), timeout=60)
    assert {t.oldest_version for t in samples} == {"1"} and len({t.server for t in samples}) == 2
    assert len(asking_processes()) == 2
    push_with_a_death(trainer, victim, noisy(weights, seed=15), monkeypatch)
