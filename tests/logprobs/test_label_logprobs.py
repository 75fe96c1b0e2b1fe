"""The Triton log-probs, value and gradient, against float64 without shards, and their edges."""

import pytest
import torch

from megatron_rl_corr.logprobs import torch_backend as label_stats

INF = float("inf")
GRADIENT = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""The gradient has the logits' type: bfloat16 keeps 8 bits, float16 keeps 11."""
CASES = [
    *(
        f"width {width}, {kind}"
        for width in ("1", "2", "tile - 1", "tile", "tile + 1", "two tiles", "three tiles + 7", "five tiles")
        for kind in ("one part", "parts")
    ),
    "bfloat16",
    "bfloat16, parts, odd rows",
    "float16",
    "temperature 0.7",
    "temperature 300",
    "no entropy",
    "padding",
    "padding, parts",
    "only padding",
    "a later rank",
    "rows apart",
    "rows apart by an odd number",
    "in place",
    "in place, bfloat16, parts",
    "one token",
    "more tokens than the merge has",
    "no tokens",
    "32-bit labels",
    "one upstream for all",
    "sampled rows",
    "sampled rows, bfloat16, parts",
    "sampled rows, in place, no entropy",
    "no sampled row",
    "collision",
    "collision, parts, no entropy",
    "collision, sampled rows, bfloat16, parts",
    "blocks as they are",
]


SAMPLED = {
    "sampled rows": [1, 0, 1, 1, 0],
    "sampled rows, bfloat16, parts": [0, 1, 1, 0, 1, 1, 0],
    "sampled rows, in place, no entropy": [0, 0, 1, 0, 1, 0],
    "no sampled row": [0] * 5,
    "sampled rows, two ranks": [0, 1, 1, 0, 1, 0, 1],
    "collision, sampled rows, bfloat16, parts": [0, 1, 1, 0, 1, 1, 0],
}


def of_case(name, inputs):
    """`reference` of a case: of its sampled rows alone, with 0 for the others; the
    statistics are of [4, N].
    """
    if name not in SAMPLED:
        return reference(**inputs)
    kept = torch.tensor(SAMPLED[name]).bool()
    of_rows = {name: inputs[name][kept] for name in ("logits", "labels")} | {
        "grads": inputs["grads"][:, kept]
    }
    stats, logprobs, entropy, gradient = reference(**of_rows, settings=inputs["settings"])
    whole = []
    for values in (logprobs, entropy, gradient):
        whole.append(torch.zeros(len(kept), *values.shape[1:], dtype=torch.float64))
        whole[-1][kept] = values.double()
    return stats, *whole


def reference(logits, labels, grads, settings):
    """In float64: stats [4, T], log-probs, entropy, and the gradient in the logits, padding included."""
    first, limit, temperature = settings["first"], settings["limit"], settings["temperature"]
    exact = logits.double().requires_grad_()
    x = exact[:, :limit] / temperature
    local = labels.long() - first
    mine = (local >= 0) & (local < limit)
    if limit == 0 or len(labels) == 0:
        nothing = torch.zeros(len(labels), dtype=torch.float64)
        stats = torch.stack([nothing - INF, nothing, nothing - INF, nothing])
        return stats, nothing - INF, nothing, torch.zeros_like(logits, dtype=torch.float64)
    target = x.gather(1, local.clamp(0, limit - 1)[:, None])[:, 0].masked_fill(~mine, -INF)
    e = (x - x.amax(dim=1, keepdim=True)).exp()
    product = (e * (x - x.amax(dim=1, keepdim=True)).clamp(min=-1e4)).sum(dim=1)
    stats = torch.stack([x.amax(dim=1), e.sum(dim=1), target, product]).detach()
    log_p = x.log_softmax(dim=1)
    logprobs = log_p.gather(1, local.clamp(0, limit - 1)[:, None])[:, 0].masked_fill(~mine, -INF)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(dim=1)
    outputs = [logprobs, entropy] if settings["with_entropy"] else [logprobs]
    torch.autograd.backward(outputs, [g.double() for g in grads[: len(outputs)]])
    return stats, logprobs.detach(), entropy.detach(), exact.grad


def assert_close(actual, expected, rtol, atol):
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


def test_cases_when_listed_then_all_that_were_run(runs):
    assert sorted(runs["cases"]) == sorted(CASES)


