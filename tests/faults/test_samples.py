"""Everything of a run is killed in the middle of a step and started with --load: its samples are
those of a whole run.

The server is a vLLM server that runs one request at a time, so that a response depends on its weights, its
prompt and its seed alone. The client has one in flight a replica, so that groups are done in the order in
which they are begun.
"""

import json
import os
import signal
from collections import Counter

import pyarrow.parquet as pq
import pytest
import torch

from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from tests.conftest import ROOT
from tests.faults.drills import drill, long
from tests.mcore.launched import launch, untimed_steps, write_data
from tests.preloaded import PreloadedServer
from tools.cpu import environment, gpu_available, vllm_arguments

SCRIPT = ROOT / "tests/faults/pretrain_killed.py"
STEPS, SAVED = 8, 4
GROUP = 4
FILTER = """
def passes(prompt, group):
    return group.number % 5 != 3
"""
ONE_AT_A_TIME = ["--rollout-max-concurrency", 1]
RUN = ["--global-batch-size", 16, "--save-interval", SAVED, "--moe-grouped-gemm", "--moe-permute-fusion"]
SEVERAL = ["--rollout-updates-per-batch", 2]
SELECTED = ["--rollout-group-filter", "FILTER", "--rollout-oversampling", 1.5]
CASES = {
    "one update, filtered, oversampled, server killed too": ("train:7", True, SELECTED),
    "several updates": ("collect:7", False, SEVERAL),
    "ahead, several updates, filtered, oversampled": (
        "train:7",
        True,
        ["--rollout-max-lag", 2, *SEVERAL, *SELECTED, "--eval-interval", 6],
    ),
}
"""Name -> when it is killed, whether the server is killed too, flags. Ahead nothing is evaluated when the
checkpoint is saved, as groups that are running end while the evaluation is waited for.
"""
CHANCE = {"rollout/by_fate/cut_length_mean", "rollout/by_fate/surplus_length_mean"}
"""Of samples beyond a step's own: which of them had ended when they were aborted is for the clock to say."""


def server_of(model, folder, *more):
    return PreloadedServer(
        model,
        engine="vllm",
        dtype="float32",
        log_path=folder / "server.log",
        extra_arguments=[*vllm_arguments(), *more],
        environment=environment("vllm"),
    )


def run(folder, name, url, model, *flags, kill="none:0", tokens=8, steps=STEPS, PAUSE_S="0"):
    """The ended run of two replicas, which goes on where one of this name was."""
    out = folder / name
    out.mkdir(exist_ok=True)
    writes = [
        "--rollout-save-trajectories",
        out / "samples",
        "--rollout-trace",
        out / "traces",
        "--expert-statistics",
        "--rollout-eval-prompts",
        folder / "prompts.jsonl",
        "--eval-interval",
        2,
        "--rollout-save-hf",
        out / "hf",
    ]
    flags = [f"{folder / 'filter.py'}:passes" if flag == "FILTER" else flag for flag in flags]
    return launch(
        folder,
        name,
        model,
        url,
        SCRIPT,
        *RUN,
        "--train-iters",
        steps,
        *writes,
        *flags,
        processes=2,
        tokens=tokens,
        KILL_AT=kill,
        PAUSE_S=PAUSE_S,
        SEEDS=str(out / "seeds"),
    )


def groups_of(folder):
    """Step -> the samples of its batch in their order: (group, sample, ids)."""
    found = {}
    for path in sorted((folder / "samples").glob("*.parquet")):
        table = pq.read_table(path, columns=["group", "sample_index", "output_ids"]).to_pylist()
        found.setdefault(int(path.name[5:11]), []).extend(tuple(row.values()) for row in table)
    return found


def seeds_of(folder):
    """(group, sample, tokens before) -> its seeds."""
    found = {}
    for line in (folder / "seeds").read_text().splitlines():
        *place, seed = map(int, line.split())
        found.setdefault(tuple(place), set()).add(seed)
    return found


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module", params=CASES)
def runs(request, tiny_moe_dir, tmp_path_factory):
    """(case, folder with the runs "whole" and "killed")."""
    if gpu_available():
        pytest.skip("make setup-vllm installs vLLM without a GPU only")
    kill, kills_server, flags = CASES[request.param]
    folder, model = tmp_path_factory.mktemp("samples"), tiny_moe_dir
    flags, pause = [*flags, *ONE_AT_A_TIME], "0.1" if "ahead" in request.param else "0"
    (folder / "filter.py").write_text(FILTER)
    write_data(folder)
    with server_of(model, folder, "--max-num-seqs", "1") as server:
        whole = run(folder, "whole", server.url, model, *flags, PAUSE_S=pause)
        assert whole.returncode == 0, whole.stderr[-4000:]
        killed = run(folder, "killed", server.url, model, *flags, kill=kill, PAUSE_S=pause)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
        if kills_server:
            os.killpg(server.pid, signal.SIGKILL)
            server.stop()
            server.start().wait_ready()
        load = ["--load", folder / "killed/checkpoints"]
        resumed = run(folder, "killed", server.url, model, *flags, *load, PAUSE_S=pause)
        assert resumed.returncode == 0, resumed.stderr[-4000:]
    return request.param, folder


