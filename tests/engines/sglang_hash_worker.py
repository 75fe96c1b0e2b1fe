"""Prints the checksums of the tensors in a file by SGLang's GPU kernels: python sglang_hash_worker.py FILE

They run in Triton's interpreter: set TRITON_INTERPRET=1.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch

torch.Tensor.is_cuda = property(lambda self: True)  # SGLang asserts it

# The file alone: importing the package around it takes half a minute.
[package] = importlib.util.find_spec("sglang").submodule_search_locations
spec = importlib.util.spec_from_file_location("hash", Path(package) / "kernels/ops/memory/gpu_tensor_hash.py")
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)

tensors = torch.load(sys.argv[1], weights_only=True)
print(json.dumps([f"{kernels.gpu_tensor_hash(tensor):016x}" for tensor in tensors]))
