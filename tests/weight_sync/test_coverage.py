"""Which tensors of a checkpoint were sent, which stay, and what a server's parameters say of
it; on one rank.
"""

import datetime
import json
import logging

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import IncompletePush
from megatron_rl_corr.engines.types import ServerChecksums
from megatron_rl_corr.models.architectures import FAMILIES
from megatron_rl_corr.models.names import NameTable
from megatron_rl_corr.models.quantization import BlockFP8
from megatron_rl_corr.rollout import RolloutProtocolError
from megatron_rl_corr.weight_sync.coverage import Coverage, make_coverage

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 4,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 4,
    "kv_lora_rank": 3,
    "qk_rope_head_dim": 1,
    "num_attention_heads": 2,
    "hidden_size": 4,
}
NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
X = torch.ones(1)
ENGINE = load_engine("sglang")


@pytest.fixture(autouse=True)
def one_rank():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=10))
    yield
    dist.destroy_process_group()


def coverage(*names, **config):
    return Coverage(names, NameTable(CONFIG | config, padded_vocab_size=4).why_kept)


def sent(counted, *names):
    counted.clear()
    counted.count([(name, X) for name in names])
    counted.check_all_sent()
    return counted


def server(*names, pp_size=1, **options):
    layout = (1, pp_size, 1, "float32", "cpu", None)
    options = {"quantization": None, "shows_all": pp_size == 1} | options
    return ServerChecksums("http://a", "cpu", 1, layout, ranks=((0, dict.fromkeys(names, "1")),), **options)


def test_push_when_a_tensor_was_not_sent_then_it_is_named_and_a_whole_one_before_does_not_count():
    counted = sent(coverage(NORM, EMBEDDING), NORM, EMBEDDING)
    with pytest.raises(
        IncompletePush, match=f"nothing was sent for 1 of the checkpoint's 2 tensors: {EMBEDDING};"
    ):
        sent(counted, NORM)


def test_push_when_it_brings_what_the_checkpoint_lacks_or_a_tensor_twice_then_refused():
    with pytest.raises(IncompletePush, match=f"the checkpoint has none of {HEAD}, which would be sent"):
        sent(coverage(NORM), NORM, HEAD)
    with pytest.raises(
        IncompletePush, match=f"sent more than once, so that only the last one counts: {NORM}"
    ):
        sent(coverage(NORM), NORM, NORM)


def test_push_when_tensors_stay_by_the_familys_table_then_each_reason_is_told_once(caplog):
    kept = [
        "model.layers.61.enorm.weight",
        "model.layers.61.mlp.experts.0.up_proj.weight",
        "model.layers.3.self_attn.k_scale",
        "model.layers.3.self_attn.rotary_emb.inv_freq",
    ]
    counted = coverage(NORM, *kept)
    with caplog.at_level(logging.WARNING):
        sent(sent(counted, NORM), NORM)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3 and all(line.startswith("stays as loaded, ") for line in told)
    assert (
        told[0]
        == "stays as loaded, 1 of the checkpoint: model.layers.3.self_attn.k_scale (scale of a quantised "
        "KV cache: calibrated, not trained)"
    )
    assert (
        "2 of the checkpoint: model.layers.61.enorm.weight, model.layers.61.mlp.experts.0.up_proj" in told[2]
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.60.enorm.weight",
        "model.layers.62.enorm.weight",
        HEAD,
        "model.layers.3.mlp.gate_proj.weight_scale_inv",
    ],
)
def test_table_when_a_name_only_looks_like_one_that_stays_then_it_must_be_sent(name):
    with pytest.raises(IncompletePush, match=name):
        sent(coverage(name))


@pytest.mark.parametrize("family", FAMILIES)
def test_table_when_embeddings_are_tied_then_a_checkpoints_output_layer_stays(family):
    sent(coverage(EMBEDDING, HEAD, model_type=family, tie_word_embeddings=True), EMBEDDING)
    with pytest.raises(IncompletePush, match=HEAD):
        sent(coverage(EMBEDDING, HEAD, model_type=family, tie_word_embeddings=False), EMBEDDING)


def test_server_when_it_has_what_was_sent_then_fused_parameters_count_once_for_all_their_parts():
    layer = "model.layers.3."
    names = [layer + f"self_attn.{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    names += [
        layer + f"mlp.experts.{e}.{part}_proj.weight" for e in (0, 1) for part in ("gate", "up", "down")
    ]
    names += [layer + f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")]
    counted = sent(coverage(*names), *names)
    held = [layer + "self_attn.fused_qkv_a_proj_with_mqa.weight"]
    held += [layer + "mlp.experts.w13_weight", layer + "mlp.experts.w2_weight"]
    own = [layer + "mlp.shared_experts.gate_up_proj.weight", layer + "mlp.shared_experts.down_proj.weight"]
    counted.check_servers([server(*held, *own), server(*held)], ENGINE)  # the second has it among its experts
    with pytest.raises(
        RolloutProtocolError, match="1 of 5 weights were sent that it does not have: .*fused_qkv_a"
    ):
        counted.check_servers([server(*held, *own), server(*held[1:], *own)], ENGINE)


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.down_proj.weight_scale", HEAD, "model.layers.3.mlp.gate.weight"]
)
def test_server_when_it_has_a_parameter_that_nothing_was_sent_for_then_it_is_named(name):
    counted = sent(coverage(EMBEDDING, tie_word_embeddings=True), EMBEDDING)
    with pytest.raises(
        RolloutProtocolError, match=f"nothing was sent for 1 of its 2 weights, .*: {name}\\. Start it"
    ):
        counted.check_servers([server(EMBEDDING, name)], ENGINE)


