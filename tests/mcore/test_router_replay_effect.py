"""What replay removes of the mismatch: by hand, against passes over whole batches; training
does not notice.
"""

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_rl_corr.config.flags import parse
from megatron_rl_corr.features.router_replay_effect.metrics import effect_metrics
from tests import tensor_files
from tests.mcore.test_router_replay import EXPERTS, LAYERS, TOP_K, some_samples
from tests.megatron_forks import run_megatron
from tests.tiers import in_matrix, matrix

pytestmark = matrix

HERE = Path(__file__).resolve().parent
LAYOUTS = {
    1: [{}, {"packed": 64}, *in_matrix({"recompute": True})],
    2: [
        {"packed": 48, "pp": 2, "vpp": 2},
        *in_matrix({"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}, {"ep": 2}, {"packed": 64, "cp": 2}),
    ],
}
CASES = [(processes, json.dumps(spec)) for processes, specs in LAYOUTS.items() for spec in specs]
NAMES = ("router_replay/k3_with", "router_replay/k3_without", "router_replay/share_removed")


def test_effect_of_three_tokens_then_the_numbers_by_hand():
    # rho with replay: 1, 1.25, and a token outside the mask; without: 2, 0.5. The last token is infinite in
    # one pass. k3 = rho - 1 - ln rho: with 0 and 0.25 - ln 1.25; without 1 - ln 2 and ln 2 - 0.5.
    rollout = torch.tensor([0.25, 0.4, 0.1, 0.5]).log()
    replayed = torch.tensor([0.25, 0.5, 0.9, 0.5]).log()
    chosen = torch.tensor([0.5, 0.2, 0.9, 0.0]).log()
    mask = torch.tensor([True, True, False, True])
    found = {name: metric.value() for name, metric in effect_metrics(replayed, chosen, rollout, mask).items()}
    with_replay, without = (0.25 - math.log(1.25)) / 2, 0.5 / 2
    assert found == pytest.approx(
        {
            "router_replay/k3_with": with_replay,
            "router_replay/k3_without": without,
            "router_replay/share_removed": 1 - with_replay / without,
        },
        rel=1e-5,
    )


def test_flag_when_nothing_is_replayed_or_the_number_is_no_count_then_refused_by_name():
    required = [
        "--rollout-url",
        "http://a:1",
        "--rollout-prompts",
        "p",
        "--rollout-hf-checkpoint",
        "m",
        "--rollout-reward-function",
        "math",
    ]
    flag = ["--router-replay-effect-every", "5"]
    with pytest.raises(ValueError, match="--router-replay-effect-every.*--router-replay.*R3"):
        parse([*required, *flag])
    with pytest.raises(ValueError, match="--router-replay-effect-every must be positive, got 0"):
        parse([*required, "--router-replay", "R3", "--router-replay-effect-every", "0"])
    assert parse([*required, "--router-replay", "R3", *flag])[1].router_replay_effect_every == 5


@pytest.fixture(scope="module")
def results(tiny_moe_dir, tmp_path_factory):
    """results(processes, layout as JSON) -> the ranks' results."""
    folder = tmp_path_factory.mktemp("effect")
    generator, samples = torch.Generator().manual_seed(5), some_samples()
    for sample in samples:
        tokens = len(sample["prompt"]) + len(sample["output"]) - 1
        scores = torch.rand(tokens, LAYERS, EXPERTS, generator=generator)
        sample["routes"] = scores.topk(TOP_K).indices.to(torch.uint8)
    torch.save(samples, folder / "samples.pt")

    @cache
    def of_processes(processes):
        out, specs = folder / f"out{processes}.pt", list(map(json.dumps, LAYOUTS[processes]))
        arguments = [processes, tiny_moe_dir, folder / "samples.pt", out, *specs]
        run = run_megatron(HERE / "router_replay_effect_worker.py", *arguments, timeout=600)
        assert run.returncode == 0, run.stderr[-4000:]
        return dict(zip(specs, tensor_files.load(out), strict=True))

    return lambda processes, layout: of_processes(processes)[layout]


@pytest.mark.parametrize(("processes", "layout"), CASES)
def test_step_when_measured_then_weights_biases_logged_losses_and_random_state_bit_for_bit(
    results, processes, layout
):
    for rank in results(processes, layout):
        (plain, reports), (measured, told), (once, _) = rank[None], rank[1], rank[2]
        assert len(plain) == len(measured) == len(once) > 5 and plain[0].numel() > 1000
        for before, after, other in zip(plain, measured, once, strict=True):
            assert torch.equal(before, after) and torch.equal(before, other)
        for ours, theirs in zip(reports, told, strict=True):
            same = {
                name: value for name, value in ours.items() if not name.startswith(("time/", "tokens_per_s"))
            }
            assert {name: theirs[name] for name in same} == pytest.approx(same, rel=0, abs=0, nan_ok=True)
            assert theirs.keys() - ours.keys() == set(NAMES)


@pytest.mark.parametrize(("processes", "layout"), CASES)
def test_effect_in_every_layout_then_that_of_passes_over_whole_batches_token_by_token(
    results, processes, layout
):
    ranks = results(processes, layout)
    parts = [rank["naive"] for rank in ranks if rank["naive"] is not None]
    k3 = [sum(math.expm1(d) - d for part in parts for d in part[way]) for way in (0, 1)]
    count = sum(len(part[0]) for part in parts)
    assert count > 20
    [reports] = [rank[1][1] for rank in ranks if rank[1][1]]
    found = [reports[0][name] for name in NAMES]
    assert found == pytest.approx([k3[0] / count, k3[1] / count, 1 - k3[0] / k3[1]], rel=1e-5)
    assert abs(found[2]) > 0.01


@pytest.mark.parametrize(("processes", "layout"), CASES)
def test_effect_when_measured_every_second_batch_then_the_first_alone_has_it(results, processes, layout):
    [reports] = [rank[2][1] for rank in results(processes, layout) if rank[2][1]]
    assert set(NAMES) <= reports[0].keys() and not set(NAMES) & reports[1].keys()
