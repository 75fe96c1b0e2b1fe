"""What Megatron's hook says of output layers that it can't stand in for, a JSON line each; for a
process of its own.
"""

import json
from types import SimpleNamespace

import torch

from megatron_rl_corr.mcore.output_processor import label_logprobs_of_hidden

CASES = {
    "bias": (torch.zeros(5), {}, {}),
    "mup": (None, {}, {"use_mup": True}),
    "mtp": (None, {}, {"mtp_num_layers": 2}),
    "deferred": (None, {}, {"defer_embedding_wgrad_compute": True}),
    "fused": (None, {"grad_added_to_main_grad": True}, {}),
}
OFF = {
    "use_mup": False,
    "mtp_num_layers": None,
    "defer_embedding_wgrad_compute": False,
    "gradient_accumulation_fusion": False,
}

for name, (bias, weight, config) in CASES.items():
    layer = SimpleNamespace(bias=bias, weight=SimpleNamespace(**weight), sequence_parallel=False)
    said = None
    try:
        label_logprobs_of_hidden(
            hidden_states=torch.zeros(2, 1, 3),
            output_layer=layer,
            output_weight=None,
            config=SimpleNamespace(**OFF | config),
            context=None,
        )
    except ValueError as error:
        said = str(error)
    print("RESULT " + json.dumps([name, said]), flush=True)