@long
@drill(
    "SIGKILL of all ranks and torchrun in the middle of a step, then --load",
    promised="samples of a whole run",
)
def test_samples_when_all_is_killed_and_loaded_then_those_of_a_whole_run_each_trained_and_written_once(
    runs, seen
):
    case, folder = runs
    whole, resumed = groups_of(folder / "whole"), groups_of(folder / "killed")
    ahead = "ahead" in case
    assert list(resumed) == list(whole) == list(range(1, STEPS + 1, 2 if "several" in case else 1))
    for step, samples in whole.items():  # ahead, responses have other lengths, by which replicas share them
        one, other = ([sample[:2] for sample in each] for each in (resumed[step], samples))
        assert one == other or (ahead and sorted(one) == sorted(other)), step
    trained = Counter(one[0] for samples in resumed.values() for one in samples)
    assert set(trained.values()) == {GROUP}
    if "filtered" in case:
        passing = {number for number in range(max(trained) + 1) if number % 5 != 3}
        assert set(trained) == passing and len(trained) == 32
    assert_same_seeds(folder)
    logs = [folder / name / "log" for name in ("whole", "killed")]
    for name in ("metrics.jsonl", "experts.jsonl"):  # of several updates each has experts once
        assert [row["step"] for row in rows_of(logs[1] / name)] == [
            row["step"] for row in rows_of(logs[0] / name)
        ]
    rows = rows_of(logs[1] / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(("eval/reward" in row) == (row["step"] % (6 if ahead else 2) == 0) for row in rows)
    assert sorted(os.listdir(folder / "killed/traces")) == sorted(os.listdir(folder / "whole/traces"))
    if ahead:
        cursor = json.loads((folder / f"killed/checkpoints/iter_{SAVED:07d}/rollout_cursor.json").read_text())
        states = {name: sum(len(one[name]) for one in cursor["replicas"]) for name in ("waiting", "running")}
        assert all(states.values()), states
        seen(
            f"the same groups a step; at the checkpoint {states['waiting']} waited and {states['running']} "
            "ran"
        )
        return
    assert resumed == whole
    differing = {
        (step["step"], name): (step.get(name), expected.get(name))
        for step, expected in zip(
            *(untimed_steps(folder / name) for name in ("killed", "whole")), strict=True
        )
        for name in {*step, *expected} - CHANCE
        if step.get(name) != expected.get(name)
    }
    assert differing == {}
    one, other = (HFCheckpoint(folder / name / f"hf/iter_{STEPS:07d}") for name in ("whole", "killed"))
    assert all(torch.equal(one.tensor(name), other.tensor(name)) for name in one.names)
    seen("tokens, metrics and weights bit for bit")


def assert_same_seeds(folder):
    """Both attempts ask for each sample with one seed, and it is that of the run that never ended."""
    known, asked = seeds_of(folder / "whole"), seeds_of(folder / "killed")
    assert all(len(found) == 1 for found in asked.values())
    common = set(known) & set(asked)
    assert len(common) > 128 and {known[place] == asked[place] for place in common} == {True}


@long
@drill(
    "a run and one from its checkpoint, with samples in batches",
    promised="log-probs of equal prefixes to 1e-5",
)
def test_samples_when_requests_share_batches_then_log_probs_of_equal_prefixes_are_equal_to_1e_5(
    tiny_moe_dir, tmp_path, seen
):
    if gpu_available():
        pytest.skip("make setup-vllm installs vLLM without a GPU only")
    write_data(tmp_path)
    flags = {"tokens": 24, "steps": SAVED + 1}
    with server_of(tiny_moe_dir, tmp_path) as server:
        whole = run(tmp_path, "whole", server.url, tiny_moe_dir, **flags)
        load = ["--load", tmp_path / "whole/checkpoints", "--ckpt-step", SAVED]
        others = ["--rollout-max-concurrency", 3]  # other requests share each batch
        resumed = run(tmp_path, "resumed", server.url, tiny_moe_dir, *load, *others, **flags)
        assert (whole.returncode, resumed.returncode) == (0, 0), resumed.stderr[-4000:]
    one, other = (samples_of(tmp_path / name, SAVED + 1) for name in ("whole", "resumed"))
    assert list(one) == list(other) and len(one) == 16
    worst, same, tokens = 0.0, 0, 0
    for place, (ids, logprobs) in one.items():
        others, their = other[place]
        prefix = len(os.path.commonprefix([ids, others]))
        same, tokens = same + prefix, tokens + max(len(ids), len(others))
        pairs = zip(logprobs[:prefix], their[:prefix], strict=True)
        worst = max([worst, *(abs(one - their) for one, their in pairs)])
    assert worst < 1e-5 and same > 0.5 * tokens
    seen(f"{1 - same / tokens:.2%} of {tokens} tokens differ; log-probs of the others by {worst:.1e} at most")


def samples_of(folder, step):
    """(group, sample) -> ids and log-probs."""
    paths = sorted((folder / "samples").glob(f"step_{step:06d}_*.parquet"))
    columns = ["group", "sample_index", "output_ids", "rollout_logprobs"]
    rows = [row for path in paths for row in pq.read_table(path, columns=columns).to_pylist()]
    return {(row["group"], row["sample_index"]): (row["output_ids"], row["rollout_logprobs"]) for row in rows}
