"""Checksums of parameters in a server's memory, and of those that its kernels pack."""

import pytest
import torch
from torch import nn

from megatron_rl_corr.engines.checksums import checksum
from megatron_rl_corr.engines.vllm.memory_checksums import UNKNOWN, checksums_of

CPU = torch.device("cpu")


@pytest.fixture
def model():
    """A plain layer, a layer whose kernel packs by exchanging rows, and a norm of ones."""
    model = nn.ModuleDict({"plain": nn.Linear(2, 3, bias=False), "packed": nn.Linear(2, 3, bias=False)})
    model["norm"] = nn.LayerNorm(4, bias=False)
    return model


def load(model, seed):
    """New weights; their checksums before `packed` is packed, in the same shape and type."""
    generator = torch.Generator().manual_seed(seed)
    for name in ("plain", "packed"):
        model[name].weight.data = torch.randn(3, 2, generator=generator)
    loaded = sums(model)
    model["packed"].weight.data = model["packed"].weight.data.flip(0)
    return loaded


def sums(model):
    return {name: checksum(one.data, "cpu") for name, one in model.named_parameters()}


def test_checksums_before_any_update_then_of_the_memory(model):
    unpacked = set()
    assert checksums_of(model, CPU, {}, unpacked) == sums(model) and not unpacked


def test_checksums_when_a_layer_is_packed_then_as_it_was_loaded_and_of_the_others_memory(model):
    unpacked = set()
    for seed in range(2):
        loaded = load(model, seed)
        assert checksums_of(model, CPU, loaded, unpacked) == loaded
        assert loaded["packed.weight"] != sums(model)["packed.weight"]  # packing shows
        assert unpacked == {"plain.weight"}  # a norm of ones would look the same in every order


def test_checksums_when_packing_leaves_a_layer_of_few_numbers_as_it_is_then_not_taken_for_unpacked(model):
    unpacked = set()
    for name in ("plain", "packed"):
        model[name].weight.data = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    checksums_of(model, CPU, sums(model), unpacked)
    assert unpacked == set()
    loaded = load(model, 0)
    assert checksums_of(model, CPU, loaded, unpacked) == loaded and unpacked == {"plain.weight"}


def test_checksums_when_the_memory_is_not_what_was_loaded_then_it_shows_after_one_that_fitted(model):
    unpacked, loaded = set(), load(model, 0)
    checksums_of(model, CPU, loaded, unpacked)
    model["plain"].weight.data[0, 0] += 1  # overwritten afterwards
    found = checksums_of(model, CPU, loaded, unpacked)
    assert found == loaded | {"plain.weight": sums(model)["plain.weight"]} != loaded
    loaded = load(model, 1)
    model["plain"].weight.data = model["plain"].weight.data.flip(0)  # loaded, and put in another order
    assert checksums_of(model, CPU, loaded, unpacked)["plain.weight"] != loaded["plain.weight"]


def test_checksums_after_an_update_that_was_broken_off_then_unknown(model):
    unpacked, loaded = set(), load(model, 0)
    checksums_of(model, CPU, loaded, unpacked)
    assert checksums_of(model, CPU, dict.fromkeys(loaded, UNKNOWN), unpacked) == dict.fromkeys(
        loaded, UNKNOWN
    )
