"""The corrected step on real Megatron-core over gloo, in every layout, against Hugging Face autograd.

The reference is float64 and shares no code with the package; compared are the loss, every parameter's
gradient, and every metric.
"""

import itertools
import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.core.naive import HIGH, LOW, Batch, clamp, correct, mean
from tests.mcore.layout_cases import CONFIGS, LENGTH
from tests.megatron_forks import run_megatron
from tests.tiers import in_matrix, matrix

pytestmark = matrix
HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-5  # of float32 Megatron against float64; measured 1e-6


def moe_layouts(processes):
    """{tp} x {pp, vpp} x {cp} x {dp} x {ep} of so many processes; Megatron's MoE wants sp
    wherever it has tp.
    """
    for tp, (pp, vpp), cp, dp, ep in itertools.product(
        (1, 2), ((1, 1), (2, 1), (2, 2)), (1, 2), (1, 2), (1, 2)
    ):
        if tp * pp * cp * dp == processes and tp * cp * dp % ep == 0:
            layout = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
            yield layout | ({"vpp": 2} if vpp == 2 else {}) | ({"sp": True} if tp == 2 else {})


def dense_layouts(processes):
    """{tp 2, without sp} x {pp} x {cp} x {dp}: what MoE can't do."""
    for pp, cp, dp in itertools.product((1, 2), (1, 2), (1, 2)):
        if 2 * pp * cp * dp == processes:
            yield {"tp": 2, "pp": pp, "cp": cp}


def specs(layouts):
    """Each layout with --calculate-per-token-loss on and off, 1 and 4 microbatches, and the other cases."""
    for layout in layouts:
        # Interleaved stages need at least as many microbatches as there are stages.
        few = 2 if "vpp" in layout else 1
        # Where the loss makes the correction, both ways must give the same: with the scoring
        # pass and without.
        yield layout | {"runs": [["token", few], ["token", 4], ["sequence", 4], ["once sequence", 4]]}
        scored = [["once sequence/scored", 4]] if layout.get("cp", 1) > 1 else [["once token/scored", 4]]
        yield layout | {
            "per_token": True,
            "runs": [["token", few], ["bypass", 4], ["once token", 4], *scored],
        }


