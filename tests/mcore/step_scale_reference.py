"""VCPO's step scale of every update by Hugging Face in float64, one sample at a time; for test_step_scale.py.

Shares no code with the package. python step_scale_reference.py MODEL_DIR REFERENCE.pt OUT.pt  saves, by
the number of replicas, sqrt(ESS / n) of each update, with the weights of its own samples.
"""

import math
import sys
from pathlib import Path

import torch

from tests import tensor_files

sys.path.insert(0, str(Path(__file__).parent))
from hf_reference import load, logprobs_of
from updates_cases import EPOCHS, PARTS, sample_part


def step_scale(weights):
    total = squares = 0.0
    for weight in weights:
        total += weight
        squares += weight * weight
    return math.sqrt(total * total / squares / len(weights))


def main(model_dir, reference, out):
    samples, model = torch.load(reference, weights_only=True)["samples"], load(model_dir)
    with torch.no_grad():
        drifts = [(logprobs_of(model, s)[0] - s["rollout"]).sum().item() for s in samples]
    weights = [math.exp(drift) for drift in drifts]
    tensor_files.save(
        {
            replicas: [
                step_scale([weights[i] for i in sample_part(u, replicas)]) for u in range(PARTS * EPOCHS)
            ]
            for replicas in (1, 2)
        },
        out,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
