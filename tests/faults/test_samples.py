"""Everything of a run is killed in the middle of a step and started with --load: its samples are those of a whole run.

The server is a vLLM server that runs one request at a time, so that a response depends on its weights, its prompt and
its seed alone. The client has one in flight a replica, so that groups are done in the order in which they are begun.
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
STEPS, SAVED, KILLED = 8, 4, 7
GROUP = 4
FILTER = """
def passes(prompt, group):
    return group.number % 5 != 3
"""
ONE_AT_A_TIME = ["--rollout-max-concurrency", 1]
RUN = ["--global-batch-size", 16, "--train-iters", STEPS, "--save-interval", SAVED, "--moe-grouped-gemm",
       "--moe-permute-fusion"]  # fmt: skip
SEVERAL = ["--rollout-updates-per-batch", 2]
CASES = {
    "one update": ("train", False, []),
    "filtered, oversampled, server killed too": ("train", True, ["filter", "--rollout-oversampling", 1.5]),
    "several updates": ("collect", False, SEVERAL),
    "ahead": ("collect", False, ["--rollout-max-lag", 2]),
    "ahead, several updates, filtered, oversampled": (
        "train", True, ["--rollout-max-lag", 2, *SEVERAL, "filter", "--rollout-oversampling", 1.5],
    ),
}  # fmt: skip
"""Name -> when it is killed, whether the server is killed too, flags."""


def server_of(model, folder, *more):
    return PreloadedServer(
        model, engine="vllm", dtype="float32", log_path=folder / "server.log",
        extra_arguments=[*vllm_arguments(), *more], environment=environment("vllm"),
    )  # fmt: skip


def run(folder, name, url, model, *flags, kill="none:0"):
    """The ended run of two replicas. Folder/out has what it was told to write: of one name, in the same place."""
    flags = [str(folder / "filter.py:passes") if flag == "filter" else flag for flag in flags]
    if str(folder / "filter.py:passes") in flags:
        flags.insert(flags.index(str(folder / "filter.py:passes")), "--rollout-group-filter")
    out = folder / name
    out.mkdir(exist_ok=True)
    writes = ["--rollout-save-trajectories", out / "samples", "--rollout-trace", out / "traces",
              "--expert-statistics", "--rollout-eval-prompts", folder / "prompts.jsonl", "--eval-interval", 2,
              "--rollout-save-hf", out / "hf"]  # fmt: skip
    return launch(
        folder, name, model, url, SCRIPT, *RUN, *writes, *flags, processes=2, KILL_AT=kill,
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
    moment, kills_server, flags = CASES[request.param]
    folder, model = tmp_path_factory.mktemp("samples"), tiny_moe_dir
    flags = [*flags, *ONE_AT_A_TIME]
    (folder / "filter.py").write_text(FILTER)
    write_data(folder)
    with server_of(model, folder, "--max-num-seqs", "1") as server:
        whole = run(folder, "whole", server.url, model, *flags)
        assert whole.returncode == 0, whole.stderr[-4000:]
        killed = run(folder, "killed", server.url, model, *flags, kill=f"{moment}:{KILLED}")
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
        if kills_server:
            os.killpg(server.pid, signal.SIGKILL)
            server.stop()
            server.start().wait_ready()
        resumed = run(folder, "killed", server.url, model, *flags, "--load", folder / "killed/checkpoints")
        assert resumed.returncode == 0, resumed.stderr[-4000:]
    return request.param, folder


@long
@drill("SIGKILL of all ranks and torchrun in the middle of a step, then --load", promised="no sample lost or doubled")
def test_samples_when_all_is_killed_and_loaded_then_those_of_a_whole_run(runs, seen):
    case, folder = runs
    whole, resumed = groups_of(folder / "whole"), groups_of(folder / "killed")
    updates = 2 if "several" in case else 1
    assert list(resumed) == list(whole) == list(range(1, STEPS + 1, updates))
    for step, samples in whole.items():
        assert [one[:2] for one in resumed[step]] == [one[:2] for one in samples], step
    trained = Counter(one[0] for samples in resumed.values() for one in samples)
    assert set(trained.values()) == {GROUP}
    known = seeds_of(folder / "whole")
    for place, seed in seeds_of(folder / "killed").items():
        assert len(seed) == 1 and known.get(place, seed) == seed
    logs = [folder / name / "log" for name in ("whole", "killed")]
    for name in ("metrics.jsonl", "experts.jsonl"):
        assert [row["step"] for row in rows_of(logs[1] / name)] == [row["step"] for row in rows_of(logs[0] / name)]
    assert [row["step"] for row in rows_of(logs[1] / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert sorted(os.listdir(folder / "killed/traces")) == sorted(os.listdir(folder / "whole/traces"))
    if "ahead" not in case:
        assert resumed == whole
        assert untimed_steps(folder / "killed") == untimed_steps(folder / "whole")
        one, other = (HFCheckpoint(folder / name / f"hf/iter_{STEPS:07d}") for name in ("whole", "killed"))
        assert all(torch.equal(one.tensor(name), other.tensor(name)) for name in one.names)
