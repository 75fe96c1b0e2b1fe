"""Faults of a real vLLM server in a push, one planted at a time: each is found and named, or
refused before a byte.
"""

import asyncio
import random
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rl_corr.doctor import quick_check
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.features.push_probe.answers import Question, ask_servers
from megatron_rl_corr.features.push_probe.evidence import ROUNDINGS, TextRounding, is_off, off_by
from megatron_rl_corr.rollout import RolloutClient, RolloutProtocolError, RolloutServerError, SamplingParams
from tests.faults.drills import drill
from tests.hf_truth import assert_is_truth, scored
from tests.matrix.patched import unchanged
from tests.preloaded import PreloadedServer
from tests.tiers import long
from tests.weight_sync.test_changes_real_server import Trainer
from tests.weight_sync.test_push_real_servers import Pushing, model_of, noisy, weights  # noqa: F401
from tools.cpu import environment, gpu_available, vllm_arguments

pytestmark = pytest.mark.usefixtures("one_rank")
PLANTED = "tests.matrix.planted_extension.Planted"
TEXT = [(7 * i * i + 3 * i) % 83 for i in range(64)]
OTHER_CODE = r"worker extension is of megatron-rl-corr 0.0.9-deadbeef, and the trainer's is 0.*install"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def planted(tiny_moe_dir, tmp_path_factory):
    """A vLLM server whose worker extension has faults."""
    yield from planted_server(tiny_moe_dir, tmp_path_factory.mktemp("planted"), "float32")


@pytest.fixture(scope="module")
def planted_half(tiny_moe_dir, tmp_path_factory):
    """The same in bfloat16."""
    yield from planted_server(tiny_moe_dir, tmp_path_factory.mktemp("planted_half"), "bfloat16")


def planted_server(model_dir, folder, dtype):
    if gpu_available():
        pytest.skip("make setup-vllm installs vLLM without a GPU only")
    with PreloadedServer(
        model_dir,
        engine="vllm",
        dtype=dtype,
        log_path=folder / "server.log",
        extra_arguments=[*vllm_arguments(), "--worker-extension-cls", PLANTED],
        environment=environment("vllm"),
    ) as server:
        yield server


def plant_at(url, fault=None, *names):
    async def scenario():
        request = Request(
            "POST", "/collective_rpc", {"method": "rl_test_plant", "kwargs": {"fault": fault, "names": names}}
        )
        async with RolloutClient([url], vocab_size=83, engine="vllm", timeout_s=60) as client:
            await client.ask(url, request)

    asyncio.run(scenario())


@pytest.fixture
def plant(planted):
    """plant(fault, *names): as `Planted.rl_test_plant`; it is gone when the test is over."""
    yield partial(plant_at, planted.url)
    plant_at(planted.url)


@pytest.fixture
def trainer(planted, vllm_server_fp32, tiny_moe_dir, weights):  # noqa: F811
    """A trainer rank that pushes to a right server and to the planted one."""
    with unchanged(vllm_server_fp32, tiny_moe_dir):
        trainer = Pushing([vllm_server_fp32.url, planted.url], "tensor", tiny_moe_dir, None, "vllm")
        trainer.push(weights, "0")
        yield trainer
        trainer.loop.call(trainer.client.continue_generation())
        trainer.close()


def own_logprobs(tensors, tiny_moe_dir, folder):
    """Those of Hugging Face's model in float32, in the place of the trainer's."""
    ids, model = torch.tensor(TEXT), model_of(tiny_moe_dir, tensors, folder)
    logits, _, _ = scored(model, ids)
    return torch.log_softmax(logits[:-1].double(), -1).gather(1, ids[1:, None])[:, 0].numpy()


def differences(trainer, tensors, tiny_moe_dir, folder, version):
    """Server -> D of the text, of what a run asks after a push."""
    client, question = trainer.client, Question((tuple(TEXT),))
    answers = trainer.loop.call(
        ask_servers(
            client.control(client.base_urls), question, version=version, vocab_size=83, cache_key=None
        )
    )
    own = own_logprobs(tensors, tiny_moe_dir, folder)
    return {url: own - answer.scores[0] for url, answer in answers.items()}


FLOAT32 = TextRounding(ROUNDINGS["float32"].least, ROUNDINGS["float32"].least, np.zeros(0, dtype=bool))
BFLOAT16 = TextRounding(2e-3, 6e-3, np.zeros(0, dtype=bool))
"""Of the tiny model, as features/push_probe/simulated_rounding.py has it."""


