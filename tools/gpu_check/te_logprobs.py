"""Megatron's layers of Transformer Engine against log-probs that the stand-in for the CPU has given once.

    python -m tools.gpu_check.te_logprobs  records them into te_logprobs.json, without a GPU

The model's weights are made of random integers, which every machine and torch draws alike from a seed. Its
routers' choices are far from ties, so that rounding changes no expert. B rows of L tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import torch
from torch import Tensor

from tools.cpu.process_environment import TRANSFORMER_ENGINE, environment
from tools.gpu_check.outcome import DoesNotHold, Finding, Outcome, at_most, require

RECORDED = Path(__file__).with_suffix(".json")
VOCAB, ROWS, LENGTH = 96, 2, 24
LAYERS, HIDDEN, HEADS, GROUPS, HEAD, EXPERTS, TOP_K = 2, 64, 4, 2, 32, 8, 2
MARGIN = 0.03
"""The last chosen expert's logit, of order 1, is at least this much above the next one's."""
SAME_DEVICE = (1e-4, 1e-4)
"""Largest and mean error of a log-prob, where the numbers are float32's as they were recorded."""
BOUNDS = {"float32": (0.02, 0.005), "bfloat16": (0.15, 0.03)}
"""The same on a GPU, whose float32 products may have TF32's 11 bits."""


def check(device: str) -> Outcome:
    """Compare the log-probs of all tokens.

    Raises:
        DoesNotHold: they are not the recorded ones.
    """
    import transformer_engine

    recorded = json.loads(RECORDED.read_text())
    expected = torch.tensor(recorded["logprobs"], dtype=torch.float64)
    stand_in = TRANSFORMER_ENGINE in Path(transformer_engine.__file__).parents
    require(device == "cpu" or not stand_in, "with a GPU the stand-in for Transformer Engine is on the path")
    what = "the stand-in" if stand_in else f"Transformer Engine {transformer_engine.__version__}"
    with MegatronAlone(device):
        findings = []
        for dtype in ("float32", "bfloat16"):
            found, _ = logprobs(recorded["seed"], getattr(torch, dtype), device)
            bounds = SAME_DEVICE if (device, dtype) == ("cpu", "float32") else BOUNDS[dtype]
            findings += compare(f"{what}, {dtype}", found, expected, bounds)
    return Outcome(findings)


def compare(title: str, found: Tensor, expected: Tensor, bounds: tuple[float, float]) -> list[Finding]:
    """Largest and mean error of the log-probs [B, L - 1], held to their bounds."""
    if found.shape != expected.shape:
        raise DoesNotHold(f"{title}: log-probs of shape {list(found.shape)}, recorded {list(expected.shape)}")
    error = (found - expected).abs()
    return [
        at_most(f"{title}: largest error of a log-prob", error.max().item(), bounds[0]),
        at_most(f"{title}: mean error of a log-prob", error.mean().item(), bounds[1]),
    ]


class MegatronAlone:
    """Within, Megatron's parallel state of this process alone."""

    def __init__(self, device: str):
        self.device = device

    def __enter__(self) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        dist.init_process_group(
            "nccl" if self.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)

    def __exit__(self, *exception) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(seed: int, dtype: torch.dtype, device: str):
    """The model, a small Qwen3-MoE in Transformer Engine's spec."""
    import torch.nn.functional as F
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_ffn_hidden_size=HIDDEN,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=EXPERTS, moe_grouped_gemm=True, qk_layernorm=True
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=10000,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight(name, parameter.shape, seed))
    return model.to(device=device, dtype=dtype).eval()


def weight(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Uniform multiples of 2^-17 or more: around 1 for a norm, else of a size that keeps
    activations of order 1.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    drawn = torch.randint(-(2**15), 2**15, tuple(shape), generator=generator).float() / 2**15
    if len(shape) == 1:
        return 1 + drawn / 4
    return drawn if "embedding" in name else drawn / 4


def tokens(seed: int) -> Tensor:
    """[B, L] ids."""
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def logprobs(seed: int, dtype: torch.dtype, device: str) -> tuple[Tensor, float]:
    """(log-prob of each token after the first, [B, L - 1] float64; the smallest margin of a
    router's choice).
    """
    model, margins = build(seed, dtype, device), []

    def note(router, inputs):
        best = (inputs[0].float() @ router.weight.float().t()).topk(TOP_K + 1, dim=-1).values
        margins.append((best[..., -2] - best[..., -1]).min().item())

    for module in model.modules():
        if type(module).__name__ == "TopKRouter":
            module.register_forward_pre_hook(note)
    ids = tokens(seed).to(device)
    positions = torch.arange(LENGTH, device=device).expand(ROWS, -1)
    with torch.no_grad():
        logits = model(ids, positions, None).double()
    found = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    assert len(margins) == LAYERS
    return found.cpu(), min(margins)


def record() -> None:
    """Write the first seed whose routers choose by MARGIN, and its log-probs."""
    from importlib.metadata import version

    with MegatronAlone("cpu"):
        for seed in range(10_000):
            found, margin = logprobs(seed, torch.float32, "cpu")
            if margin >= MARGIN:
                break
    rows = [[round(x, 7) for x in row] for row in found.tolist()]
    saved = {
        "seed": seed,
        "margin": round(margin, 4),
        "megatron-core": version("megatron-core"),
        "logprobs": rows,
    }
    RECORDED.write_text(json.dumps(saved) + "\n")
    print(
        f"{RECORDED}: seed {seed}, margin {margin:.3f}, mean log-prob {found.mean():.2f} +- {found.std():.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().here:
        record()
    else:  # in a process that finds the stand-in
        command = [sys.executable, "-m", "tools.gpu_check.te_logprobs", "--here"]
        variables = environment("megatron", {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        sys.exit(subprocess.run(command, env=variables, check=False).returncode)
