"""The stand-in for Transformer Engine against the Python of the real package, which runs over a
fake C++ extension.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.matrix.releases import OVERLAID, chosen, wheel_folder
from tools.cpu import environment

HERE = Path(__file__).resolve().parent
REAL = "transformer-engine==2.20.2"
TOLERANCE = 1e-5  # of float32, relative; measured 1.8e-6
CASES = {"dense": 3, "layernorm and biases": 3, "experts": 3, "latent": 3, "packed": 1}
"""Models of transformer_engine_worker.py; ranks in all of one and two processes."""

TAKEN = {
    **{
        f"transformer_engine.pytorch.{layer}.{method}": set()
        for layer in ("Linear", "LayerNormLinear", "GroupedLinear", "DotProductAttention")
        for method in ("__init__", "forward")
    },
    # Both take these two as one of **kwargs.
    "transformer_engine.pytorch.RMSNorm.__init__": {"device", "dtype"},
    "transformer_engine.pytorch.LayerNorm.__init__": {"device", "dtype"},
    "transformer_engine.pytorch.DotProductAttention.set_context_parallel_group": set(),
    "transformer_engine.pytorch.CudaRNGStatesTracker.add": set(),
    "transformer_engine.pytorch.CudaRNGStatesTracker.fork": set(),
    "transformer_engine.pytorch.CudaRNGStatesTracker.get_states": set(),
    "transformer_engine.pytorch.CudaRNGStatesTracker.set_states": set(),
    "transformer_engine.pytorch.CudaRNGStatesTracker.reset": set(),
    "transformer_engine.pytorch.distributed.activation_recompute_forward.__init__": set(),
    "transformer_engine.pytorch.fp8.fp8_autocast": set(),
    "transformer_engine.pytorch.fp8.fp8_model_init": set(),
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.is_fp8_enabled": set(),
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.reset": set(),
    "transformer_engine.pytorch.module.base.get_dummy_wgrad": set(),
    "transformer_engine.pytorch.optimizers.FusedAdam.__init__": set(),
    "transformer_engine.pytorch.optimizers.FusedAdam.step": set(),
    "transformer_engine.pytorch.attention.rope.apply_rotary_pos_emb": set(),
    "transformer_engine.pytorch.permutation.moe_permute": set(),
    "transformer_engine.pytorch.permutation.moe_permute_with_probs": set(),
    "transformer_engine.pytorch.permutation.moe_unpermute": set(),
    "transformer_engine.pytorch.permutation.moe_sort_chunks_by_index": set(),
    "transformer_engine.pytorch.permutation.moe_sort_chunks_by_index_with_probs": set(),
}
"""What Megatron constructs, calls and derives from -> arguments that the stand-in names and the
real one does not.
"""
LACKING = {
    "transformer_engine.pytorch.DotProductAttention.forward": {
        "score_mod",
        "score_mod_bprop",
        "score_mod_tensors",
        "score_mod_bprop_tensors",
        "qkv_layer",
        "kv_layer",
        "qkv_interleave_dim",
        "thd_attention_policies",
        "thd_attention_policy_dispatch",
    },
    "transformer_engine.pytorch.DotProductAttention.set_context_parallel_group": {"load_balancing_strategy"},
}
"""Arguments of the real one that Megatron never gives; the stand-in refuses them."""

pytestmark = pytest.mark.skipif(chosen() != OVERLAID, reason="fetches a wheel; make test-matrix runs it")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What transformer_engine_worker.py found in the stand-in, and in the real package."""
    out = tmp_path_factory.mktemp("transformer_engine")
    return measured(out / "stand-in"), measured(out / "real", str(wheel_folder(REAL)))


def measured(out, *folder):
    variables = environment("megatron", {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *folder])})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "transformer_engine_worker.py", out, *folder],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=False)


def test_stand_in_when_compared_with_the_real_package_then_arguments_and_defaults_are_the_same(found):
    ours, real = (one["signatures"] for one in found)
    assert {name for name in TAKEN if name not in ours or name not in real} == set()
    for name, own in TAKEN.items():
        taken = arguments(ours[name], own)
        assert taken == arguments(real[name], LACKING.get(name, set())), name


def arguments(signature, without):
    """Positional ones in order, then those by keyword, whose order says nothing."""
    named = [one for one in signature if not one[1].startswith("VAR_") and one[0] not in without]
    assert without <= {name for name, *_ in signature}
    return sorted(named, key=lambda one: one if one[1] == "KEYWORD_ONLY" else ())


@pytest.mark.parametrize("case", CASES)
def test_models_of_the_stand_in_and_of_the_real_package_then_the_same_to_the_gradients(case, found):
    ours, real = found
    places = [place for place in ours if place[0] == case]
    assert len(places) == CASES[case] and places == [place for place in real if place[0] == case]
    for place in places:
        mine, theirs = ours[place], real[place]
        for part in ("parameters", "plain", "sharded"):
            assert list(mine[part]) == list(theirs[part]) and mine[part] == theirs[part], (place, part)
        near(mine["logits"], theirs["logits"], place)
        assert mine["gradients"].keys() == theirs["gradients"].keys() == theirs["parameters"].keys()
        for name, gradient in theirs["gradients"].items():
            assert gradient.abs().max() > 0, (place, name)
            near(mine["gradients"][name], gradient, (place, name))


def near(ours, real, what):
    assert (ours - real).abs().max() <= TOLERANCE * real.abs().max(), what
