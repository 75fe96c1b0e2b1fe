"""Runs of two ranks of which one fails in a planted place, under the launcher's own code, without a
torchrun to end it.

failing_ranks_worker.py MODEL_DIR SERVER_URL FOLDER CASE ...  prints RESULT and a line of JSON: of
each case, each rank's exit status, its seconds from the planted failure to its end, and what it
printed. Each rank is a fork of this process, which has imported Megatron; the store is this
process's, as it is torchrun's.
"""

import errno
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import megatron.training
import torch
from torch.distributed import TCPStore

from megatron_rl_corr import launch, plugin
from megatron_rl_corr.mcore.batch import server_collector as collection
from megatron_rl_corr.mcore.batch import slices
from megatron_rl_corr.mcore.loss import CorrectedLoss
from megatron_rl_corr.observability.run_log import RunLog
from megatron_rl_corr.weight_sync.export import StageExporter
from tests.matrix.patched import cpu_flags
from tools.local_server import free_port

SCRIPT = Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"
RANKS, FAILING = 2, 1
LONGEST_S = 150.0
PLACES = {
    "collection": (collection.Collector, "collect", KeyError("no such counter")),
    "slices": (slices, "scatter_slices", MemoryError("no room for a slice")),
    "forward": (megatron.core.models.gpt.GPTModel, "forward", ValueError("the stage is broken")),
    "loss": (CorrectedLoss, "__call__", RuntimeError("the loss is broken")),
    "report": (RunLog, "write", OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")),
    "push": (StageExporter, "units", KeyError("no such parameter")),
}


def plant(case, rank, folder):
    holder, name, error = PLACES[case]

    def fails(*args, **kwargs):
        (folder / "failed_at").write_text(str(time.time()))
        raise error

    if rank == FAILING:
        setattr(holder, name, fails)
    elif case == "report":  # the other one waits in what nobody's end interrupts, as a kernel of NCCL does
        collect = collection.Collector.collect

        def collect_once(self, step):
            if step > 0:
                time.sleep(600)
            return collect(self, step)

        collection.Collector.collect = collect_once


def run(case, rank, port, model, url, folder):
    """In a fork: what torchrun's child does."""
    output = os.open(folder / f"rank_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(case != "forward"),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": case,
    }
    plant(case, rank, folder)
    sys.argv = [str(SCRIPT), *words(model, url, folder)]
    if case == "push":  # as a patched Megatron does, with no launcher
        plugin.load()
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return 0
    return launch.main(sys.argv.copy())


def words(model, url, folder):
    """What a user's command line holds, and the files that it names."""
    (folder / "reward.py").write_text(
        "def reward(prompt, output_ids, finish_reason):\n    return output_ids[0] % 3\n"
    )
    (folder / "prompts.jsonl").write_text("".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 8)))
    given = [
        *cpu_flags(model),
        "--pipeline-model-parallel-size",
        2,
        "--rollout-url",
        url,
        "--rollout-hf-checkpoint",
        model,
        "--rollout-prompts",
        folder / "prompts.jsonl",
        "--rollout-reward-function",
        f"{folder / 'reward.py'}:reward",
        "--rollout-group-size",
        4,
        "--rollout-max-new-tokens",
        8,
        "--rollout-correction-preset",
        "decoupled_token_is",
        "--rollout-server-check",
        "off",
        "--rollout-log-dir",
        folder / "log",
    ]
    return list(map(str, given))


def forked(case, rank, *arguments):
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        status = run(case, rank, *arguments)
    except BaseException:  # noqa: BLE001  the parent must not go on in the child
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def results_of(case, model, url, folder):
    folder.mkdir()
    # Without torchrun's store rank 0 has one itself, which ends with it.
    store = None if case == "forward" else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free_port() if store is None else store.port
    pids = [forked(case, rank, port, model, url, folder) for rank in range(RANKS)]
    ended, deadline = {}, time.time() + LONGEST_S
    while len(ended) < RANKS and time.time() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ended[pid] = os.waitstatus_to_exitcode(status), time.time()
        time.sleep(0.02)
    for pid in set(pids) - set(ended):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ended[pid] = None, time.time()
    failed_at = folder / "failed_at"
    at = float(failed_at.read_text()) if failed_at.exists() else 0.0
    return [
        {
            "status": ended[pid][0],
            "seconds": ended[pid][1] - at,
            "printed": (folder / f"rank_{rank}.txt").read_text(),
        }
        for rank, pid in enumerate(pids)
    ]


def under_torchrun(case, model, url, folder):
    """The same by the command line that users type: status and output of all, seconds from the
    failure to the end.
    """
    folder.mkdir()
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(RANKS),
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(free_port()),
            "-m",
            "megatron_rl_corr.launch",
            __file__,
            *words(model, url, folder),
        ],
        env=os.environ | {"PLANTED": case, "PLANTED_IN": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST_S,
    )
    seconds = time.time() - float((folder / "failed_at").read_text())
    return {"status": done.returncode, "seconds": seconds, "printed": done.stdout}


if __name__ == "__main__" and "PLANTED" in os.environ:  # as the script of a torchrun
    plant(os.environ["PLANTED"], int(os.environ["RANK"]), Path(os.environ["PLANTED_IN"]))
    runpy.run_path(str(SCRIPT), run_name="__main__")
elif __name__ == "__main__":
    model, url, folder, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    gc.freeze()  # as in tests/preloaded.py
    found = {case: results_of(case, Path(model), url, Path(folder) / case) for case in cases}
    found["torchrun"] = under_torchrun("report", Path(model), url, Path(folder) / "torchrun")
    print("RESULT " + json.dumps(found), flush=True)
