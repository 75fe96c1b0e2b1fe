"""Every architecture through vLLM's own loaders: what is sent is loaded, hashed and counted, and so is
what changed alone.
"""

import json
from pathlib import Path

import pytest
import torch

from megatron_rl_corr.models.architectures import CODE_OF
from tests.mcore import tiny_models
from tests.mcore.tiny_models import SHAPE, name_type
from tests.preloaded import run_preloaded
from tests.tiers import long

pytestmark = long
REFUSED = ("gpt_oss", "deepseek_v32", "glm_moe_dsa")
MODELS = {name: shape for name, shape in tiny_models.MODELS.items() if name not in REFUSED}
WORKER = Path(__file__).with_name("vllm_loader_worker.py")
# vLLM's kernels for the CPU take multiples of 32.
WIDE = {
    "hidden_size": 128,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": 32,
}


def save(name, folder, seed):
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPE | MODELS[name]
    shape |= {key: value for key, value in (WIDE | LATENT).items() if key in shape or key == "hidden_size"}
    generator = torch.Generator().manual_seed(seed)
    kind = name.split()[0]
    config = AutoConfig.for_model(CODE_OF.get(kind, kind), **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in [
            *model.parameters(),
            *(b for n, b in model.named_buffers() if n.endswith("correction_bias")),
        ]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(folder)
    name_type(folder, kind)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    folders = [root / name.replace(" ", "_") for name in MODELS]
    for name, folder in zip(MODELS, folders, strict=True):
        for seed, part in enumerate(("one", "two")):
            save(name, folder / part, seed)
    run = run_preloaded([WORKER, *folders], engine="vllm", timeout=900)
    lines = [json.loads(line[7:]) for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert run.returncode == 0, run.stderr[-4000:]
    return {one["model"]: one for one in lines}


@pytest.mark.parametrize("name", [name.replace(" ", "_") for name in MODELS])
def test_push_when_all_tensors_come_singly_then_all_are_loaded_and_every_checksum_fits(name, found):
    one = found[name]
    for sent in ("other", "again"):
        assert "told" not in one[sent] and one[sent]["proven"] == one[sent]["held"] > 20, one[sent]
    assert one["wrong"] == []
    changes = one["changes"]
    assert changes["wrong"] == changes["hashed otherwise"] == []
    assert changes["told"] == changes["loaders of the update"] == []
    assert changes["computing"] > 5 and changes["moved"] > 10
    assert all("rotary_emb" in stayed or "cos_sin" in stayed for stayed in one["stayed"]), one["stayed"]
