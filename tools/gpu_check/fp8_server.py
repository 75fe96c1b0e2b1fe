"""FP8 values and scales reach a real SGLang server of an FP8 checkpoint, which computes with
what they stand for.

A GPU's kernels quantise activations too. Without one the server multiplies by the dequantised weights.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl_corr.models.block_fp8 import dequantise_blockwise, quantise_blockwise
from megatron_rl_corr.models.hf_folder import copy_model_files, set_quantization
from megatron_rl_corr.models.quantization import SCALE, BlockFP8
from tools.gpu_check.outcome import Outcome
from tools.gpu_check.pushes import DTYPES, changed, prove, server

CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "mlp.gate"],
}
SHAPE = {
    "vocab_size": 83,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 82,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
"""128 divides the rows of each stack."""


def check(device: str) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        plain, fp8 = Path(name) / "plain", Path(name) / "fp8"
        make_model(plain)
        quantization = make_checkpoint(plain, fp8)
        weights = changed(plain, DTYPES[device])
        with server(fp8, DTYPES[device], device, "--skip-tokenizer-init") as running:
            return prove(
                running.url,
                "tensor",
                plain,
                weights,
                device,
                trained=meant(weights, quantization),
                activations="fp8",
            )


def make_model(folder: Path) -> None:
    """A Qwen3-MoE of SHAPE, with weights large enough that rounding them shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SHAPE), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.06 + (parameter.ndim == 1))
    model.save_pretrained(folder)


def make_checkpoint(plain: Path, folder: Path) -> BlockFP8:
    """The same model as an FP8 checkpoint; how it is quantised."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    copy_model_files(plain, folder)
    set_quantization(folder, CONFIG)
    quantization = BlockFP8.from_config({"quantization_config": CONFIG})
    assert quantization is not None
    made = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        made[name] = weight
        if quantization.quantises(name):
            made[name], made[name + SCALE] = quantise_blockwise(weight, quantization.scale_format)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return quantization


def meant(weights: dict[str, Tensor], quantization: BlockFP8) -> dict[str, Tensor]:
    """What the server's values and scales stand for, in float32."""
    return {
        name: dequantise_blockwise(*quantise_blockwise(weight, quantization.scale_format), torch.float32)
        if quantization.quantises(name)
        else weight.float()
        for name, weight in weights.items()
    }
