"""A run's own command line as a trial: learning rate 0, a few steps, nothing saved, each in a folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl_corr.files import open_to_append
from megatron_rl_corr.models.architectures import num_experts
from megatron_rl_corr.models.hf_checkpoint import read_model

OWN, REPLAYED = "own", "replayed"
"""Trials: the trainer's routers choose the experts, or take the servers'."""
LEFT_OUT = (
    "--eval-interval",
    "--eval-iters",
    "--exit-duration-in-mins",
    "--exit-interval",
    "--lr",
    "--lr-decay-iters",
    "--lr-decay-samples",
    "--lr-warmup-fraction",
    "--lr-warmup-iters",
    "--lr-warmup-samples",
    "--min-lr",
    "--moe-router-bias-update-rate",
    "--rollout-epochs-per-batch",
    "--rollout-ledger-interval",
    "--rollout-log-dir",
    "--rollout-max-lag",
    "--rollout-pause-mode",
    "--rollout-stale-samples",
    "--rollout-updates-per-batch",
    "--router-replay",
    "--router-replay-effect-every",
    "--router-replay-min-agreement",
    "--save",
    "--save-interval",
    "--train-iters",
    "--train-samples",
    "--weight-decay",
)
LEFT_OUT_KINDS = ("--rollout-eval-", "--rollout-save-")
"""Flags of the run that a trial takes out, with their values; and how some of them begin."""
OURS = "megatron_rl_corr: "
"""What a message of this package begins with."""
LAST_LINES = 12
"""Lines of a trial that failed that are shown, at most."""


def trials(words: Sequence[str]) -> tuple[str, ...]:
    """The trials of a model: with experts both, without them the first.

    Args:
        words: the run's command line.

    Raises:
        ValueError: it names no servers or no checkpoint, or replays samples.
    """
    for flag in ("--rollout-url", "--rollout-hf-checkpoint"):
        if flag not in words or words[-1] == flag:
            raise ValueError(
                f"the command has no {flag}: give the run's whole command behind --, as `megatron-rl-corr "
                "accept --out DIR -- torchrun ... -m megatron_rl_corr.launch pretrain_gpt.py ...`"
            )
    if "--rollout-replay" in words:
        raise ValueError("--rollout-replay: a trial needs servers that sample; leave it out")
    config = read_model(words[words.index("--rollout-hf-checkpoint") + 1])
    return (OWN,) if num_experts(config) is None else (OWN, REPLAYED)


def trial_command(
    words: Sequence[str], trial: str, folder: Path, *, steps: int, has_experts: bool
) -> list[str]:
    """The run's command as a trial.

    Args:
        words: the run's.
        trial: OWN or REPLAYED.
        folder: of the trial's metrics.
        steps: so many.
        has_experts: the model has some, so servers are asked which they took.
    """
    kept, dropped = [], False
    for word in words:
        named = word.partition("=")[0] in LEFT_OUT or word.startswith(LEFT_OUT_KINDS)
        dropped = named or (dropped and not word.startswith("--"))
        kept += [] if dropped else [word]
    more = ["--lr", "0", "--min-lr", "0", "--weight-decay", "0", "--train-iters", str(steps)]
    more += ["--eval-iters", "0", "--eval-interval", str(steps)]
    more += ["--rollout-log-dir", str(folder), "--rollout-ledger-interval", str(max(1, steps // 4))]
    if has_experts:
        more += ["--router-replay", "R3" if trial == REPLAYED else "compare"]
    if "--moe-router-enable-expert-bias" in words:
        more += ["--moe-router-bias-update-rate", "0"]
    return [*kept, *more]


def run_trial(command: Sequence[str], log: Path) -> tuple[int, list[str]]:
    """Run a trial to its end: its status, and what it said last: our own messages, if there are any, as
    torchrun ends with many lines. What it prints goes on, and into a file.
    """
    last: list[str] = []
    said: list[str] = []
    with (
        open_to_append(log, encoding="utf-8") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sys.stdout.write(line)
                file.write(line)
                last = [*last[1 - LAST_LINES :], line.rstrip()]
                if line.startswith(OURS):
                    said = [*said[1 - LAST_LINES :], line.rstrip()]
        except BaseException:
            process.terminate()  # as torchrun's ranks end with it
            raise
    return process.returncode, said or last


def read_rows(folder: Path) -> Iterator[dict]:
    """The steps that a trial has logged."""
    path = folder / "metrics.jsonl"
    if path.is_file():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())