def rounding_of_x(logits, settings) -> float:
    """An x has two roundings, of 1 / temperature and of their product, each at most 2^-24
    of it; at 1 none.
    """
    if settings["temperature"] == 1:
        return 0
    largest = logits[:, : settings["limit"]].double().nan_to_num(neginf=0, posinf=0).abs().max().item()
    return 2**-23 * largest / settings["temperature"]


@pytest.mark.parametrize("name", CASES)
def test_stats_when_in_one_pass_then_those_of_float64(runs, name):
    inputs, result = runs["cases"][name]
    stats, logprobs, entropy, _ = of_case(name, inputs)
    with_entropy = inputs["settings"]["with_entropy"]
    assert_close(result["stats"][[0, 2]], stats[[0, 2]], 2**-23, 0)
    assert_close(result["stats"][1], stats[1], 1e-6, 0)
    # e of a distance of -80 has the rounding of 80 in its exponent.
    assert_close(result["stats"][3], stats[3] if with_entropy else torch.zeros_like(stats[3]), 5e-6, 0)
    assert_close(
        result["logprobs"], logprobs, 2e-6, 2e-6 + rounding_of_x(inputs["logits"], inputs["settings"])
    )
    if with_entropy:
        assert_close(result["entropy"], entropy, 3e-6, 3e-6)


def collision_of(name, inputs):
    """[1, T] sum p^2 in float64, 0 in rows that are not sampled; [0, T] of a case without it."""
    settings, logits = inputs["settings"], inputs["logits"].double()
    if not settings.get("with_collision"):
        return torch.empty(0, len(logits), dtype=torch.float64)
    p = (logits[:, : settings["limit"]] / settings["temperature"]).softmax(dim=1)
    kept = torch.tensor(SAMPLED.get(name, [1] * len(logits))).bool()
    return torch.where(kept, p.square().sum(dim=1), 0.0)[None]


@pytest.mark.parametrize("name", CASES)
def test_collision_when_in_the_same_pass_then_that_of_float64_or_none(runs, name):
    inputs, result = runs["cases"][name]
    assert_close(result["collision"], collision_of(name, inputs), 3e-6, 3e-6)


@pytest.mark.parametrize("name", CASES)
def test_gradient_when_in_one_pass_then_that_of_float64_and_nothing_else_is_written(runs, name):
    inputs, result = runs["cases"][name]
    gradient, dtype = result["gradient"], inputs["logits"].dtype
    # Upstream gradients here are below 4.
    rounding = 4 * rounding_of_x(inputs["logits"], inputs["settings"])
    assert gradient.dtype == dtype
    assert_close(gradient, of_case(name, inputs)[3], GRADIENT[dtype], GRADIENT[dtype] + rounding)
    assert gradient[:, inputs["settings"]["limit"] :].count_nonzero() == 0
    assert result["untouched"] and result["beyond"]
    for row, sampled in enumerate(SAMPLED.get(name, ())):
        assert sampled or torch.equal(gradient[row], torch.zeros_like(gradient[row]))


@pytest.mark.parametrize("name", ["temperature 0.7", "five tiles, parts"])
def test_label_when_almost_certain_then_its_log_prob_keeps_its_digits_whatever_the_temperature(runs, name):
    # Logits of 40 against 26: -log(1 + (V - 1) exp(-14 / temperature)); V is 20480 at most, of a GPU's tiles.
    name = name if name in runs["cases"] else f"width {name}"
    inputs, result = runs["cases"][name]
    _, logprobs, _, gradient = reference(**inputs)
    assert -0.02 < logprobs[2] < -1e-8
    assert abs(result["logprobs"][2].double() - logprobs[2]) < 1.2e-7
    column = inputs["labels"][2]
    assert abs(result["gradient"][2, column].double() - gradient[2, column]) < 1e-6


@pytest.mark.parametrize("parts", ["one part", "parts"])
def test_row_when_not_finite_then_what_torch_makes_of_it(runs, parts):
    result = runs["strange"]["upstream", parts]
    # Nothing finite: -inf, and no gradient. A NaN, +inf, a NaN among -inf: not a number.
    for numbers in (result["entropy"], result["gradient"][:, 0], result["gradient"][:, -3]):
        assert numbers.isnan().tolist() == [False, True, True, True, False]
    assert result["logprobs"].isnan().tolist() == [False, True, True, True, False]
    assert result["logprobs"][0] == -INF and result["gradient"][0].count_nonzero() == 0
    assert result["gradient"][:, -2:].count_nonzero() == 0  # padding
    logits, labels = torch.zeros(5, 1), torch.zeros(5, dtype=torch.int64)
    logits[:, 0] = torch.tensor([-INF, float("nan"), INF, float("nan"), 1.0])
    columns = label_stats.LogitColumns(0, 1, 0.5, with_entropy=True, chunk_tokens=5)
    torch_stats = label_stats.label_stats(logits, labels, columns)
    assert (
        label_stats.combine_stats(torch_stats[None], True)[1].isnan().tolist()
        == result["entropy"].isnan().tolist()
    )


