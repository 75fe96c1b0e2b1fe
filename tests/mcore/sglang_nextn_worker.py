"""Sends a checkpoint's MTP layer to SGLang's draft model (NextN) through its own loaders, without a server.

sglang_nextn_worker.py MODEL_DIR SENT.safetensors  prints a line of JSON: what differs, after the update,
from the draft model that has loaded the folder itself; and from the model itself, which is sent the same.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file

from tests.sglang_loader import load_model, start_rank


def main(path, sent):
    arguments, tensors, found = start_rank(path), load_file(sent), {}
    units = [
        [(name, tensors[name]) for name in unit] for unit in json.loads(Path(f"{sent}.units").read_text())
    ]
    for role in ("target", "draft"):
        loaded = load_model(arguments, draft=role == "draft")
        expected = {name: tensor.clone() for name, tensor in loaded.state().items()}
        loaded.send(units)
        wrong = [name for name, tensor in loaded.state().items() if not tensor.equal(expected[name])]
        found[role] = {"kind": type(loaded.model).__name__, "held": sorted(expected), "wrong": sorted(wrong)}
    print("RESULT " + json.dumps(found), flush=True)
    dist.destroy_process_group()


main(Path(sys.argv[1]), sys.argv[2])
