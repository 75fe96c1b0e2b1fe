"""What a run will write, and the checkpoint that it reads, tried before a model is made."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.files import check_writable
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.checks.early_checks import naming_checkpoint, refuse_links
from megatron_rl_corr.mcore.feature import feature_classes
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint


def check_files(options: RunConfig, args: argparse.Namespace) -> None:
    """Write a file into every folder that this rank will write, and open the checkpoint's files, once a host.

    Megatron's process groups are there. The last rank's folders are tried when the command line is read, by
    `plugin.prepare`.

    Args:
        options: the plugin's flags.
        args: Megatron's.

    Raises:
        ValueError: names the flag, the folder or file, and the remedy.
    """
    problems = Problems()
    if os.environ.get("LOCAL_RANK", "0") == "0":  # hosts may have copies of their own
        for flag, folder in _checkpoints(options):
            with problems.catch(), naming_checkpoint(folder, flag):
                HFCheckpoint(folder).check_files()
    layout = compat.layout()
    sends = dist.get_rank() in (0, layout.stage_groups.sender)
    _check_folders(
        options, args, written_folders(options, args, leads=layout.is_data_leader, sends=sends), problems
    )
    problems.raise_all()


def check_files_of_all_ranks(options: RunConfig, args: argparse.Namespace) -> list[str]:
    """As `check_files`, for all ranks of a run, in a process that has no process groups.

    Returns:
        Checkpoints that have no weights yet, where a run would need them.

    Raises:
        ValueError: as `check_files`.
    """
    without, problems = [], Problems()
    for flag, folder in _checkpoints(options):
        if not any(Path(folder).glob("*.safetensors*")):
            without.append(folder)
            continue
        with problems.catch(), naming_checkpoint(folder, flag):
            HFCheckpoint(folder).check_files()
    _check_folders(options, args, written_folders(options, args, leads=True, sends=True), problems)
    problems.raise_all()
    return without


def _checkpoints(options: RunConfig) -> Iterator[tuple[str, str]]:
    return _given(
        ("--rollout-hf-checkpoint", options.hf_checkpoint),
        ("--rollout-reference-checkpoint", options.reference_checkpoint),
    )


def _check_folders(
    options: RunConfig, args: argparse.Namespace, written: Iterable[tuple[str, str]], problems: Problems
) -> None:
    for feature in feature_classes():
        with problems.catch():
            feature.check_folders(options, args)
    for flag, folder in written:
        problems.check(flag, lambda flag=flag, folder=folder: check_writable(folder, flag))
    for one in RunConfig.writes:
        if (folder := getattr(options, one.option)) is not None:
            with problems.catch():
                refuse_links(one.flag, Path(folder), one.no_links)


def written_folders(
    options: RunConfig, args: argparse.Namespace, *, leads: bool, sends: bool
) -> Iterator[tuple[str, str]]:
    """(flag, folder) of those that a rank writes.

    Args:
        options: the plugin's flags.
        args: Megatron's.
        leads: it asks for the samples of a replica.
        sends: it sends a stage's weights to the servers, or is rank 0.
    """
    ours = {"leaders": leads, "senders": sends}
    yield from _given(*((one.flag, getattr(options, one.option)) for one in RunConfig.writes if ours[one.by]))
    yield from _given(
        ("--save", args.save), ("--non-persistent-global-ckpt-dir", args.non_persistent_global_ckpt_dir)
    )


def _given(*pairs: tuple[str, str | None]) -> Iterator[tuple[str, str]]:
    yield from ((flag, folder) for flag, folder in pairs if folder is not None)
