"""Hugging Face folders of a model that Megatron's ranks hold in parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl_corr.files import refuse_link
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.hf_folder import UnfinishedFolder
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import all_reduce_failure, all_reduce_first_rank
from megatron_rl_corr.weight_sync.export import StageExporter, write_stage


@dataclass(frozen=True)
class HFFolders:
    """Writes FOLDER/iter_0000040 and so on, each a model that transformers and servers load."""

    folder: Path
    """One that all ranks share."""
    source: str
    """The folder that training began with, which has all that is no weight."""
    every: int | None
    """Steps from one to the next; None: the last step's alone."""

    def is_due(self, step: int, last: int) -> bool:
        """Whether the weights after this step are written. last: the run's last step."""
        return step == last or (self.every is not None and step % self.every == 0)

    @collective
    def write(self, step: int, model: list, optimizer: Any, exporter: StageExporter) -> None:
        """Write the weights. Three collectives beside those that gather the weights.

        Raises:
            OSError: on a rank that can't write, or where the folder is another's.
            ValueError: on rank 0, where a tensor of the model is not there.
            PeerFailure: then, on the other ranks.
        """
        place = self.folder / f"iter_{step:07d}"
        folder = UnfinishedFolder(place, {"step": step})
        all_reduce_first_rank(lambda: self._begin(folder, place))
        with compat.gathered_parameters(model, optimizer):
            error = write_stage(folder.path, exporter)
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