@pytest.mark.parametrize("parts", ["one part", "parts"])
def test_row_when_nothing_comes_from_upstream_then_no_gradient_whatever_it_holds(runs, parts):
    gradient = runs["strange"]["no upstream", parts]["gradient"]
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_row_when_behind_two_to_the_31st_element_then_read_and_written_there(runs):
    inputs, result = runs["far"]["inputs"], runs["far"]["result"]
    _, logprobs, entropy, gradient = reference(**inputs)
    assert_close(result["logprobs"], logprobs, 2e-6, 2e-6)
    assert_close(result["entropy"], entropy, 3e-6, 3e-6)
    assert_close(result["gradient"], gradient, 8e-3, 8e-3)


@pytest.mark.parametrize("tokens, tiles", [(0, 1), (1, 1), (4, 4), (8192, 8)])
def test_program_when_tokens_are_few_then_it_gets_fewer_tiles(tokens, tiles):
    kernels = pytest.importorskip("megatron_rl_corr.logprobs.triton_backend")
    # 151936 columns are 37.09 tiles of 4096; with 4 tokens 148, over the 32 programs of the one
    # processor of a CPU: 4.
    logits = torch.empty(tokens, 151936, device="meta")
    assert kernels.Blocks().span(151936, tokens, logits) == 4096 * tiles


def test_programs_when_in_order_then_the_parts_of_a_row_follow_one_another(runs):
    if "first programs" not in runs:
        pytest.skip("run by the interpreter")
    # Two programs: both parts of the first row, whose columns are neighbours in memory.
    written = ~runs["first programs"].isnan()
    assert written[:, :, 0].all() and not written[:, :, 1:].any()


def test_logits_when_of_a_kind_the_kernels_do_not_take_then_refused_with_the_remedy(runs):
    wrong_type, apart = runs["refusals"]
    assert "float64" in wrong_type and "torch backend" in wrong_type
    assert "(1, 2)" in apart and ".contiguous()" in apart


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "inplace",
        "a rank of padding",
        "bfloat16",
        "sampled rows, two ranks",
        "collision, two ranks",
    ],
)
def test_vocab_parallel_logprobs_when_on_the_kernels_then_value_and_gradient_of_the_whole(runs, name):
    if "sharded" not in runs:
        pytest.skip("two ranks over gloo are run by the interpreter")
    inputs, options = runs["sharded inputs"][name], runs["sharded options"][name]
    settings = {
        "first": 0,
        "limit": options.get("vocab_size", 48),
        "temperature": options.get("temperature", 1.0),
        "with_entropy": options.get("with_entropy", True),
        "with_collision": options.get("with_collision", False),
    }
    inputs["settings"] = settings
    _, logprobs, entropy, gradient = of_case(name, inputs)
    first, second = (rank[name] for rank in runs["sharded"])
    merged = torch.cat([first["gradient"], second["gradient"]], dim=1)
    tolerance = GRADIENT[inputs["logits"].dtype]
    assert_close(merged, gradient, tolerance, tolerance)
    assert torch.equal(first["logprobs"], second["logprobs"])
    assert torch.equal(first["collision"], second["collision"])
    assert_close(first["collision"], collision_of(name, inputs), 3e-6, 3e-6)
    assert_close(first["logprobs"], logprobs, 2e-6, 2e-6 + rounding_of_x(inputs["logits"], settings))
    if settings["with_entropy"]:
        assert_close(first["entropy"], entropy, 3e-6, 3e-6)
    else:
        assert first["entropy"] is None


def test_columns_when_no_collision_is_asked_for_then_four_statistics():
    assert label_stats.LogitColumns(0, 4, 1.0, True, 8).num_stats == 4


def test_statistics_when_of_two_halves_and_merged_then_those_of_all_columns(runs):
    torch.testing.assert_close(*runs["merged"], rtol=1e-6, atol=1e-6)
