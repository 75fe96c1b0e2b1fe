"""Sends a checkpoint's MTP layer to SGLang's draft model (NextN) through its own loaders, without a server.

sglang_nextn_worker.py MODEL_DIR SENT.safetensors  prints a line of JSON: what differs, after the update, from the draft
model that has loaded the folder itself; and from the model itself, which is sent the same.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader import get_model
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import prepare_server_args
from sglang_loader_worker import state

from tools.cpu import sglang_arguments
from tools.local_server import free_port


def main(path, sent):
    args = prepare_server_args(["--model-path", str(path), "--dtype", "float32", *sglang_arguments()])
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=free_port())
    found = {}
    for role in ("target", "draft"):
        config = ModelConfig.from_server_args(args, is_draft_model=role == "draft")
        model = get_model(
            model_config=config, load_config=LoadConfig(load_format="auto"),
            device_config=DeviceConfig(device="cpu", gpu_id=0),
        )  # fmt: skip
        expected = {name: tensor.clone() for name, tensor in state(model).items()}
        for tensor in state(model).values():
            tensor.data.fill_(7)
        updater = WeightUpdater(
            tp_rank=0, device="cpu", gpu_id=0, model_config=config, custom_weight_loaders={},
            get_model=lambda model=model: model, update_model_fields=None, recapture_cuda_graph=None,
            get_model_runner=None,
        )  # fmt: skip
        updater.begin_weight_update()
        for unit in json.loads(Path(f"{sent}.units").read_text()):
            tensors = load_file(sent)
            done, why = updater.load_weights_from_distributed([(name, tensors[name]) for name in unit])
            assert done, why
        updater.end_weight_update(run_post_load=False)
        wrong = [name for name, tensor in state(model).items() if not tensor.equal(expected[name])]
        found[role] = {"kind": type(model).__name__, "held": sorted(expected), "wrong": sorted(wrong)}
    print("RESULT " + json.dumps(found), flush=True)
    dist.destroy_process_group()


main(Path(sys.argv[1]), sys.argv[2])
