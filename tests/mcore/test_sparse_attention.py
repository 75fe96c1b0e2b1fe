"""Attention over the keys that an indexer chooses (DSA): what decides which, and what learns of it.

tests/mcore/test_hf_models.py has its logits, gradients and exports against transformers.
"""

import json
from pathlib import Path

import pytest

from tests.mcore.tiny_models import make_model
from tests.megatron_forks import run_megatron
from tools.cpu import gpu_available

pytestmark = pytest.mark.skipif(gpu_available(), reason="without a GPU only")

WORKER = Path(__file__).with_name("sparse_attention_worker.py")
MOVED, SAME = 1e-2, 5e-5
"""Differences of logits up to 7: what no rounding makes, and what is rounding of float32."""
INDEXER = ".self_attn.indexer."


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse")
    make_model("deepseek_v32", folder)
    answer = run_megatron(WORKER, folder)
    assert answer.returncode == 0, answer.stderr[-3000:]
    [line] = [line for line in answer.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_flags_of_the_indexer_when_one_is_flipped_then_logits_move_and_the_check_names_it(said):
    number_type = said["flips"].pop("--dsa-indexer-k-norm-fp32")
    assert number_type["moved"] < SAME and number_type["named"] == []
    wrong = {
        flag: flip
        for flag, flip in said["flips"].items()
        if not flip["moved"] > MOVED or flag not in flip["named"]
    }
    assert wrong == {}


def test_gradient_of_the_policy_then_none_reaches_the_indexer_and_all_else_has_one(said):
    found = said["gradients"]
    none = {name for name, norm in found.items() if norm == 0}
    assert none == {name for name in found if INDEXER in name} and len(none) == 4 * 5


def test_loss_of_the_indexers_own_then_it_alone_learns_from_it(said):
    assert set(said["same"]) == {name for name in said["gradients"] if INDEXER not in name}
    assert all(norm > 0 for name, norm in said["of its own loss"].items() if INDEXER in name)


def test_weight_decay_of_the_indexer_then_the_same_keys_are_chosen(said):
    tensors, moved = said["decay"]
    assert tensors == 4 * 3 and moved < SAME


def test_run_when_it_asks_for_what_is_not_proven_then_refused_with_flag_and_remedy(said):
    nothing, other_model, zero, loss, context, tensor, sequence, mtp = said["refused"]
    assert nothing is other_model is zero is sequence is None
    assert loss == (
        "--dsa-indexer-loss-coeff 0.5: the indexer would learn from a loss of its own, and the policy change "
        "by the keys that it chooses, beside the corrected gradient, whose norm would count both; leave it "
        "out"
    )
    assert context == (
        "--context-parallel-size 2: with --experimental-attention-variant dsa keys are gathered over "
        "context-parallel ranks, which is not proven; use 1"
    )
    assert tensor == (
        "--tensor-model-parallel-size 2 without --sequence-parallel: Megatron's latent attention with "
        "--experimental-attention-variant dsa is made for both; give --sequence-parallel"
    )
    assert mtp == (
        "--mtp-num-layers 1: with --experimental-attention-variant dsa layers that predict further tokens "
        "are not proven; leave it out"
    )
