"""The Hugging Face model that a server's log-probs are compared with."""

import numpy as np
import torch

from megatron_rl_corr.commands.doctor.reference_model import ReferenceModel
from megatron_rl_corr.engines.inspection import DetailedSample
from tests.mcore.tiny_models import make_model


def test_model_when_transformers_does_not_know_its_type_then_loaded_by_the_code_of_its_architecture(tmp_path):
    make_model("kimi_k2", tmp_path)
    reference = torch.load(tmp_path / "reference.pt", weights_only=True)
    ids = reference["tokens"][0].tolist()
    none = np.zeros(0)
    [logits] = ReferenceModel(tmp_path).logits([DetailedSample(ids[:10], ids[10:], none, none, none)])
    # Logits of the last 38 tokens stand at the positions before each.
    torch.testing.assert_close(logits, reference["logits"][0, 9:-1], atol=1e-5, rtol=1e-5)