def test_push_when_two_follow_each_other_and_nothing_is_planted_then_the_probe_is_right(
    trainer,
    plant,
    weights,  # noqa: F811
    tiny_moe_dir,
    tmp_path,
):
    plant(None)
    for version in (1, 2):
        new = noisy(weights, seed=version)
        trainer.push(new, str(version))
        assert trainer.compared == len(trainer.parameters())
        found = differences(trainer, new, tiny_moe_dir, tmp_path / str(version), str(version))
        assert len(found) == 2 and all(np.abs(one).max() < 1e-5 for one in found.values())
        assert not any(is_off(off_by(one, FLOAT32)) for one in found.values())


@drill("a vLLM server that drops tensors and says nothing", promised="named with the parameter")
@pytest.mark.parametrize(
    ("dropped", "told"),
    [
        ("model.norm.weight", "1 of its weights .*: model.norm.weight;"),
        ("lm_head.weight", "1 of its weights .*: lm_head.weight;"),
        (
            "model.layers.1.self_attn.k_proj.weight",
            "1 of its weights .*: model.layers.1.self_attn.qkv_proj.weight;",
        ),
        (EXPERT, "1 of its weights .*: model.layers.2.mlp.experts.w13_weight;"),
        ("", "39 of its weights differ from those of"),
    ],
    ids=["norm", "head", "a part of a fused layer", "one expert", "all"],
)
def test_push_when_one_of_two_servers_drops_tensors_and_says_nothing_then_it_is_named_with_the_parameter(
    trainer,
    plant,
    planted,
    weights,  # noqa: F811
    dropped,
    told,
):
    plant("drops", *filter(None, [dropped]))
    with pytest.raises(RolloutProtocolError, match=told) as error:
        trainer.push(noisy(weights, seed=5), "new")
    assert error.value.url == planted.url
    plant(None)
    trainer.push(weights, "healed")  # nothing of it is left
    assert trainer.compared == len(trainer.parameters())


@drill(
    "a vLLM server that computes with other weights than its checksums tell",
    promised="the probe after the push sees it",
)
def test_push_when_a_server_computes_with_other_weights_than_its_checksums_tell_then_its_text_is_off(
    trainer,
    plant,
    planted,
    weights,  # noqa: F811
    tiny_moe_dir,
    tmp_path,
):
    plant("exchanges experts")
    new = noisy(weights, seed=6)
    trainer.push(new, "2")
    assert trainer.compared == len(trainer.parameters())  # checksums can't tell
    found = differences(trainer, new, tiny_moe_dir, tmp_path / "hf", "2")
    assert {url for url, one in found.items() if is_off(off_by(one, FLOAT32))} == {planted.url}


@drill("a vLLM server that loads new weights and goes back to old ones", promised="its checksums name it")
def test_push_when_a_server_goes_back_to_old_weights_then_the_checksums_of_its_memory_tell(
    trainer,
    plant,
    planted,
    weights,  # noqa: F811
):
    plant("exchanges experts")  # of which checksums tell nothing, as experts are packed
    trainer.push(weights, "1")  # which it goes back to
    assert trainer.compared == len(trainer.parameters())
    plant("keeps old weights")
    with pytest.raises(
        RolloutProtocolError, match="weights differ|not those that were sent|of its weights"
    ) as error:
        trainer.push(noisy(weights, seed=6), "2")
    assert error.value.url == planted.url and "norm.weight" in str(error.value)


@long
@drill("two exchanged experts in a vLLM server in 16 bits", promised="the first push's probe sees it")
def test_push_in_16_bits_when_experts_are_exchanged_then_the_text_is_off(
    planted_half,
    weights,  # noqa: F811
    tiny_moe_dir,
    tmp_path,
):
    trainer = Pushing([planted_half.url], "tensor", tiny_moe_dir, None, "vllm")
    try:
        for fault in (None, "exchanges experts"):
            plant_at(planted_half.url, fault)
            trainer.push(weights, str(fault))
            [found] = differences(trainer, weights, tiny_moe_dir, tmp_path / str(fault), str(fault)).values()
            assert is_off(off_by(found, BFLOAT16)) == (fault is not None)
    finally:
        plant_at(planted_half.url)
        trainer.close()


