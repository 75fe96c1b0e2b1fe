"""Where the reference policy of the KL penalties comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl_corr.config.fields import Options, Positive, option


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(Options):
    """Reference policy: what the KL penalties compare the policy with; by default the model that the run starts from.

    Example: ReferenceConfig(reference_reset=50)
    """

    reference_checkpoint: str | None = option(None, metavar="DIR")
    """Hugging Face folder of the reference policy, of the architecture that is trained; its weights wait in the
    memory of the host and take the place of the trained ones for one forward pass a step (default: those of
    `hf_checkpoint`)."""

    reference_reset: Annotated[int | None, Positive()] = option(None, metavar="N")
    """After every N batches the reference becomes the policy of then; it is saved with each checkpoint."""
