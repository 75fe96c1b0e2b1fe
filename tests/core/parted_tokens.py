"""Five tokens, whose metrics tests part by engine and by lag."""

import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction

# Two samples; the last token is not trained. D = 0, 0.5, -0.25, 0.
TRAIN = torch.tensor([-1.0, -2.0, -1.0, -2.0, -9.0])
ROLLOUT = torch.tensor([-1.0, -2.5, -0.75, -2.0, -1.0])
MASK = torch.tensor([1, 1, 1, 1, 0], dtype=torch.bool)
SAMPLES = torch.tensor([0, 0, 1, 1, 1])


def metrics(places=slice(None), **named):
    """Of the tokens at these places, without a correction."""
    return compute_correction(
        TRAIN[places],
        ROLLOUT[places],
        MASK[places],
        SAMPLES[places],
        num_sequences=2,
        config=RolloutCorrectionConfig(),
        **named,
    ).metrics
