"""Where the reference policy of the KL penalties comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl_corr.config.fields import Options, Positive, option


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(Options):
    """Reference policy: what the KL penalties compare the policy with; by default the model that the
    run starts from.

    Example: ReferenceConfig(reference_reset=50)
    """

    reference_checkpoint: str | None = option(None, metavar="DIR")
    """Hugging Face folder of the reference policy, of the architecture that is trained; its weights wait
    in the memory of the host and take the place of the trained ones for one forward pass a step (default:
    those of `hf_checkpoint`).
    """

    reference_urls: tuple[str, ...] = option((), flag="--rollout-reference-url", metavar="URL")
    """Servers that score the samples under the reference policy, instead of a pass of the trainer;
    nothing is ever pushed to them. How far they are from the trainer's own start weights is measured
    in the first step.
    """

    reference_reset: Annotated[int | None, Positive()] = option(None, metavar="N")
    """After every N batches the reference becomes the policy of then; it is saved with each checkpoint."""

    def check(self) -> None:
        if self.reference_urls and self.reference_checkpoint is not None:
            raise ValueError(
                f"`reference_checkpoint` {self.reference_checkpoint} has no effect with `reference_urls`, "
                "whose servers score the samples; drop one"
            )

    def check_reset(self) -> None:
        if self.reference_urls and self.reference_reset is not None:
            raise ValueError(
                f"`reference_reset` {self.reference_reset} can't reset the weights of `reference_urls`, to "
                "which nothing is pushed; drop one"
            )
