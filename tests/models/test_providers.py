"""Which of the two gives the names of a model's weights, without Megatron-Bridge."""

import pytest

from megatron_rl_corr.models import bridge, providers
from megatron_rl_corr.models.architectures import FAMILIES
from megatron_rl_corr.models.bridge_settings import not_proven
from megatron_rl_corr.models.hf_checkpoint import transformers_config
from megatron_rl_corr.models.names import CheckpointNames
from megatron_rl_corr.models.providers import takes_bridge

SIZES = {"vocab_size": 8, "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", **SIZES}
MISTRAL = {"model_type": "mistral", **SIZES}


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(bridge, "installed_version", lambda: "0.6.2")
    monkeypatch.setattr(providers, "installed_version", lambda: "0.6.2")


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(bridge, "installed_version", lambda: None)
    monkeypatch.setattr(providers, "installed_version", lambda: None)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("choice", ["auto", "table"])
def test_family_of_the_table_when_bridge_is_installed_then_the_table(kind, choice, installed):
    assert not takes_bridge({"model_type": kind}, choice)


def test_family_of_the_table_when_bridge_is_chosen_then_bridge(installed):
    assert takes_bridge(LLAMA, "bridge")


def test_other_family_when_auto_and_installed_then_bridge(installed):
    assert takes_bridge(MISTRAL, "auto")


def test_other_family_when_the_table_is_chosen_then_it_is_refused(installed):
    with pytest.raises(ValueError, match="mistral.*--rollout-model-provider bridge"):
        takes_bridge(MISTRAL, "table")


def test_other_family_when_auto_and_not_installed_then_the_refusal_names_bridge(not_installed):
    with pytest.raises(ValueError, match="mistral.*--rollout-model-provider bridge"):
        takes_bridge(MISTRAL, "auto")


def test_bridge_when_chosen_and_not_installed_then_the_remedy_is_to_install_it(not_installed):
    with pytest.raises(ValueError, match="bridge: Megatron-Bridge is not installed.*make setup-bridge"):
        takes_bridge(LLAMA, "bridge")


@pytest.mark.parametrize("kind", bridge.OTHER_MODEL)
def test_family_that_bridge_makes_otherwise_then_it_is_refused_with_the_reason(kind, installed):
    with pytest.raises(ValueError) as caught:
        takes_bridge({"model_type": kind}, "bridge" if kind in FAMILIES else "auto")
    assert bridge.OTHER_MODEL[kind] in str(caught.value)


def test_checkpoint_names_when_no_table_has_the_family_then_what_any_checkpoint_keeps():
    names = CheckpointNames(MISTRAL | {"tie_word_embeddings": True})
    assert names.tied and names.why_kept("lm_head.weight") is not None
    assert names.why_kept("model.layers.0.self_attn.rotary_emb.inv_freq") is not None
    assert names.why_kept("model.layers.0.mlp.up_proj.weight") is None
    assert not names.is_of_mtp("model.layers.2.mlp.up_proj.weight") and names.shared_by_mtp == {}


def test_config_when_no_table_has_the_family_then_with_transformers_defaults():
    filled = transformers_config({"model_type": "gemma2", "vocab_size": 8})
    assert filled["tie_word_embeddings"] is True and filled["vocab_size"] == 8  # in no published file
    unknown = {"model_type": "unheard_of", "vocab_size": 8}
    assert transformers_config(unknown) == unknown


def saved(kind, **settings):
    """As transformers saves it."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **settings).to_dict()


@pytest.mark.parametrize("kind", bridge.PROVEN)
def test_settings_when_transformers_own_and_other_sizes_then_proven(kind):
    window = {"sliding_window": None} if kind == "mistral" else {}
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100, "rope_theta": 5e5}
    assert not_proven(saved(kind, **sizes, **window)) == []


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        ("mistral", {"sliding_window": 512}, "sliding_window"),
        ("mistral", {"sliding_window": None, "hidden_act": "gelu"}, "hidden_act"),
        ("mistral", {"sliding_window": None, "logit_scale": 2.0}, "logit_scale"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method"),
        ("deepseek_v2", {"routed_scaling_factor": 16.0}, "routed_scaling_factor"),
        ("gemma2", {"layer_types": ["full_attention"] * 26}, "layer_types"),
        ("nemotron", {"partial_rotary_factor": 1.0}, "partial_rotary_factor"),
        (
            "gemma",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters",
        ),
    ],
)
def test_setting_when_it_was_not_compared_then_its_name(kind, settings, key):
    lines = not_proven(saved(kind, **({"sliding_window": None} if kind == "mistral" else {})) | settings)
    assert len(lines) == 1 and f" {key} " in lines[0]


def test_family_when_it_was_not_compared_then_its_name():
    [line] = not_proven({"model_type": "exaone4"})
    assert "exaone4" in line