def some(specs, processes):
    """All of one process; of more, which take minutes, each layout in one of its two ways, and of four ranks
    only those whose experts are cut too, as are their layers' matrices or their stages.

    tests/matrix/test_all_layouts.py runs the others.
    """
    specs = list(specs)
    if processes == 1:
        return specs
    pairs = enumerate(zip(specs[::2], specs[1::2], strict=True))
    # Ways 0, 1, 1, 0, ...: neighbours differ in their experts' ranks, which both ways must see.
    chosen = [pair[(at + at // 2) % 2] for at, pair in pairs]
    cut = {"tp", "vpp"}
    return [
        spec
        for spec in chosen
        if processes == 2
        or spec.get("ep") != 1
        and any(spec.get(name, 1) > 1 for name in cut)
        or "local" in spec
    ]


EXTRA = {
    1: [],
    2: [{"cp": 2, "hidden": True}, {"tp": 2, "sp": True, "ep": 2, "local": True}],
    4: [
        *in_matrix({"tp": 2, "ep": 2, "etp": 2, "sp": True}),
        *in_matrix({"ep": 4}, {"cp": 4}, {"tp": 2, "cp": 2, "ep": 2, "sp": True, "hidden": True}),
        {"tp": 2, "pp": 2, "vpp": 2, "sp": True, "hidden": True},
        {"cp": 2, "pp": 2, "ep": 2, "local": True},
    ],
}
"""More experts' ranks; log-probs from hidden states instead of logits; and the local spec, not
Transformer Engine's.
"""

PACKED = {
    1: [{"packed": 64}],
    2: [{"packed": 64, "cp": 2, "hidden": True}, {"packed": 64, "pp": 2, "vpp": 2, "per_token": True}],
    4: [
        {"packed": 64, "tp": 2, "pp": 2, "ep": 2, "sp": True, "recompute": True},
        {"packed": 64, "tp": 2, "cp": 2, "ep": 2, "sp": True, "per_token": True},
        *in_matrix(
            {"packed": 64, "cp": 2, "pp": 2},
            {"packed": 64, "pp": 4},
            {"packed": 32, "tp": 2, "ep": 2, "etp": 2, "sp": True},
        ),
    ],
}
"""Sequences packed into microbatches of at most so many tokens; a number of microbatches is not
theirs to choose. The stages in the middle, of 4, get no token of a batch.
"""

TRUNCATED = {
    1: [{"recompute": True}],
    2: [{"cp": 2}, *in_matrix({"pp": 2}, {"tp": 2, "sp": True})],
    4: [
        {"pp": 2, "cp": 2, "recompute": True},
        *in_matrix({"tp": 2, "cp": 2, "sp": True, "per_token": True}),
        *in_matrix({"tp": 2, "pp": 2, "vpp": 2, "sp": True}, {"cp": 2}),
    ],
}
"""Where samples were drawn from a few ids each: sampling masks go to the last stage, cut for
context parallelism.
"""

CENTERED = {
    1: [{"per_token": True}, {"packed": 64}],
    2: [
        {"tp": 2, "sp": True},
        {"cp": 2, "per_token": True},
        *in_matrix({"pp": 2}, {"packed": 64}),
        {"packed": 64, "cp": 2, "recompute": True},
    ],
}
"""With score centering: the likeliest ids go to the last stage, cut for context parallelism, and their
log-probs are of a vocabulary that tensor-parallel ranks share.
"""


@pytest.fixture(scope="module")
def tiny_dense_dir(tiny_moe_dir, tmp_path_factory):
    """The tiny model's tokenizer and sizes with dense layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    out = tmp_path_factory.mktemp("tiny_dense")
    moe = json.loads((tiny_moe_dir / "config.json").read_text())
    shape = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rope_parameters",
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        tie_word_embeddings=False, initializer_range=0.05, **{name: moe[name] for name in shape}
    )
    Qwen3ForCausalLM(config).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def reference_of(hf_reference):
    """hf_reference.py's results for a model directory: their path, and them."""

    @cache
    def reference(model_dir):
        path = hf_reference(model_dir)
        return path, torch.load(path, weights_only=True)

    return reference


def results(processes, model_dir, reference, chosen):
    run = run_megatron(
        HERE / "layout_worker.py", processes, model_dir, reference, *map(json.dumps, chosen), timeout=600
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    expected = [[spec, *one] for spec in chosen for one in spec["runs"]]
    assert [[one["layout"], one["case"], one["microbatches"]] for one in found] == expected, run.stderr[
        -3000:
    ]
    return found


def expected_metrics(reference, case):
    """Every metric of a case, from the reference's log-probs alone; of truncated samples, its "truncated"."""
    case = case.partition("/")[0]
    samples, train = reference["samples"], "now" if case == "bypass" or case.startswith("once") else "old"
    tokens = [
        (i, float(s[train][t]), float(s["rollout"][t]))
        for i, s in enumerate(samples)
        for t in range(len(s["output"]))
    ]
    padding = len(samples) * LENGTH - len(tokens)
    rows, trains, rollouts = zip(*tokens, *[(0, 0.0, 0.0)] * padding, strict=True)
    answer = correct(
        Batch(
            list(trains),
            list(rollouts),
            [True] * len(tokens) + [False] * padding,
            list(rows),
            len(samples),
            [0] * len(rows),
            [0.0] * len(rows),
            lags=[0] * len(rows),
        ),
        CONFIGS[case],
        with_turns=False,
    )
    rewards, n, moved = [s["reward"] for s in samples], len(samples), reference["cases"][case]["moved"]
    losses = {
        name if "/" in name else f"loss/{name}": value
        for name, value in reference["cases"][case]["metrics"].items()
    }
    return (
        {f"rollout_corr/{name}": value for name, value in answer.metrics.items()}
        | losses
        | {
            "reward/mean": sum(rewards) / n,
            "reward/max": max(rewards),
            "reward/min": min(rewards),
            "reward/std": math.sqrt(sum((r - sum(rewards) / n) ** 2 for r in rewards) / n),
            "response_length/mean": len(tokens) / n,
            "weight_lag": 0.0,
            "weight_lag_mean": 0.0,
            "loss/entropy": reference["entropy"],
            "loss/old_new_k3_kl": mean(math.expm1(d) - d for d in moved),
            "loss/old_new_k3_kl_clamped": mean(
                math.expm1(d) - d for d in (clamp(d, LOW, HIGH) for d in moved)
            ),
        }
    )


def check(found, whole_reference, parameters):
    for one in found:
        others = [whole_reference[name] for name in ("truncated", "centered") if one["layout"].get(name)]
        reference = others[0] if others else whole_reference
        where = (one["layout"], one["case"], one["microbatches"])
        assert len(reference["cases"][one["case"].partition("/")[0]]["grads"]) == parameters
        assert one["gradient"] < TOLERANCE, (where, one["gradient"], one["worst"])
        expected = expected_metrics(reference, one["case"])
        assert one["metrics"].keys() == expected.keys(), where
        # counts what is no sampled token: of packs prompts, and next to no padding
        if "packed" in one["layout"]:
            padded = "rollout_corr/padded_tokens"
            assert one["metrics"][padded] < expected.pop(padded) / 2
        for name, value in expected.items():
            near = pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE, nan_ok=True)
            assert one["metrics"][name] == near, (where, name)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_corrected_step_of_moe_in_every_layout_then_gradients_and_metrics_equal_hf_autograd(
    processes, tiny_moe_dir, reference_of
):
    path, reference = reference_of(tiny_moe_dir)
    chosen = some(specs([*moe_layouts(processes), *EXTRA[processes]]), processes)
    for layout in TRUNCATED[processes]:
        chosen.append(layout | {"truncated": True, "runs": [["token", 4], ["bypass", 2]]})
    for layout in PACKED[processes][:1]:
        chosen.append(
            {name: value for name, value in layout.items() if name != "hidden"}
            | {"truncated": True, "runs": [["token", 4]]}
        )
    for layout in PACKED[processes]:
        chosen.append(
            layout | {"runs": [["token", 4], ["bypass" if "per_token" in layout else "once sequence", 4]]}
        )
    found = results(processes, tiny_moe_dir, path, chosen)
    check(found, reference, parameters=135)  # 3 outside the layers; 4 x (9 + 8 experts x 3) inside
    for one in found:
        if one["layout"].get("truncated") and "packed" not in one["layout"]:
            check_traffic(one, reference["truncated"]["samples"])


@pytest.mark.parametrize("processes", [1, 2])
def test_step_with_score_centering_when_sharded_then_equals_hf_autograd(
    processes, tiny_moe_dir, reference_of
):
    path, reference = reference_of(tiny_moe_dir)
    runs = [["once centered", 4], ["once centered token", 2], ["once centered token/scored", 4]]
    chosen = [layout | {"centered": True, "runs": runs} for layout in CENTERED[processes]]
    check(results(processes, tiny_moe_dir, path, chosen), reference, parameters=135)


def check_traffic(one, samples):
    """Of the sampling masks every byte is sent once, to the context-parallel rank of the last stage that
    reads it.
    """
    layout, per_rank = one["layout"], one["traffic"]
    tp, cp, pp = (layout.get(name, 1) for name in ("tp", "cp", "pp"))
    dp = len(per_rank) // (tp * cp * pp)
    ids = sum(len(support) for sample in samples for support in sample["support"])
    # int32: how many ids each token has, and the ids.
    whole = 4 * (len(samples) * LENGTH + ids)
    sent, received = (sum(rank[name] for rank in per_rank) for name in ("send", "recv_"))
    first, last = (per_rank[at * tp * cp * dp : (at + 1) * tp * cp * dp] for at in (0, pp - 1))
    assert sent == received
    if cp == 1 or pp > 1:
        assert sent == (whole if pp > 1 else 0)
    else:
        # Each context-parallel rank but the leader is sent its own: with two ranks in chunks of a
        # quarter, some of it.
        assert 4 * len(samples) * LENGTH // cp < sent < whole
    # Tensor-parallel ranks hand on what their first one has; nobody else broadcasts, and no other
    # stage gets an id.
    assert sum(rank["broadcast_"] for rank in last) == (tp * whole if tp > 1 else 0)
    if pp > 1:
        assert all(rank["recv_"] == rank["broadcast_"] == 0 for rank in first)
        leaders = [rank["send"] for rank in first if rank["send"]]
        assert len(leaders) == dp and sum(leaders) == whole


@pytest.mark.parametrize("processes", [*in_matrix(2), 4])
def test_corrected_step_of_dense_model_without_sequence_parallel_then_equal_hf_autograd(
    processes, tiny_dense_dir, reference_of
):
    path, reference = reference_of(tiny_dense_dir)
    found = results(processes, tiny_dense_dir, path, some(specs(dense_layouts(processes)), processes))
    check(found, reference, parameters=47)  # 3 outside the layers; 4 x 11 inside
