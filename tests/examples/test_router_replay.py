"""R3 in the quickstart: the experts that the real server chose are those that real Megatron trains."""

import json
from pathlib import Path

import pytest

from megatron_rl_corr.observability.metrics_file import read_metrics
from megatron_rl_corr.rollout.sample_file import read_trajectories
from tests.preloaded import run_preloaded
from tools.cpu import environment

HERE = Path(__file__).resolve().parent
STEPS, MICRO_BATCH, MICRO_BATCHES = 2, 16, 4
LAYERS = 4
RECOMPUTE = [
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """The folder of a quickstart at TP 2 x PP 2 x EP 2 with sequence parallelism and a server in bfloat16.

    In float32 both engines choose alike, and a replay that does nothing would look right.
    """
    folder = tmp_path_factory.mktemp("replay")
    (folder / "routes").mkdir()
    run = run_preloaded(
        [
            HERE / "recording_pretrain.py",
            "--out",
            folder / "run",
            "--server-dtype",
            "bfloat16",
            "--steps",
            STEPS,
            "--router-replay",
            "R3",
            "--",
            *RECOMPUTE,
            "--rollout-pad-sequences",
            "--expert-statistics",
            # Its passes would be recorded too, with routes that no server gave.
            "--rollout-probe-push",
            "off",
            "--rollout-save-routed-experts",
            "--rollout-save-trajectories",
            folder / "samples",
        ],
        env=environment("megatron") | {"RECORDED_ROUTES": str(folder / "routes")},
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def samples_of(folder):
    """The samples of each step, as they were saved."""
    return [list(read_trajectories(path)) for path in sorted((folder / "samples").iterdir())]


def passes(folder, **wanted):
    """(tensor rank, layer) -> the experts of each pass in order, of one kind of pass."""
    found = {}
    for path in (folder / "routes").iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            if all(line[name] == value for name, value in wanted.items()):
                found.setdefault((line["tp"], line["layer"]), []).append(line)
    return found


def assert_servers_routes(found, steps):
    """Every token of every microbatch went to the experts that the server says; how many
    tokens were looked at.
    """
    assert found.keys() == {(tp, layer) for tp in range(2) for layer in range(LAYERS)}
    looked_at = 0
    for (tp, layer), lines in found.items():
        assert len(lines) == STEPS * MICRO_BATCHES
        for number, line in enumerate(lines):
            step, micro = divmod(number, MICRO_BATCHES)
            length, rows = line["sizes"]
            assert (length, rows) == (16, MICRO_BATCH)  # half of --seq-length, under sequence parallelism
            for row in range(rows):
                routes = steps[step][micro * MICRO_BATCH + row].trajectory.routed_experts
                own = routes[tp * length : (tp + 1) * length, layer].sort(dim=1).values.tolist()
                assert [line["experts"][at * rows + row] for at in range(len(own))] == own
                looked_at += len(own)
    return looked_at


def test_routes_when_replayed_from_the_server_then_training_and_scoring_used_exactly_those(replayed):
    steps = samples_of(replayed)
    tokens = sum(len(sample.trajectory.routed_experts) for step in steps for sample in step)
    assert tokens > STEPS * 64 * 10
    scoring = passes(replayed, training=False)
    forward = passes(replayed, training=True, grad=False)
    recomputed = passes(replayed, training=True, grad=True)
    for found in (scoring, forward, recomputed):
        assert assert_servers_routes(found, steps) == LAYERS * tokens


def test_metrics_when_routes_are_replayed_then_disagreement_and_bytes_are_told(replayed):
    steps = read_metrics(replayed / "run/metrics.jsonl")
    assert len(steps) == STEPS
    for step in steps:
        assert step["grad_norm"] > 0 and step["rollout_corr/log_ratio_abs_max"] < 0.1
        assert step["router_replay/bytes_per_token"] == LAYERS * 2  # layers x experts a token, a byte each
        assert step["router_replay/tokens_without_routes"] == 0
        by_layer = [step[f"router_replay/disagreement/layer_{layer:03d}"] for layer in range(LAYERS)]
        assert step["router_replay/disagreement"] == pytest.approx(sum(by_layer) / LAYERS)
        assert 0 < step["router_replay/disagreement"] < 0.1
        # At most one expert of two differs where the choice is near a tie.
        assert step["router_replay/overlap"] == pytest.approx(
            1 - step["router_replay/disagreement"] / 2, abs=1e-3
        )


def test_expert_statistics_when_asked_for_then_every_experts_tokens_in_a_file_and_as_heat_maps(replayed):
    lines = [json.loads(line) for line in (replayed / "run/experts.jsonl").read_text().splitlines()]
    steps = read_metrics(replayed / "run/metrics.jsonl")
    for line, step, samples in zip(lines, steps, samples_of(replayed), strict=True):
        assert line["step"] == step["step"] and line["layers"] == list(range(LAYERS))
        responses = sum(len(sample.trajectory.output_ids) for sample in samples)
        assert [sum(row) for row in line["tokens"]] == [2 * responses] * LAYERS
        # Weighted by its tokens, the experts' mean mismatch is the batch's.
        for tokens, sizes in zip(line["tokens"], line["log_ratio_abs_mean"], strict=True):
            total = sum(n * size for n, size in zip(tokens, sizes, strict=True) if n)
            assert total / sum(tokens) == pytest.approx(step["rollout_corr/log_ratio_abs_mean"], rel=1e-4)
        # The routes that were replayed, counted by hand in one layer: a response's tokens are predicted from
        # the last of its prompt on.
        counted = [0] * 8
        for sample in samples:
            routes = sample.trajectory.routed_experts[len(sample.trajectory.prompt_ids) - 1 :, 3]
            for expert in routes.flatten().tolist():
                counted[expert] += 1
        assert line["tokens"][3] == counted
    events = b"".join(
        path.read_bytes() for path in (replayed / "run/tensorboard").glob("events.out.tfevents.*")
    )
    assert b"experts/log_ratio_abs_mean" in events
