"""When a run exports: after its last step, and after every --rollout-save-hf-interval steps."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.mcore.feature import EndedStep, Feature, RunParts
from megatron_rl_corr.mcore.hf_folders import HFFolders


class ExportFeature(Feature):
    """Writes a folder for each such step."""

    def __init__(self, options: RunConfig):
        super().__init__(options)
        self._folders = HFFolders(Path(options.save_hf), options.hf_checkpoint, options.save_hf_interval)
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
        """Write the weights if it is time. Raises as `HFFolders.write`."""
        run = self._run
        if self._folders.is_due(ended.number, run.settings.args.train_iters):
            self._folders.write(ended.number, run.model, run.optimizer, run.exporter)


FEATURE = ExportFeature
