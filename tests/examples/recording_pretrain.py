"""The quickstart's pretrain script, which also writes down the experts that every token was sent
to, in every pass.

RECORDED_ROUTES names the folder: a file a process, with a line a pass. Started itself, it is the
quickstart that trains with it.
"""

import json
import os
import runpy
import sys
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parents[2] / "examples/quickstart"


def record_routes(folder):
    """The hooks see the model from outside, whatever routes it."""
    import torch
    from megatron.core import parallel_state as ps
    from megatron.core.transformer.moe.router import TopKRouter

    path = Path(folder) / f"rank{os.environ['RANK']}.jsonl"

    def record(module, inputs, output):
        if isinstance(module, TopKRouter):
            _, chosen = output
            line = {
                "layer": module.layer_number - 1,
                "training": module.training,
                "grad": torch.is_grad_enabled(),
                "tp": ps.get_tensor_model_parallel_rank(),
                "dp": ps.get_data_parallel_rank(),
                "cp": ps.get_context_parallel_rank(),
                "sizes": list(inputs[0].shape[:2]),
                "experts": [row.nonzero().flatten().tolist() for row in chosen],
            }
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    torch.nn.modules.module.register_module_forward_hook(record)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        import forked_quickstart

        sys.exit(forked_quickstart.main(__file__))
    record_routes(os.environ["RECORDED_ROUTES"])
    sys.path.insert(0, str(QUICKSTART))  # for the reward, which imports make_model
    runpy.run_path(str(QUICKSTART / "pretrain_moe.py"), run_name="__main__")
