"""A run's own command line as a trial: learning rate 0, a few steps, nothing saved, each in a folder."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl_corr.files import open_to_append
from megatron_rl_corr.models.architectures import num_experts
from megatron_rl_corr.models.hf_checkpoint import read_model
from megatron_rl_corr.observability.metrics_file import FILE_NAME, read_metrics
from megatron_rl_corr.tables import visible

OWN, REPLAYED, EXPLAINED = "own", "replayed", "explained"
"""Trials: the trainer's routers choose the experts, or take the servers'; after these, where one is not
accepted, one step that no check ends, whose ledger tries wrong layouts of weights too.
"""
LEFT_OUT = re.compile(
    # the learning rate, and how long, from what and to where the run goes
    "--lr|--lr-.*|--min-lr|--decoupled-.*|--weight-decay|--train-iters|--train-samples|--rampup-batch-size"
    "|--moe-router-bias-update-rate|--load|--ckpt-step|--finetune|--no-load-.*|--pretrained-checkpoint"
    "|--override-.*-scheduler|--use-checkpoint-.*|--exit-.*|--eval-.*|--save|--save-.*|--no-save-.*"
    "|--async-save|--persistent-save-.*|--non-persistent-.*|--adlr-.*|--log-progress|--tensorboard-.*"
    "|--wandb-.*|--one-logger-.*"
    # several updates of a batch, what needs them, samples of older weights, and what is written or evaluated
    "|--rollout-(?:updates|epochs)-per-batch|--rollout-clip-.*|--rollout-max-kl-to-old|--rollout-max-lag"
    "|--rollout-stale-samples|--rollout-pause-mode|--rollout-(?:eval|save)-.*|--rollout-log-dir"
    "|--rollout-events|--rollout-trace.*|--rollout-metrics-.*|--rollout-ledger-(?:interval|layouts)"
    "|--rollout-peak-memory|--router-replay.*"
)
"""Flags of the run that a trial takes out, with their values."""
ENDS = re.compile("--rollout-probe-push|--rollout-max-probe-log-ratio|--rollout-max-first-step-kl")
"""Those that end a run whose trainer computes otherwise than its servers, which EXPLAINED goes on with."""
CHECKPOINT = "--rollout-hf-checkpoint"
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
    for flag in ("--rollout-url", CHECKPOINT):
        if value_of(flag, words) is None:
            raise ValueError(
                f"the command has no {flag}: give the run's whole command behind --, as `megatron-rl-corr "
                "accept --out DIR -- torchrun ... -m megatron_rl_corr.launch pretrain_gpt.py ...`"
            )
    if value_of("--rollout-replay", words) is not None:
        raise ValueError("--rollout-replay: a trial needs servers that sample; leave it out")
    config = read_model(str(value_of(CHECKPOINT, words)))
    return (OWN,) if num_experts(config) is None else (OWN, REPLAYED)


def value_of(flag: str, words: Sequence[str]) -> str | None:
    """The first value of a flag in a command line, behind it or behind its =; None: there is none."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag:
            return after or None
    return None


def values_of(flag: str, words: Sequence[str]) -> list[str]:
    """All values of a flag, behind it up to the next flag, or behind its =."""
    found, is_open = [], False
    for word in words:
        if word.startswith("--"):
            name, joined, value = word.partition("=")
            is_open = name == flag and not joined
            found += [value] if name == flag and joined else []
        elif is_open:
            found.append(word)
    return found


def trial_command(
    words: Sequence[str], trial: str, folder: Path, *, steps: int, has_experts: bool
) -> list[str]:
    """The run's command as a trial.

    Args:
        words: the run's.
        trial: OWN, REPLAYED or EXPLAINED.
        folder: of the trial's metrics.
        steps: so many; of EXPLAINED one.
        has_experts: the model has some, so servers are asked which they took.
    """
    explained = trial == EXPLAINED
    kept, dropped, steps = [], False, 1 if explained else steps
    for word in words:
        flag, joined, _ = word.partition("=")
        named = bool(LEFT_OUT.fullmatch(flag) or (explained and ENDS.fullmatch(flag)))
        values = dropped and not word.startswith("--")
        kept += [] if named or values else [word]
        dropped = values or (named and not joined)
    more = ["--lr", "0", "--min-lr", "0", "--weight-decay", "0", "--train-iters", str(steps)]
    more += ["--eval-iters", "0", "--eval-interval", str(steps)]
    more += ["--rollout-log-dir", str(folder.resolve()), "--rollout-ledger-interval", str(max(1, steps // 4))]
    more += ["--rollout-peak-memory"]
    if explained:
        more += ["--rollout-probe-push", "off", "--rollout-max-first-step-kl", "inf"]
        more += ["--rollout-ledger-layouts", "on"]
    if has_experts:
        more += ["--router-replay", "compare" if trial == OWN else "R3"]
        more += ["--router-replay-min-agreement", "-1"] if explained else []
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
            for line in map(visible, process.stdout):
                sys.stdout.write(line)
                file.write(line)
                last = [*last[1 - LAST_LINES :], line.rstrip()]
                if line.startswith(OURS):
                    said = [*said[1 - LAST_LINES :], line.rstrip()]
        except BaseException:
            process.terminate()  # torchrun ends its ranks
            process.wait()
            raise
    return process.returncode, said or last


def read_rows(folder: Path) -> list[dict]:
    """The steps that a trial has logged."""
    path = folder / FILE_NAME
    return read_metrics(path) if path.is_file() else []
