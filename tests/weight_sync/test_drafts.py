"""Layers that predict further tokens are sent to servers that draft with them, and to no others."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.models.quantization import BlockFP8
from megatron_rl_corr.weight_sync.drafts import DraftLayers, find_drafting

NORM, DRAFT, OTHER = (
    (name, torch.ones(2)) for name in ("model.norm.weight", "model.layers.61.enorm.weight", "lm_head.weight")
)
NEXTN = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/v3", "model_path": "/v3"}
OWN_DRAFT = NEXTN | {"speculative_draft_model_path": "/eagle"}
PLAIN = {"speculative_algorithm": None, "model_path": "/v3"}


def is_draft(name):
    return "layers.61." in name


def control(*infos, engine="sglang"):
    urls = tuple(f"http://{number}" for number in range(len(infos)))
    engines = load_engine(engine)

    async def server_info():
        return list(infos)

    return SimpleNamespace(base_urls=urls, engine_of=lambda url: engines, server_info=server_info)


def find(*infos, quantization=None, **options):
    return asyncio.run(find_drafting(control(*infos, **options), quantization))


def test_servers_when_they_draft_with_the_checkpoints_own_layers_then_found_and_no_other_draft_model():
    assert find(NEXTN, NEXTN) and find({"speculative_algorithm": "NEXTN", "model_path": "/v3"})
    assert (
        not find(PLAIN, PLAIN) and not find(OWN_DRAFT) and not find(PLAIN, quantization=BlockFP8("float32"))
    )
    assert not find({"vllm_config": {}}, engine="vllm")


def test_servers_when_some_draft_and_others_do_not_then_refused_with_both_addresses():
    with pytest.raises(RolloutProtocolError, match="http://1.* and http://0 does not; all are sent the same"):
        find(PLAIN, NEXTN)


def test_servers_when_the_draft_model_is_in_fp8_then_refused_with_the_remedy():
    with pytest.raises(
        RolloutProtocolError, match="in FP8, .* start it without speculative decoding, or from"
    ):
        find(NEXTN, quantization=BlockFP8("float32"))


def test_units_when_no_server_drafts_then_the_layers_are_left_out_and_planned_nowhere():
    units = [[NORM], [DRAFT], [OTHER, DRAFT]]
    kept = DraftLayers(is_draft, sent=False)
    assert list(kept.without_unsent(units)) == [[NORM], [OTHER]]
    assert list(DraftLayers(is_draft, sent=True).without_unsent(units)) == units
    assert list(DraftLayers().without_unsent(units)) == units
    shapes = {name: [2] for name, _ in (NORM, DRAFT)}
    assert kept.planned(shapes) == {"model.norm.weight": [2]}
    assert DraftLayers(is_draft, sent=True).planned(shapes) == shapes


def test_bucket_when_the_layers_are_sent_then_their_checksums_are_not_compared():
    assert DraftLayers(is_draft, sent=True).verified([NORM, DRAFT]) == [NORM]
    assert DraftLayers().verified([NORM, DRAFT]) == [NORM, DRAFT]
