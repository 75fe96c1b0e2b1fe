"""`megatron-rl-corr accept` of a tiny random model of every family, on real ranks and a real server."""

import importlib.util

import pytest

from tests.matrix.accepted import ACCEPTED, NOT_SERVED, accept, made_model, server_of
from tests.mcore.tiny_models import MODELS
from tests.tiers import long
from tools.cpu import gpu_available

pytestmark = [
    long,
    pytest.mark.skipif(gpu_available(), reason="without a GPU only"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]


@pytest.mark.parametrize("name", ACCEPTED)
def test_family_when_nothing_is_wrong_then_accepted(name, tiny_moe_dir, tmp_path, monkeypatch):
    model = made_model(name, tiny_moe_dir, tmp_path)
    with server_of(name, model, tmp_path) as server:
        status, numbers, page = accept(name, model, server.url, tmp_path, monkeypatch)
    print(page)
    assert status == 0, numbers["notes"]


def test_families_then_each_is_accepted_or_its_reason_is_told():
    assert {*ACCEPTED} | {*NOT_SERVED} == {*MODELS} and all(NOT_SERVED.values())
