"""The flags of the export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl_corr.config.fields import Options, Positive, WrittenFolder, option


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Options):
    """Export: the policy as Hugging Face folders."""

    writes = (WrittenFolder("save_hf", by="senders", no_links=("iter_*", ".iter_*")),)

    save_hf: str | None = option(None, metavar="DIR")
    """Write the policy after the last step as a Hugging Face folder, DIR/iter_0000040: transformers and
    servers load it. All ranks must share DIR.
    """

    save_hf_interval: Annotated[int | None, Positive()] = option(None, metavar="N", needs="save_hf")
    """Write it after every N steps, too."""


OPTIONS = ExportConfig
