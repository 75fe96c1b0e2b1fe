"""fp8_reference_worker.py IN OUT: SGLang's own quantisers of the tensors that IN lists, and its way back.

OUT: for each tensor {"ue8m0": (values, scales), "float32": (values, scales), "back": those of
"float32" in bfloat16}.
"""

import sys

import torch
from sglang.benchmark.deepseek_utils import per_block_cast_to_fp8 as with_any_scale
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant, per_block_cast_to_fp8

found = []
for weight in torch.load(sys.argv[1]):
    values, scales = with_any_scale(weight)
    back = block_quant_dequant(values, scales, [128, 128], torch.bfloat16)
    found.append({"ue8m0": per_block_cast_to_fp8(weight), "float32": (values, scales), "back": back})
torch.save(found, sys.argv[2])
