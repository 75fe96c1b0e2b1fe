"""The trainer's number type, by Megatron's arguments."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.features.push_probe.evidence import ROUNDINGS
from megatron_rl_corr.mcore.checks import server_check
from megatron_rl_corr.mcore.number_types import trained_type

FP8, FP4 = {"fp8": "hybrid"}, {"fp4": "e2m1"}


@pytest.mark.parametrize(
    ("dtype", "flags", "name", "bound"),
    [
        (torch.float32, {}, "tf32" if torch.cuda.is_available() else "float32", 1e-2),
        (torch.bfloat16, {}, "bfloat16", 1e-2),
        (torch.float16, {"fp8": None, "fp4": None}, "float16", 1e-2),
        (torch.bfloat16, FP8, "fp8", 1e-1),
        (torch.bfloat16, FP4, "int4", 1e-1),
        (torch.float32, FP8, "fp8", 1e-1),
    ],
)
def test_trainer_when_it_multiplies_in_fewer_bits_than_its_parameters_have_then_their_rounding_counts(
    monkeypatch, dtype, flags, name, bound
):
    args = Namespace(params_dtype=dtype, iteration=0, **flags)
    assert trained_type(args) == name and name in ROUNDINGS

    control = SimpleNamespace(server_info=lambda: [{"dtype": "bfloat16"}], base_urls=["a"])
    client = SimpleNamespace(control=lambda: control, engine_of=lambda url: load_engine("sglang"))
    monkeypatch.setattr(server_check, "broadcast_made", lambda made: made())
    found = server_check.bound_first_step(None, args, client, SimpleNamespace(call=lambda infos: infos))
    assert found.max_kl == bound
