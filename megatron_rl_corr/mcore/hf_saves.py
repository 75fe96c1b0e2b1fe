"""--rollout-save-hf: the policy as Hugging Face folders, while it is trained."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.files import refuse_link
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.hf_folder import UnfinishedFolder
from megatron_rl_corr.reduce.failure import all_reduce_failure, all_reduce_first_rank
from megatron_rl_corr.weight_sync.export import StageExporter, write_stage


@dataclass(frozen=True)
class HFSaves:
    """Writes FOLDER/iter_0000040 and so on, each a model that transformers and servers load."""

    folder: Path | None
    """One that all ranks share; None: nothing is written."""
    every: int | None
    """Steps from one to the next; None: after the last step alone."""
    last: int
    """The run's last step."""
    source: Path
    """The model that training began with."""
    exporter: StageExporter

    @classmethod
    def of(cls, options: RunConfig, last: int, exporter: StageExporter) -> HFSaves:
        """As the flags have it. last: the run's last step."""
        folder = None if options.save_hf is None else Path(options.save_hf)
        return cls(folder, options.save_hf_interval, last, Path(options.hf_checkpoint), exporter)

    def all_reduce_end_step(self, step: int, model: list, optimizer: Any) -> None:
        """Write the weights if it is time; every rank calls it.

        Then three collectives beside those that gather the weights.

        Args:
            step: steps trained so far.
            model: this rank's chunks.
            optimizer: Megatron's.

        Raises:
            OSError: on a rank that can't write, or where the folder is another's.
            ValueError: on rank 0, where a tensor of the model is not there.
            PeerFailure: then, on the other ranks.
        """
        due = step == self.last or (self.every is not None and step % self.every == 0)
        if self.folder is None or not due:
            return
        place = self.folder / f"iter_{step:07d}"
        folder = UnfinishedFolder(place, {"step": step})
        all_reduce_first_rank(lambda: self._begin(folder, place))
        with compat.gathered_parameters(model, optimizer):
            error = write_stage(folder.path, self.exporter)
        all_reduce_failure(None if error is None else self._named(error))
        all_reduce_first_rank(lambda: self._finish(folder))
        if dist.get_rank() == 0:
            print(f"[rollout] the policy after step {step}, for Hugging Face: {folder.final}", flush=True)

    def _begin(self, folder: UnfinishedFolder, place: Path) -> None:
        """Make the unfinished folder; OSError where a link is in its place, as it may lead out of
        --rollout-save-hf.
        """
        try:
            refuse_link(place)
            folder.begin()
        except OSError as error:
            raise self._named(error) from error

    def _finish(self, folder: UnfinishedFolder) -> None:
        try:
            folder.finish(HFCheckpoint(self.source))
        except OSError as error:
            raise self._named(error) from error

    def _named(self, error: OSError) -> OSError:
        """The same with the flag, as when the disk is full."""
        return OSError(f"--rollout-save-hf {self.folder}: {error}")


def check_folder(options: RunConfig, args: argparse.Namespace) -> None:
    """ValueError for a --rollout-save-hf where another's folders would be replaced.

    Args:
        options: the plugin's flags.
        args: Megatron's.
    """
    if options.save_hf is None:
        return
    folder = Path(options.save_hf)
    for flag, other in (("--save", args.save), ("--load", args.load)):
        if other and Path(other).resolve() == folder.resolve():
            raise ValueError(
                f"--rollout-save-hf {folder} is the folder of {flag}, where Megatron's checkpoints have the "
                "same names (iter_0000040), and one would be removed for the other; name another folder"
            )
    if Path(options.hf_checkpoint).resolve().parent == folder.resolve():
        raise ValueError(
            f"--rollout-save-hf {folder} holds --rollout-hf-checkpoint {options.hf_checkpoint}, which a step "
            "of the same number would replace; name another folder"
        )
