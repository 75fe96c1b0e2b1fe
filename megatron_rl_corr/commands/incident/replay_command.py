"""The trainer's command that does a step again, made of the one that did it."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl_corr.commands.incident.recorded_run import Launch
from megatron_rl_corr.commands.incident.start_point import StartPoint
from megatron_rl_corr.config.fields import options_of
from megatron_rl_corr.config.flags import add_flags, flags_by_field, given_flags
from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.config.run import RunConfig, idle_in_replay

BUNDLE = "$BUNDLE"
"""Stands for the bundle's folder in words of the command."""
REPLAYED = f"{BUNDLE}.replayed"
"""Where the replay writes."""
_OWN_PLACES = (
    "replay",
    "log_dir",
    "save_trajectories",
    "save_hf",
    "save_hf_interval",
    "trace",
    "events",
    "metrics_port",
    "metrics_address",
    "max_first_step_kl",
)
"""Options that name where the run wrote, or that the replay gives itself."""
_MEGATRONS = re.compile(
    "--load|--ckpt-step|--save|--save-interval|--save-retain-interval|--persistent-save-interval|--exit-interval|--exit-duration-in-mins|--exit-on-missing-checkpoint|--tensorboard-dir|--adlr-autoresume(-interval)?|--use-persistent-ckpt-worker|--async-save|--(wandb|one-logger|non-persistent|inprocess)-[a-z-]+"
)
"""Flags of Megatron that say where a run begins, ends, saves and reports."""
_OF_ITS_LOAD = ("--no-load-optim", "--no-load-rng", "--pretrained-checkpoint")
"""Flags that acted on what the run itself was begun with."""
_SAFE = re.compile(r"[\w./:,=+-]+")


@dataclass(frozen=True)
class ReplayCommand:
    """A command that does a step again.

    Example: ReplayCommand("pretrain_gpt.py", ("--lr", "1e-6", "--rollout-replay", "$BUNDLE/samples"), True,
    "/work", 8, 8, {"OMP_NUM_THREADS": "1"}).
    """

    script: str
    arguments: tuple[str, ...]
    launcher: bool
    folder: str
    processes: int
    processes_of_host: int
    environment: Mapping[str, str]

    def as_text(self, bundle: Path) -> str:
        """For a shell. bundle: the folder, where it is now."""
        hosts = -(-self.processes // self.processes_of_host)
        ranks = ["--nproc_per_node", str(self.processes_of_host)]
        if hosts > 1:
            ranks += ["--nnodes", str(hosts)]
        launcher = ["-m", "megatron_rl_corr.launch"] if self.launcher else []
        variables = [f"export {shlex.quote(f'{name}={value}')}" for name, value in self.environment.items()]
        start = shlex.join(["torchrun", *ranks, *launcher, self.script])
        return "\n".join(
            [
                f"BUNDLE={shlex.quote(str(bundle))}",
                *variables,
                f"cd {shlex.quote(self.folder)}",
                " \\\n    ".join([start, *_lines(self.arguments)]),
            ]
        )

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return vars(self) | {"arguments": list(self.arguments), "environment": dict(self.environment)}


def make_command(
    launch: Launch,
    start: StartPoint,
    last: int,
    *,
    load: str | None,
    changes: Mapping[str, Sequence[str] | None],
) -> ReplayCommand:
    """The command of a launch, turned into a replay.

    Args:
        launch: that made the step.
        start: where the replay begins.
        last: step that it ends behind.
        load: what --load names; None at iteration 0.
        changes: option -> words in the place of its flag and values; None: drop it.
    """
    given, words = _given(launch.arguments), launch.arguments
    idle = idle_in_replay(
        scored=bool(given.get("reference_urls") or given.get("teacher_urls")),
        masked=given.get("truncated_samples") == "mask",
    )
    flags = flags_by_field()
    dropped = {flags[name] for name in (*idle, *_OWN_PLACES, *changes) if name in flags}
    own_load = start.began_here or start.iteration == 0
    words = _without(words, lambda flag: flag in dropped or _MEGATRONS.fullmatch(flag) is not None)
    words = _without(words, lambda flag: flag in _OF_ITS_LOAD and not own_load)
    words += [word for change in changes.values() for word in change or ()]
    if load is not None:
        words += ["--load", load, "--ckpt-step", str(start.iteration)]
    words += ["--save", f"{REPLAYED}/checkpoints", "--save-interval", str(last), "--exit-interval", str(last)]
    words += [flags["replay"], f"{BUNDLE}/samples", flags["max_first_step_kl"], "inf"]
    words += [flags["save_trajectories"], f"{REPLAYED}/samples", flags["log_dir"], f"{REPLAYED}/log"]
    record = launch.record
    return ReplayCommand(
        record["script"],
        tuple(words),
        record["launcher"],
        record["folder"],
        record["processes"],
        record["processes_of_host"],
        record["environment"],
    )


def given_options(launch: Launch) -> dict[str, Any]:
    """Our options that the launch's command line gives, by name."""
    return _given(launch.arguments)


def needing(option: str) -> tuple[str, ...]:
    """Options that have an effect only with this one."""
    return tuple(
        name
        for name, one in options_of(RunConfig).items()
        if one.needs is not None and any(need.partition("=")[0] == option for need in one.needs.split(" or "))
    )


def _given(arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    return given_flags(add_flags(parser), arguments, Problems()).values


def _without(words: Sequence[str], is_dropped) -> list[str]:
    """Without the flags of which is_dropped(flag) is true, and their values."""
    left, drops = [], False
    for word in words:
        if word.startswith("--"):
            drops = is_dropped(word.partition("=")[0])
        if not drops:
            left.append(word)
    return left


def _lines(words: Sequence[str]) -> list[str]:
    """A flag with its values a line, quoted for a shell."""
    lines: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(_quoted(word))
    return [" ".join(line) for line in lines]


def _quoted(word: str) -> str:
    if word.startswith(BUNDLE) and _SAFE.fullmatch(word.removeprefix(BUNDLE)):
        return f'"${{BUNDLE}}{word.removeprefix(BUNDLE)}"'
    return shlex.quote(word)
