"""vLLM's V2 model runner without a GPU: what Triton's interpreter computes is the model's."""

import base64
import io
import json
import urllib.request

import numpy
import torch

from tests.preloaded import run_preloaded
from tests.tiers import long
from tools.cpu.process_environment import environment, replacements

pytestmark = long
PROMPT, TOP_K = [3, 67, 4, 71], 5


def sampled(url):
    sampling = {
        "max_tokens": 12,
        "temperature": 1.5,
        "top_k": TOP_K,
        "ignore_eos": True,
        "logprobs": 0,
        "seed": 3,
    }
    body = json.dumps({"token_ids": PROMPT, "sampling_params": sampling}).encode()
    request = urllib.request.Request(
        f"{url}/inference/v1/generate", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        [choice] = json.load(response)["choices"]
    return choice


def test_generate_when_top_k_is_set_then_masks_logprobs_and_experts_are_the_models(
    vllm_v2_server_fp32, tiny_moe_dir
):
    from transformers import AutoModelForCausalLM

    choice = sampled(vllm_v2_server_fp32.url)
    output = choice["token_ids"]
    model = AutoModelForCausalLM.from_pretrained(tiny_moe_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(torch.tensor([PROMPT + output]), output_router_logits=True)
    kept, ids = (found.logits[0, len(PROMPT) - 1 : -1] / 1.5).topk(TOP_K)
    assert choice["sampling_mask"] == ids.sort().values.tolist()
    expected = kept.log_softmax(-1)[ids == torch.tensor(output)[:, None]]
    served = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    assert (served - expected).abs().max() < 1e-5
    # [tokens, layers, 2]
    experts = torch.stack([logits.topk(2).indices for logits in found.router_logits], dim=1)
    returned = numpy.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert returned.tolist() == experts[:-1].tolist()


def test_hook_when_the_v2_runner_is_imported_then_its_list_is_replaced(tmp_path):
    (tmp_path / "code.py").write_text("""
import vllm.v1.engine.core, vllm.v1.sample.ops.topk_topp_sampler
from tools.cpu.vllm_replacements import EARLY, LATE_V2
print([r.target for r in (*EARLY, *LATE_V2) if r.is_applied()])
""")
    answer = run_preloaded([tmp_path / "code.py"], engine="vllm_v2", env=environment("vllm_v2"))
    assert answer.stdout.splitlines()[-1] == str([target for target, _ in replacements("vllm_v2")]), (
        answer.stderr
    )
