"""When a run exports: after its last step, and after every --rollout-save-hf-interval steps."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.files import refuse_link
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.feature import EndedStep, Feature, RunParts
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.hf_folder import UnfinishedFolder
from megatron_rl_corr.reduce.failure import all_reduce_failure, all_reduce_first_rank
from megatron_rl_corr.weight_sync.export import write_stage


class ExportFeature(Feature):
    """Writes FOLDER/iter_0000040 and so on, each a model that transformers and servers load."""

    def __init__(self, options: RunConfig):
        super().__init__(options)
        self.folder = Path(options.save_hf)
        """One that all ranks share."""
        self._run: RunParts | None = None

    @classmethod
    def is_asked_for(cls, options: RunConfig) -> bool:
        return options.save_hf is not None

    @classmethod
    def intervals(cls, args: argparse.Namespace) -> Mapping[str, int | None]:
        return {"--rollout-save-hf-interval": args.rollout_save_hf_interval}

    @classmethod
    def check_folders(cls, options: RunConfig, args: argparse.Namespace) -> None:
        if options.save_hf is None:
            return
        folder = Path(options.save_hf)
        for flag, other in (("--save", args.save), ("--load", args.load)):
            if other and Path(other).resolve() == folder.resolve():
                raise ValueError(
                    f"--rollout-save-hf {folder} is the folder of {flag}, where Megatron's checkpoints have "
                    "the same names (iter_0000040), and one would be removed for the other; name "
                    "another folder"
                )
        if Path(options.hf_checkpoint).resolve().parent == folder.resolve():
            raise ValueError(
                f"--rollout-save-hf {folder} holds --rollout-hf-checkpoint {options.hf_checkpoint}, which a "
                "step of the same number would replace; name another folder"
            )

    def open(self, run: RunParts) -> None:
        self._run = run

    def end_step(self, ended: EndedStep) -> None:
        """Write the weights if it is time.

        Then three collectives beside those that gather the weights.

        Raises:
            OSError: on a rank that can't write, or where the folder is another's.
            ValueError: on rank 0, where a tensor of the model is not there.
            PeerFailure: then, on the other ranks.
        """
        step, every, run = ended.number, self.options.save_hf_interval, self._run
        if step != run.settings.args.train_iters and (every is None or step % every):
            return
        place = self.folder / f"iter_{step:07d}"
        folder = UnfinishedFolder(place, {"step": step})
        all_reduce_first_rank(lambda: self._begin(folder, place))
        with compat.gathered_parameters(run.model, run.optimizer):
            error = write_stage(folder.path, run.exporter)
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
            folder.finish(HFCheckpoint(self.options.hf_checkpoint))
        except OSError as error:
            raise self._named(error) from error

    def _named(self, error: OSError) -> OSError:
        """The same with the flag, as when the disk is full."""
        return OSError(f"--rollout-save-hf {self.folder}: {error}")


FEATURE = ExportFeature