def test_server_when_it_is_quantised_then_refused_unless_it_makes_its_scales_of_what_it_is_sent():
    scale = "model.layers.3.mlp.down_proj.weight_scale"
    counted = sent(coverage(EMBEDDING), EMBEDDING)
    counted.check_servers([server(EMBEDDING, scale, quantization="fp8", quantises_updates=True)], ENGINE)
    # SGLang 0.5.23 hides the scales of blocks: the refusal does not need them.
    with pytest.raises(
        RolloutProtocolError, match=r"its weights are quantised \(fp8\), and their scales would stay"
    ):
        counted.check_servers([server(EMBEDDING, quantization="fp8")], ENGINE)


def test_server_in_fp8_when_it_shows_scales_or_hides_them_in_its_weights_checksums_then_none_may_lack():
    down, scale = "model.layers.3.mlp.down_proj.weight", "model.layers.3.mlp.down_proj.weight_scale_inv"
    counted = sent(coverage(EMBEDDING, down, scale), EMBEDDING, down, scale)
    hiding, showing = (
        server(EMBEDDING, down, quantization="fp8"),
        server(EMBEDDING, down, scale, quantization="fp8"),
    )
    counted.check_servers([hiding, showing, hiding], ENGINE)
    other = server(EMBEDDING, down, scale.replace("down", "up"), quantization="fp8")
    with pytest.raises(RolloutProtocolError, match="sent for 1 of its 3 weights, .*up_proj.weight_scale_inv"):
        counted.check_servers([other], ENGINE)
    with pytest.raises(
        IncompletePush, match=f"nothing was sent for 1 of the checkpoint's 3 tensors: {scale};"
    ):
        sent(counted, EMBEDDING, down)


def test_push_in_fp8_then_every_weight_that_is_quantised_must_come_with_its_scales(tmp_path):
    # 61: multi-token prediction
    down, spared, kept = (f"model.layers.{n}.mlp.down_proj.weight" for n in (3, 4, 61))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: X.clone() for name in (NORM, down, spared, kept)}, tmp_path / "model.safetensors")
    counted = make_coverage(tmp_path, BlockFP8("float32", frozenset({"layers.4"})))
    sent(counted, NORM, down, spared, down + "_scale_inv")
    with pytest.raises(
        IncompletePush, match=f"nothing was sent for 1 of the checkpoint's 5 tensors: {down}_scale_inv"
    ):
        sent(counted, NORM, down, spared)


def test_answer_when_only_the_checkpoint_says_that_it_is_quantised_then_its_folder_is_read(tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    info, answer = INFO | {"model_path": str(tmp_path)}, {"ranks": []}
    assert ENGINE.checksums("http://a", info, answer).quantization == "fp8"
    assert ENGINE.checksums("http://a", info | {"model_path": "org/name"}, answer).quantization is None
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    assert ENGINE.checksums("http://a", info, answer).quantization is None


def test_server_when_it_shows_only_its_first_pipeline_stage_then_the_others_weights_are_not_missed():
    counted = sent(coverage(EMBEDDING, NORM), EMBEDDING, NORM)
    counted.check_servers([server(EMBEDDING, pp_size=2)], ENGINE)
    with pytest.raises(RolloutProtocolError, match=f"were sent that it does not have: {NORM}"):
        counted.check_servers([server(EMBEDDING)], ENGINE)


def test_server_when_it_has_a_scale_of_its_kv_cache_then_it_stays(caplog):
    counted = sent(coverage(NORM), NORM)
    counted.check_servers([server(NORM, "model.layers.0.self_attn.attn.k_scale")] * 2, ENGINE)
    [told] = caplog.records
    assert "stays as loaded, 1 at http://a: model.layers.0.self_attn.attn.k_scale" in told.getMessage()


INFO = {"tp_size": 1, "pp_size": 1, "ep_size": 1, "dtype": "auto", "device": "cuda", "quantization": None}


@pytest.mark.parametrize(
    "infos",
    [
        [
            {"tp_rank": 0, "role": "target"},
            {"tp_rank": 0, "role": "draft"},
            {"tp_rank": 0, "role": "draft_step_1"},
        ],
        {"tp_rank": 0},  # SGLang 0.5.19 and 0.5.20
    ],
)
def test_answer_when_there_is_a_draft_model_or_the_server_is_older_then_the_served_models_checksums(infos):
    sums = {NORM: "1"} | (
        {} if isinstance(infos, dict) else {f"draft.{NORM}": "2", f"draft_step_1.{NORM}": "3"}
    )
    shown = ENGINE.checksums("http://a", INFO, {"ranks": [{"parallelism_info": infos, "checksums": sums}]})
    assert shown.ranks == ((0, {NORM: "1"}),)


def test_server_when_it_was_sent_a_draft_models_layers_then_it_need_not_show_them():
    draft = "model.layers.61.enorm.weight"
    counted = sent(coverage(NORM, draft), NORM, draft)
    counted.check_servers([server(NORM)], ENGINE)