def test_push_when_a_server_keeps_cached_prefixes_then_the_doctor_names_it_and_keyed_requests_meet_none(
    trainer,
    plant,
    planted,
    weights,  # noqa: F811
    tiny_moe_dir,
    tmp_path,
):
    plant("keeps cached prefixes")
    prompt, short = [(5 * i) % 79 for i in range(300)], SamplingParams(4, ignore_eos=True)
    new, sampled = noisy(weights, seed=7), {}

    async def ask(keyed):
        async with RolloutClient(
            [planted.url], vocab_size=83, engine="vllm", timeout_s=60, keyed_cache=keyed
        ) as client:
            await client.expect_version(trainer.version())
            (sample,) = await client.generate([prompt], short)
            found = await quick_check(client)
            # Its extension is a class that the doctor does not know.
            return sample, {finding.name for finding in found} - {"no_weight_updates"}

    for keyed in (False, True):
        trainer.push(weights, f"old {keyed}")
        asyncio.run(ask(keyed))
        trainer.push(new, f"new {keyed}")
        sampled[keyed] = asyncio.run(ask(keyed))
    model = model_of(tiny_moe_dir, new, tmp_path / "hf")
    (stale, found), (right, nothing) = sampled[False], sampled[True]
    assert stale.cached_tokens >= 128 and right.cached_tokens == 0
    assert "stale_prefix_cache" in found and nothing == set()
    assert_is_truth(right, model, atol=1e-5)
    with pytest.raises(AssertionError):
        assert_is_truth(stale, model, atol=1e-2)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("other code", "tensor", OTHER_CODE),
        ("other code", "disk", OTHER_CODE),
        # `disk`: rl_corr_load_folder of old took no code either
        (
            "older code",
            "tensor",
            "its worker extension is older: install the trainer's megatron-rl-corr there",
        ),
    ],
)
def test_push_when_the_servers_extension_has_another_version_then_refused_at_once(
    trainer,
    plant,
    planted,
    tiny_moe_dir,
    weights,  # noqa: F811
    tmp_path,
    fault,
    words,
    kind,
):
    before = trainer.version()
    alone = Pushing([planted.url], kind, tiny_moe_dir, tmp_path / "weights", "vllm")
    try:
        checksums = alone.checksums()
        plant(fault)
        with pytest.raises(RolloutServerError, match=words):
            alone.push(noisy(weights, seed=8), "new")
        assert alone.checksums() == checksums
        if kind == "tensor":  # a folder is read after the name has changed
            assert alone.version() == before
    finally:
        alone.close()


def test_push_when_tensors_come_in_another_order_then_every_parameter_is_the_same(
    trainer,
    plant,
    weights,  # noqa: F811
    tiny_moe_dir,
    tmp_path,
):
    plant(None)
    new = noisy(weights, seed=9)
    names = sorted(new)
    random.Random(0).shuffle(names)  # v before q, up before gate, one layer's parts in several buckets
    trainer.push({name: new[name] for name in names}, "shuffled")
    assert trainer.compared == len(trainer.parameters())
    found = differences(trainer, new, tiny_moe_dir, tmp_path / "hf", "shuffled")
    assert all(np.abs(one).max() < 1e-5 for one in found.values())


def test_push_when_parts_of_a_fused_layer_are_exchanged_on_their_way_then_its_parameter_is_named(
    trainer,
    plant,
    weights,  # noqa: F811
    monkeypatch,
):
    plant(None)
    send, layer = trainer.transport.send, "model.layers.0.self_attn.{}_proj.weight"
    other = {layer.format("k"): layer.format("v"), layer.format("v"): layer.format("k")}
    monkeypatch.setattr(
        trainer.transport, "send", lambda bucket: send([(other.get(name, name), one) for name, one in bucket])
    )
    with pytest.raises(
        RolloutProtocolError, match="not those that were sent: model.layers.0.self_attn.qkv_proj"
    ):
        trainer.push(noisy(weights, seed=10), "new")


@long
def test_pushes_when_embeddings_are_tied_then_samples_are_of_the_new_weights(tmp_path, tiny_moe_dir):
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=83,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=82,
    )
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
        models[seed].save_pretrained(tmp_path / str(seed))
        for file in tiny_moe_dir.glob("*token*"):
            shutil.copy(file, tmp_path / str(seed))
    with PreloadedServer(
        tmp_path / "0",
        engine="vllm",
        dtype="float32",
        log_path=tmp_path / "server.log",
        extra_arguments=vllm_arguments(),
        environment=environment("vllm"),
    ) as server:
        trainer = Trainer(server, tmp_path / "1")
        assert "lm_head.weight" not in trainer.weights
        samples = []
        try:
            for version in ("everything", "proof", "changes"):
                trainer.push_changes(version)
                assert trainer.compared == len(trainer.parameters())
                samples.append((trainer.sample(), {n: one.clone() for n, one in trainer.weights.items()}))
                trainer.train(seed=4)
            assert trainer.deltas.share < 0.1
        finally:
            trainer.close()
    for sample, held in samples:
        models[1].load_state_dict(held, strict=False)
        assert_near(sample, models[1])


def assert_near(sample, model):
    ids = torch.cat([sample.prompt_ids, sample.output_ids])
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1]
    truth = torch.log_softmax(logits, -1).gather(1, sample.output_ids[:, None])[:, 0]
    torch.testing.assert_close(sample.rollout_logprobs, truth, atol=1e-5, rtol=0)
