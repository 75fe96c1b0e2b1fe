"""What MoE's routers learn from padded rows, on real Megatron: as from the same samples without padding."""

import json
from pathlib import Path

import pytest

from tests import tensor_files
from tests.megatron_forks import run_megatron

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-4
LENGTHS = [8, 16]
PADDED = {"length": 64, "lengths": LENGTHS}
ONE = [
    PADDED,
    PADDED | {"per_token": True},
    PADDED
    | {
        "settings": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    },
]
TWO = [PADDED | {"cp": 2}, PADDED | {"cp": 2, "per_token": True}]
FOUR = [PADDED | {"tp": 2, "sp": True, "pp": 2}, PADDED | {"tp": 2, "sp": True, "pp": 2, "per_token": True}]
"""Of the first tensor-parallel rank are the first 32 columns, so the other has padding alone."""


@pytest.fixture(scope="module")
def run(tiny_moe_dir, tmp_path_factory):
    """(gradients, counts of each layer, what was printed, the last rank's logged losses) of each layout."""

    def of(processes, specs):
        out = tmp_path_factory.mktemp("padding") / f"{processes}.pt"
        ended = run_megatron(
            HERE / "padding_worker.py", processes, tiny_moe_dir, out, *map(json.dumps, specs)
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        found = []
        for ranks in tensor_files.load(out):
            gradients, counts = {}, {}
            for mine, tokens, _ in ranks:
                gradients |= mine
                counts |= tokens
            found.append((gradients, counts, ended.stderr, ranks[-1][2]))
        return found

    return of


@pytest.fixture(scope="module")
def unpadded(run):
    """Each length alone in rows of just that length: the mean of their gradients, the sum of their counts."""
    (first, one, *_), (second, two, *_) = run(
        1, [{"length": length, "lengths": [length]} for length in LENGTHS]
    )
    gradients = {name: (gradient + second[name]) / 2 for name, gradient in first.items()}
    return gradients, {layer: tokens + two[layer] for layer, tokens in one.items()}


@pytest.mark.parametrize(("processes", "specs"), [(1, ONE), (2, TWO), (4, FOUR)])
def test_rows_when_padded_then_auxiliary_gradients_and_token_counts_are_those_without_padding(
    run, unpadded, processes, specs
):
    expected, expected_counts = unpadded
    for spec, (gradients, counts, printed, _) in zip(specs, run(processes, specs), strict=True):
        assert "routers learn" not in printed
        assert gradients.keys() == expected.keys()
        assert sum(gradient.norm() > 0 for gradient in expected.values()) > 4
        for name, gradient in expected.items():
            error = (gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
            assert error < TOLERANCE, (spec, name, error)
        assert counts.keys() == expected_counts.keys()
        for layer, tokens in expected_counts.items():
            assert counts[layer].tolist() == tokens.tolist(), (spec, layer)


def test_rows_when_megatron_takes_no_mask_then_last_rank_says_once_what_learns_from_padding(run, unpadded):
    ((gradients, _, printed, _),) = run(2, [PADDED | {"pp": 2, "old": True}])
    name = "model.layers.0.mlp.gate.weight"
    assert (gradients[name] - unpadded[0][name]).norm() > 0.1 * unpadded[0][name].norm()
    (line,) = [line for line in printed.splitlines() if line.startswith("[rollout]")]
    flags = ["--moe-aux-loss-coeff", "--moe-z-loss-coeff", "--moe-router-bias-update-rate"]
    for flag, value in zip(flags, ("0.1", "0.1", "0.001"), strict=True):
        assert f"{flag} {value}" in line and f"{flag} 0 " in line.replace(",", " ")


PACKED_LENGTHS = [7, 13]
"""Not multiples of 2 * cp: under context parallelism a sequence is padded."""
PACKED = {"length": 64, "lengths": PACKED_LENGTHS, "packed": 1000}
PACKED_LAYOUTS = {
    1: [
        PACKED | {"known": 4},
        PACKED | {"per_token": True, "known": 4},
        PACKED | {"settings": ONE[2]["settings"]},
        PACKED | {"known": 4, "empty": 2},
        PACKED | {"per_token": True, "known": 4, "empty": 1},
    ],
    2: [PACKED | {"cp": 2}, PACKED | {"cp": 2, "per_token": True}, PACKED | {"cp": 2, "empty": 1}],
    4: [
        PACKED | {"tp": 2, "sp": True, "pp": 2, "per_token": True},
        PACKED | {"tp": 2, "sp": True, "pp": 2, "per_token": True, "empty": 2},
    ],
}


@pytest.fixture(scope="module")
def alone(run):
    """Each length alone: a microbatch weighs 7 / 20 and 13 / 20 of both, by its real tokens."""
    (first, one, _, log), (second, two, _, log2) = run(
        1, [{"length": n, "lengths": [n]} for n in PACKED_LENGTHS]
    )
    small, large = (n / sum(PACKED_LENGTHS) for n in PACKED_LENGTHS)
    gradients = {name: small * gradient + large * second[name] for name, gradient in first.items()}
    logged = {name: small * value + large * log2[name] for name, value in log.items()}
    return gradients, {layer: tokens + two[layer] for layer, tokens in one.items()}, logged


@pytest.mark.parametrize("processes", PACKED_LAYOUTS)
def test_packs_when_their_tokens_differ_then_auxiliary_losses_weigh_by_real_tokens_in_gradient_and_log(
    run, alone, processes
):
    expected, expected_counts, expected_log = alone
    specs = PACKED_LAYOUTS[processes]
    for spec, (gradients, counts, _, logged) in zip(specs, run(processes, specs), strict=True):
        for name, gradient in expected.items():
            error = (gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
            assert error < TOLERANCE, (spec, name, error)
        for layer, tokens in expected_counts.items():
            assert counts[layer].tolist() == tokens.tolist(), (spec, layer)
        if processes == 1:
            # Megatron divides the sum by the microbatches that its calculator knows.
            for name, value in expected_log.items():
                assert float(logged[name]) / spec.get("known", 2) == pytest.approx(
                    float(value), rel=TOLERANCE
                ), spec
