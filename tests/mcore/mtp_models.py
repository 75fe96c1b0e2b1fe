"""A tiny DeepSeek-V3 with a layer that predicts further tokens (MTP), and that layer in plain torch.

transformers ignores the layer's tensors, so they are written here, and the layer is built of transformers'
decoder layer by the formula of the paper (arXiv:2412.19437, 2.2): h'_i =
layer(eh_proj([enorm(embed(t_{i+1})), hnorm(h_i)])), logits = head(shared_head.norm(h'_i)), for token
t_{i+2}; h_i is what the model's own head reads.
"""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tests.mcore.hf_reference import hf_named
from tests.mcore.tiny_models import MODELS, SHAPE, make_model

LAYER = "model.layers.4."
"""Behind the tiny model's own four."""
COPIES = {
    LAYER + "embed_tokens.weight": "model.embed_tokens.weight",
    LAYER + "shared_head.head.weight": "lm_head.weight",
}
"""The copies that published checkpoints hold -> what they are copies of."""


class MTPLayer(nn.Module):
    """The layer, without embedding and output layer, which are the model's."""

    def __init__(self, config):
        super().__init__()
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
            DeepseekV3DecoderLayer,
            DeepseekV3RMSNorm,
        )

        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = DeepseekV3RMSNorm(size, eps=eps), DeepseekV3RMSNorm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.norm = DeepseekV3RMSNorm(size, eps=eps)

    def forward(self, model, tokens):
        """[b, L] -> logits [b, L - 1, V]: of position i, for token i + 2. The model gets no gradient."""
        with torch.no_grad():
            hidden = model.model(tokens).last_hidden_state[:, :-1]
            embedded = model.model.embed_tokens(tokens)[:, 1:]
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        length = joined.shape[1]
        mask = torch.full((length, length), -torch.inf, dtype=joined.dtype).triu(1)[None, None]
        positions = model.model.rotary_emb(joined, torch.arange(length)[None])
        out = self.layer(joined, attention_mask=mask, position_embeddings=positions)
        return F.linear(self.norm(out), model.lm_head.weight.detach())

    def named_tensors(self, tensors):
        """(own name, tensor) pairs under the names of a checkpoint."""
        outside = {"norm.weight": "shared_head.norm.weight"}
        named = ((outside.get(name, name.removeprefix("layer.")), tensor) for name, tensor in tensors)
        return {LAYER + name: tensor for name, tensor in hf_named(named).items()}


def make_mtp_model(folder, name="deepseek_v3"):
    """The checkpoint with the layer and its copies, and mtp.pt: the layer's own state."""
    from transformers import AutoConfig

    make_model(name, folder)
    config = AutoConfig.for_model(name, **(SHAPE | MODELS[name]), attn_implementation="eager")
    generator, layer = torch.Generator().manual_seed(3), MTPLayer(config)
    with torch.no_grad():
        for tensor in layer.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.25 + (tensor.ndim == 1))
        layer.layer.mlp.gate.e_score_correction_bias.copy_(torch.randn(8, generator=generator) * 0.3)
    tensors = load_file(folder / "model.safetensors")
    tensors |= layer.named_tensors(layer.state_dict().items())
    tensors |= {copy: tensors[name].clone() for copy, name in COPIES.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"num_nextn_predict_layers": 1}))
    torch.save(layer.state_dict(), folder / "mtp.pt")


def load_reference(folder):
    """transformers' model and the layer, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    layer = MTPLayer(model.config).double()
    layer.load_state_dict(torch.load(folder / "mtp.pt", weights_only=True))
    return model, layer


def mtp_gradients(folder, rows, sizes, factor, padded_vocab):
    """Gradients of factor x the mean over microbatches of the mean cross entropy of their sampled tokens.

    Megatron's cross entropy counts the padding of the vocabulary, whose logits are 0.

    Args:
        rows: (ids, length of the prompt) of each sample.
        sizes: samples of each microbatch, in order.
        factor: --mtp-loss-scaling-factor.
        padded_vocab: rows of Megatron's embedding.
    """
    model, layer = load_reference(folder)
    total, start = 0.0, 0
    for size in sizes:
        losses = []
        for ids, prompt in rows[start : start + size]:
            # Megatron's rows are the ids without the last, which is a label only.
            logits, targets = layer(model, ids[None, :-1])[0, :-1], ids[2:-1]
            logits = F.pad(logits, (0, padded_vocab - logits.shape[-1]))
            of_token = F.cross_entropy(logits, targets, reduction="none")
            losses.append(of_token[torch.arange(2, len(ids) - 1) >= prompt])
        start += size
        total = total + factor * torch.cat(losses).mean() / len(sizes)
    total.backward()
    grads = (
        (name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in layer.named_parameters()
    )
    return layer.named_tensors(grads)
