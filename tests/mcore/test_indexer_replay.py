"""Sparse attention that takes given keys, in real Megatron, against transformers with the same keys."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.mcore.tiny_models import INDEXER, LENGTH, ROWS, make_model
from tests.megatron_forks import run_megatron
from tools.cpu import gpu_available

pytestmark = pytest.mark.skipif(gpu_available(), reason="without a GPU only")

WORKER = Path(__file__).with_name("indexer_replay_worker.py")
K, LAYERS = INDEXER["index_topk"], 4
TOLERANCE = 1e-4
"""Of logits up to 7, in float32."""
LAYOUTS = [(1, ()), (1, ("recompute",)), (4, ()), (4, ("recompute",))]


def drawn_keys():
    """[ROWS, LENGTH - 1, LAYERS, K]: keys by chance, among those up to the token's own; 255s where attention
    takes all.
    """
    generator = torch.Generator().manual_seed(0)
    keys = torch.full((ROWS, LENGTH - 1, LAYERS, K), 255)
    for row in range(ROWS):
        for token in range(K, LENGTH - 1):
            for layer in range(LAYERS):
                keys[row, token, layer] = torch.randperm(token + 1, generator=generator)[:K]
    return keys


def forced(model, keys):
    """transformers' model with these keys in each layer; lists to which it adds what it would have taken."""
    own = []
    for number, layer in enumerate(model.model.layers):
        choose = layer.self_attn.indexer.forward

        def chosen(*args, number=number, choose=choose, **settings):
            ids = choose(*args, **settings)
            own.append(ids.clone())
            ids = ids.clone()
            ids[:, K : LENGTH - 1] = keys[:, K:, number].to(ids.dtype)
            return ids

        layer.self_attn.indexer.forward = chosen
    return own


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def truth(request, tmp_path_factory):
    """A folder, transformers' logits by its own keys and by these, and how many of these it would take."""
    folder = tmp_path_factory.mktemp(request.param)
    make_model(request.param, folder)
    keys = drawn_keys()
    torch.save(keys, folder / "keys.pt")
    reference = torch.load(folder / "reference.pt", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    double = copy.deepcopy(model).double()
    own = forced(model, keys)
    with torch.no_grad():
        logits = model(reference["tokens"]).logits
    shared = sum(
        len(set(own[layer][row, token].tolist()) & set(keys[row, token, layer].tolist()))
        for layer in range(LAYERS)
        for row in range(ROWS)
        for token in range(K, LENGTH - 1)
    )
    forced(double, keys)
    double.config._experts_implementation = "eager"  # the grouped kernel takes no float64
    ((double(reference["tokens"]).logits * reference["pull"]).sum() / ROWS).backward()
    with torch.no_grad():
        for parameter in double.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    double.save_pretrained(folder / "forced")
    return folder, reference["logits"], logits, shared


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda one: "-".join(map(str, (one[0], *one[1]))))
def replayed(request, truth):
    """What each stage's first rank has saved."""
    ranks, how = request.param
    answer = run_megatron(WORKER, truth[0], *how, ranks=ranks)
    assert answer.returncode == 0, answer.stderr[-3000:]
    names = ["-".join(["replayed", str(ranks), *how, str(stage)]) for stage in range(1 + (ranks > 1))]
    return [torch.load(truth[0] / f"{name}.pt", weights_only=True) for name in names]


def test_keys_when_replayed_then_logits_of_transformers_with_these_keys_and_of_no_other(truth, replayed):
    _, own, forced_logits, _ = truth
    assert (forced_logits - own).abs().max() > 1.0  # keys by chance are another model
    last = replayed[-1]
    assert (last["logits"] - forced_logits).abs().max() < TOLERANCE
    for name in ("before", "after"):
        assert (last[name] - own).abs().max() < TOLERANCE, name
    assert torch.equal(last["before"], last["after"])


def test_gradients_when_keys_are_replayed_then_those_of_transformers_in_float64(truth, replayed):
    from safetensors.torch import load_file

    expected = load_file(truth[0] / "forced/model.safetensors")
    expected = {name: one for name, one in expected.items() if not name.endswith("correction_bias")}
    found = {name: one for stage in replayed for name, one in stage["gradients"].items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name].double() - gradient).norm()
        assert error < 2e-5 * gradient.norm() + 1e-6, (name, error / gradient.norm())


def test_keys_when_compared_then_the_share_that_transformers_would_take_and_of_tokens_with_keys(
    truth, replayed
):
    shared, tokens = truth[3], ROWS * (LENGTH - 1 - K)
    metrics = replayed[-1]["metrics"]
    overlap, part = metrics["indexer_replay/overlap"], metrics["indexer_replay/replayed"]
    assert overlap[0] / overlap[1] == pytest.approx(shared / (tokens * LAYERS * K), abs=0.02)
    assert 0 < overlap[0] < overlap[1]
    assert part[0] / part[1] == tokens / (ROWS * LENGTH)
    assert all(stage["metrics"] == {} for stage in replayed[:-1])


def test_run_when_keys_can_not_be_replayed_then_refused_with_flag_and_remedy(replayed):
    good, off, dense, fused, graphs, short, long, ledger, effect = replayed[0]["refused"]
    assert good is None and off is None
    flag = "--rollout-indexer-replay"
    assert dense == f"{flag} has no effect without --experimental-attention-variant dsa; leave it out"
    for said, why in (
        (fused, "--dsa-kernel-backend tilelang chooses keys in a kernel, where"),
        (graphs, "--cuda-graph-impl local captures attention with one microbatch's keys"),
        (long, f"{flag} keeps positions below 32768, and --seq-length is 32769"),
    ):
        assert said.startswith(why) and said.endswith(f"or leave {flag} out"), said
    for said, given in (
        (ledger, "--rollout-ledger-interval 20"),
        (effect, "--router-replay-effect-every 10"),
    ):
        assert said.startswith(f"{given} measures passes without the servers' keys"), said
        assert said.endswith(f"{flag} trains; leave one of them out")
    why = f"{flag} has no effect with --seq-length 48, of which --dsa-indexer-topk 48 takes all keys"
    assert short == f"{why}; leave it out"
