"""Packed sequences against padded rows in one run, in every layout and way: tests/mcore/test_packed.py has a few.

-s prints each run's distances: of log-probs (absolute), gradients and metrics (relative), and from Hugging Face.
"""

import json

import pytest

from tests.matrix.releases import OVERLAID, chosen
from tests.mcore.test_packed import check, compared, line

pytestmark = pytest.mark.skipif(chosen() != OVERLAID, reason="make test-matrix runs it; test_packed.py has a few")
CASES = ["token", "sequence", "bypass", "once token", "once sequence"]
LAYOUTS = {
    1: [{}],
    2: [{"tp": 2, "sp": True, "ep": 2}, {"cp": 2}, {"ep": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}],
    4: [{"tp": 2, "pp": 2, "ep": 2, "sp": True}, {"tp": 2, "cp": 2, "ep": 2, "sp": True}, {"cp": 2, "pp": 2},
        {"tp": 2, "ep": 2, "etp": 2, "sp": True}, {"tp": 2, "pp": 2, "vpp": 2, "sp": True}],
}  # fmt: skip
LATENT = {
    1: [{}], 2: [{"tp": 2, "sp": True, "ep": 2}, {"pp": 2}, {"cp": 2}], 4: [{"tp": 2, "pp": 2, "ep": 2, "sp": True}],
}  # fmt: skip
"""Multi-latent attention."""


def specs(layouts):
    for layout in layouts:
        yield {"packed": 64} | layout | {"runs": CASES}
        yield {"packed": 48} | layout | {"per_token": True, "recompute": True, "runs": CASES}
        yield {"packed": 48} | layout | {"replay": True, "runs": CASES[:1]}
        yield {"packed": 64} | layout | {"replay": True, "recompute": True, "per_token": True, "runs": CASES[2:4]}


@pytest.fixture(scope="module")
def tiny_latent_dir(tmp_path_factory):
    """A tiny DeepSeek-V3."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.mcore.tiny_models import MODELS, SHAPE

    folder = tmp_path_factory.mktemp("latent")
    torch.manual_seed(0)
    config = AutoConfig.for_model("deepseek_v3", **(SHAPE | MODELS["deepseek_v3"] | {"initializer_range": 0.1}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape) * 0.3)
    model.save_pretrained(folder)
    # What transformers leaves out of config.json and servers need.
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | MODELS["deepseek_v3"]))
    return folder


@pytest.mark.parametrize("processes", LAYOUTS)
def test_step_when_packed_in_any_layout_then_that_of_padded_rows(processes, tiny_moe_dir, hf_reference):
    checked(processes, tiny_moe_dir, hf_reference(tiny_moe_dir), list(specs(LAYOUTS[processes])))


@pytest.mark.parametrize("processes", LATENT)
def test_step_of_latent_attention_when_packed_then_that_of_padded_rows(processes, tiny_latent_dir, hf_reference):
    chosen_specs = [spec | {"latent": True} for spec in specs(LATENT[processes]) if "replay" not in spec]
    checked(processes, tiny_latent_dir, hf_reference(tiny_latent_dir), chosen_specs)


def checked(processes, model_dir, reference, every):
    found = compared(processes, model_dir, reference, every)
    for one in found:
        print(line(one), flush=True)
    for one in found:
        check(one)
