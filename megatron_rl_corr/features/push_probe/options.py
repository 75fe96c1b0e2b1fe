"""The flags of the probe after a push."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_rl_corr.config.fields import Options, Positive, option


@dataclass(frozen=True, kw_only=True)
class PushProbeConfig(Options):
    """Push probe: whether servers compute with the weights that they were sent."""

    acts_in_replay = False

    probe_push: Literal["on", "off"] = "on"
    """After every push, every server scores texts of the data's prompts and samples a response,
    and its log-probs must be those of the trainer's own forward pass, as far as rounding explains;
    off asks nothing.
    """

    max_probe_log_ratio: Annotated[float | None, Positive()] = option(
        None, metavar="X", needs="probe_push=on"
    )
    """|log-ratio| that nine tokens in ten of such a text may have (default: four times what simulated
    rounding of both sides' number types makes of it).
    """


OPTIONS = PushProbeConfig
