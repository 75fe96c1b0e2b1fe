"""Pickled buckets: what they name, that a changed torch changes nothing, which servers are on this host."""

import base64
import pickle
import pickletools

import pytest
import torch

from megatron_rl_corr.engines.sglang.tensors import serialized
from megatron_rl_corr.weight_sync.transports.ipc import check_same_host, is_this_host


def globals_of(text):
    """Every "module name" that unpickling looks up."""
    return {arg for op, arg, _ in pickletools.genops(base64.b64decode(text)) if op.name == "GLOBAL"} | {
        op.name
        for op, _, _ in pickletools.genops(base64.b64decode(text))
        if op.name in ("INST", "OBJ", "NEWOBJ")
    }


def test_serialized_then_only_functions_that_sglang_lets_through():
    text = serialized([("x", torch.ones(2))])
    assert globals_of(text) == {"torch.storage _load_from_bytes"}
    named = [
        arg for op, arg, _ in pickletools.genops(base64.b64decode(text)) if op.name == "SHORT_BINUNICODE"
    ]
    assert {"torch._utils", "_rebuild_tensor_v2", "collections", "OrderedDict", "x"} == set(named)


def test_serialized_when_another_library_has_replaced_how_torch_loads_a_storage_then_nothing_changes(
    monkeypatch,
):
    # Megatron-core does so.
    monkeypatch.setattr(torch.storage, "_load_from_bytes", lambda data: None)
    assert globals_of(serialized([("x", torch.ones(2))])) == {"torch.storage _load_from_bytes"}


def test_serialized_when_a_tensor_is_a_view_then_only_what_it_shows():
    whole = torch.zeros(100_000)
    assert len(serialized([("x", whole[:10])])) < 2000


def test_serialized_when_in_fp8_then_its_codes_arrive_by_functions_that_sglang_lets_through():
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    text = serialized([("x", codes.view(torch.float8_e4m3fn)[4:]), ("y", torch.ones(2))])
    named = {
        arg for op, arg, _ in pickletools.genops(base64.b64decode(text)) if op.name == "SHORT_BINUNICODE"
    }
    functions = {"_rebuild_tensor_v3", "_rebuild_tensor_v2", "OrderedDict", "float8_e4m3fn"}
    assert named == functions | {"torch._utils", "torch", "collections", "x", "y"}
    (_, fp8), (_, ones) = pickle.loads(base64.b64decode(text))
    assert fp8.dtype == torch.float8_e4m3fn and torch.equal(fp8.view(torch.uint8), codes[4:])
    assert ones.tolist() == [1, 1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_same_host_when_it_is_then_accepted(host):
    check_same_host([f"http://{host}:30000"])


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_same_host_when_it_is_not_then_the_address_and_the_other_transports_are_named(host):
    with pytest.raises(ValueError, match=f"http://{host}:30000 is not on .* use distributed, or disk"):
        check_same_host(["http://127.0.0.1:1", f"http://{host}:30000"])
    assert is_this_host(host) is False
