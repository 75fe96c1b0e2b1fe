"""The flag of the saved samples."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_rl_corr.config.fields import Options, WrittenFolder, option
from megatron_rl_corr.config.replay import SAMPLE_FILES


@dataclass(frozen=True, kw_only=True)
class SavedSamplesConfig(Options):
    """Saved samples: every batch's, in files that a replay trains on."""

    writes = (WrittenFolder("save_trajectories", by="leaders", step_files=SAMPLE_FILES),)

    save_trajectories: str | None = option(None, metavar="DIR")
    """Write every batch's samples there, with both policies' log-probs, masks and advantages: a Parquet
    file a batch, named by its first step, and replica. It needs the pass that computes old log-probs,
    except in bypass mode.
    """

    save_routed_experts: bool = option(False, needs="save_trajectories")
    """Keep the routes of `router_replay` R3 in these files, as a replay with R3 needs them: most of a file, a
    byte or two for each token, layer and expert.
    """

    def check_saved_routes(self) -> None:
        """ValueError where there are no routes to save."""
        if self.save_routed_experts and self.router_replay != "R3":
            raise ValueError(
                "`save_routed_experts` has no effect without `router_replay` R3; drop it, or add "
                "`router_replay` R3"
            )

    def check_replayed_folder(self) -> None:
        """ValueError where the samples of a replay would be written over those that it reads."""
        both = self.replay is not None and self.save_trajectories is not None
        if both and os.path.realpath(self.save_trajectories) == os.path.realpath(self.replay):
            raise ValueError(
                f"`save_trajectories` {self.save_trajectories} is the folder of `replay`, whose files it "
                "would replace while they are read; give another one, or drop it"
            )


OPTIONS = SavedSamplesConfig
