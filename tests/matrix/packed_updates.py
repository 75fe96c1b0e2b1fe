"""What packed_updates_worker.py found of each layout, put together and compared; for test_packed_table.py."""

import json
from pathlib import Path

import pytest
import torch

from tests import tensor_files
from tests.mcore.test_packed import COUNTS, GRADIENT, LOGPROBS, METRIC, REFERENCE
from tests.megatron_forks import run_megatron
from tests.preloaded import run_preloaded

WORKERS = Path(__file__).resolve().parents[1] / "mcore"
BOUNDS = {
    "log-probs": LOGPROBS,
    "gradient": GRADIENT,
    "HF log-probs": REFERENCE,
    "HF gradient": REFERENCE,
    "weights": 1e-6,
    "HF weights": 1e-6,
}
"""Largest distances; weights are those after all updates, over their size."""
OF_A_RUN = ("time/", "packing/", "tokens_per_s", "rollout_corr/padded_tokens")
"""Metrics of the layout and of the clock, not of the samples."""


def updates_of(processes, model_dir, reference, specs, folder):
    """[(spec, case, kind -> (updates, weights))], and what plain descent in float64 makes of
    the same orders.
    """
    out, made, runs, orders = folder / f"{processes}.pt", folder / "expected.pt", [], []
    run = run_megatron(
        WORKERS / "packed_updates_worker.py",
        processes,
        model_dir,
        reference,
        out,
        *map(json.dumps, specs),
        timeout=1800,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    numbers = {labels: at for at, labels in enumerate(labels_of(reference))}
    for spec, ranks in zip(specs, tensor_files.load(out), strict=True):
        for case in spec["cases"]:
            kinds = {kind: joined([rank[kind, case] for rank in ranks]) for kind in ("rows", "packed")}
            taken = {
                kind: [sorted(numbers[labels] for labels in logprobs) for logprobs, _, _ in updates]
                for kind, (updates, _) in kinds.items()
            }
            assert taken["rows"] == taken["packed"], "the two took other samples in their updates"
            if taken["rows"] not in orders:
                orders.append(taken["rows"])
            runs.append((spec, case, kinds, orders.index(taken["rows"])))
    cases = sorted({case for spec in specs for case in spec["cases"]})
    worked = run_preloaded(
        [WORKERS / "packed_updates_reference.py", model_dir, reference, made, json.dumps(orders), *cases]
    )
    assert worked.returncode == 0, worked.stderr
    expected = torch.load(made)["made"]
    return [(spec, case, kinds, expected[order, case]) for spec, case, kinds, order in runs]


def labels_of(reference):
    samples = torch.load(reference, weights_only=True)["many"]
    return [tuple(torch.cat([sample["prompt"], sample["output"]])[1:].tolist()) for sample in samples]


def joined(ranks):
    """All ranks' ([(log-probs, metrics, gradients) of each update], weights) as one."""
    updates = [
        tuple(
            {name: value for one in parts for name, value in one.items()}
            for parts in zip(*update, strict=True)
        )
        for update in zip(*(updates for updates, _ in ranks), strict=True)
    ]
    return updates, {name: tensor for _, weights in ranks for name, tensor in weights.items()}


def worst(first, second):
    """The largest distance of two sets of tensors, each over its size, and whose it is."""
    assert first.keys() == second.keys()
    return max(
        (float((value.double() - second[name].double()).norm() / value.double().norm().clamp(min=1e-6)), name)
        for name, value in first.items()
    )


def check_updates(spec, case, kinds, expected, labels):
    """A line with the largest distances, and what is too far."""
    where = {name: value for name, value in spec.items() if name != "cases"}, case
    found, rows, packed = Worst(), *(kinds[kind][0] for kind in ("rows", "packed"))
    assert len(rows) == len(packed) == spec["parts"] * spec.get("epochs", 1) == 3
    for update, (one, other) in enumerate(zip(rows, packed, strict=True)):
        found.take(
            "log-probs", max(float((value - other[0][name]).abs().max()) for name, value in one[0].items())
        )
        found.take("gradient", *worst(one[2], other[2]))
        numbers, others = (
            {k: v for k, v in x.items() if not k.startswith(OF_A_RUN)} for x in (one[1], other[1])
        )
        assert numbers.keys() == others.keys() and len(numbers) > 5 and numbers["skipped"] == 0, where
        for name, value in numbers.items():
            near = (
                value if name.endswith(COUNTS) else pytest.approx(value, rel=METRIC, abs=METRIC, nan_ok=True)
            )
            assert others[name] == near, (where, update, name)
            if value == value:
                found.take("metrics", abs(others[name] - value) / max(abs(value), 1))
        if case != "bypass":  # the policy has moved away from pi_old
            assert (numbers["loss/old_new_k3_kl"] > 1e-7) == (update > 0), (where, update)
        if "replay" not in spec:
            of_reference(where, update, (one, other), expected[0][update], labels, found)
    found.take("weights", *worst(kinds["rows"][1], kinds["packed"][1]))
    if "replay" not in spec:
        found.take(
            "HF weights",
            *worst(expected[1], {k: v for k, v in kinds["packed"][1].items() if k in expected[1]}),
        )
    far = [what for what, bound in BOUNDS.items() if found.values.get(what, 0.0) >= bound]
    line = f"{json.dumps(where[0])} {case}, 3 updates: {found}"
    return line, [f"{what} too far: {line}, worst {found.names.get(what)}" for what in far]


class Worst:
    """The largest distance of each kind, and where it was."""

    def __init__(self):
        self.values, self.names = {}, {}

    def take(self, what, value, name=None):
        if value >= self.values.get(what, 0.0):
            self.values[what], self.names[what] = value, name

    def __str__(self):
        return ", ".join(f"{what} {value:.1e}" for what, value in self.values.items())


def of_reference(where, update, both, wanted, labels, worst_of):
    """One update of each way against plain descent in float64."""
    logprobs, metrics, gradients = wanted
    for found, numbers, grads in both:
        assert {labels[i] for i in logprobs} == set(found)
        far = max(float((found[labels[i]][0] - row).abs().max()) for i, row in logprobs.items())
        worst_of.take("HF log-probs", far)
        worst_of.take("HF gradient", *worst(gradients, {name: grads[name] for name in gradients}))
        for name, value in metrics.items():
            logged = ("rollout_corr/" if name == "kept_fraction" else "loss/") + name
            assert numbers[logged] == pytest.approx(value, rel=2e-4, abs=1e-6), (where, update, name)
