"""Runs of the launcher on real ranks, with a server that gives every run the same samples."""

import asyncio
import inspect
import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl_corr.rollout import RolloutClient
from tests.forked_torchrun import forking
from tests.matrix.patched import cpu_flags, unchanged
from tests.matrix.releases import OVERLAID, release_environment
from tests.matrix.replaying_server import ReplayingServer
from tests.preloaded import run_preloaded
from tools.local_server import free_port

REWARD = """
def reward(prompt, output_ids, finish_reason):
    odd = sum(int(i) % 2 for i in output_ids)
    return {"score": odd / 8, "odd": odd}
"""


def write_data(folder):
    """What `launch` needs in its folder: a reward and prompts."""
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 12)))
    rows = [*([2, 7, n] for n in range(5)), [5] * 40]  # the last is too long, and left out
    pq.write_table(pa.table({"input_ids": rows}), folder / "prompts.parquet")


@contextmanager
def replayed(server, model, folder):
    """The server behind a door that repeats its samples; the folder has what `launch` needs."""
    write_data(folder)
    with unchanged(server, model), ReplayingServer(server.url) as door:
        yield door


def launch(
    folder,
    name,
    model,
    url,
    script,
    *flags,
    processes,
    package=None,
    **settings,
):
    """The ended run, whose log and checkpoints are in folder/name. settings: of `run_command`, and variables
    of its environment.

    package: the folder of a copy of megatron_rl_corr that runs in place of this one.
    """
    named = inspect.signature(run_command).parameters.keys() & settings.keys()
    own = {key: settings.pop(key) for key in named}
    command = run_command(folder, name, model, url, script, *flags, processes=processes, **own)
    variables = settings | run_environment()
    if package is None:
        return run_preloaded(forking(command)[1:], env=variables)
    variables["PYTHONPATH"] = f"{package}{os.pathsep}{variables['PYTHONPATH']}"
    return subprocess.run(command, env=variables, cwd=package, capture_output=True, text=True, timeout=300)


def run_environment():
    """Variables of a run without a GPU."""
    return release_environment(OVERLAID[-1]) | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_command(
    folder,
    name,
    model,
    url,
    script,
    *flags,
    processes,
    mixed=False,
    checks="off",
    tokens=8,
    torchrun=None,
    rewarded=True,
    correction=("--rollout-correction-preset", "decoupled_token_is"),
    model_words=None,
    optimizer=("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"),
):
    """The words of a run's command.

    url: of the server, or several; None: for a run that samples nothing. mixed: prompts of two sources, a
    row too long. checks: --rollout-server-check. tokens: of a response, at most. torchrun: its own flags,
    beside the processes. rewarded: by the reward in the folder. correction: flags. model_words: as
    `cpu_flags`. optimizer: flags of its kind and its checkpoints.
    """
    more = [folder / "prompts.parquet", "--rollout-prompts-weights", 2, 1] if mixed else []
    urls = [url] if isinstance(url, str) else url
    sampling = (
        []
        if url is None
        else [
            "--rollout-url",
            *urls,
            "--rollout-prompts",
            folder / "prompts.jsonl",
            *more,
            *(["--rollout-reward-function", f"{folder / 'reward.py'}:reward"] if rewarded else []),
            "--rollout-server-check",
            checks,
        ]
    )
    ours = [
        *sampling,
        "--rollout-hf-checkpoint",
        model,
        "--rollout-group-size",
        4,
        "--rollout-max-new-tokens",
        tokens,
        *correction,
        "--rollout-log-dir",
        folder / name / "log",
        "--save",
        folder / name / "checkpoints",
        *optimizer,
        "--weight-decay",
        0.1,
    ]
    torchrun = torchrun or ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(processes),
        *torchrun,
        "-m",
        "megatron_rl_corr.launch",
        *map(str, [script, *cpu_flags(model, model_words), *flags, *ours]),
    ]


def checksums(url):
    """Of the server's weights."""

    async def asked():
        async with RolloutClient([url], vocab_size=96) as client:
            [answer] = await client.weights_checker()
            return answer["ranks"][0]["checksums"]

    return asyncio.run(asked())


def untimed_steps(folder):
    """The run's steps, without what a clock says, and a server, which rounds otherwise with other
    requests beside.
    """
    steps = [json.loads(line) for line in (folder / "log/metrics.jsonl").read_text().splitlines()]
    chance = ("time/", "tokens_per_s", "rollout/probe_")
    return [{n: x for n, x in step.items() if not n.startswith(chance)} for step in steps]
