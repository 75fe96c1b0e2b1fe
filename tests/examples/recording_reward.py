"""A reward function that also writes down the experts that Megatron's routers sent every token to, in every pass.

A reward is loaded in each process of the training, so its hooks see the model from outside, whatever routes it.
RECORDED_ROUTES names the folder: a file a process, with a line a pass.
"""

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/quickstart"))

from reward import reward  # noqa: F401

if folder := os.environ.get("RECORDED_ROUTES"):
    from megatron.core import parallel_state as ps
    from megatron.core.transformer.moe.router import TopKRouter

    path, lines = Path(folder) / f"rank{os.environ['RANK']}.jsonl", [0]

    def record(module, inputs, output):
        if isinstance(module, TopKRouter):
            _, chosen = output
            line = {
                "layer": module.layer_number - 1, "training": module.training, "grad": torch.is_grad_enabled(),
                "tp": ps.get_tensor_model_parallel_rank(), "dp": ps.get_data_parallel_rank(),
                "cp": ps.get_context_parallel_rank(), "sizes": list(inputs[0].shape[:2]),
                "experts": [row.nonzero().flatten().tolist() for row in chosen],
            }
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    torch.nn.modules.module.register_module_forward_hook(record)
