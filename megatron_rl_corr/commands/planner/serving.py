"""What rollout servers hold on their GPUs: weights, and keys and values of how many tokens and requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.commands.planner.activations import BF16
from megatron_rl_corr.commands.planner.parameters import has_latent_attention, head_size, model_parameters
from megatron_rl_corr.commands.planner.train_layout import Workload
from megatron_rl_corr.models.architectures import Config

GIB = 2**30


@dataclass(frozen=True)
class ServingMemory:
    """Servers of one size: bytes on each of their GPUs, and what they can hold.

    Example: two servers of two GPUs each are `servers=2, tensor=2`.
    """

    servers: int
    tensor: int
    """GPUs of a server."""
    weights: float
    cache: float
    """Left for keys and values on each GPU; negative where the weights alone do not fit."""
    bytes_per_token: float
    """Bytes of keys and values, on each GPU."""
    tokens: int
    """Tokens that one server's cache holds."""
    requests: int
    """Requests of full length that all servers can run at a time."""

    @property
    def fits(self) -> bool:
        """True if each server can run at least one request of full length."""
        return self.requests > 0

    def lacks(self, workload: Workload) -> float:
        """Bytes of each GPU that are missing for one request of full length; negative where it fits."""
        return workload.seq_length * self.bytes_per_token - self.cache

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers; bytes are of one GPU."""
        return {
            "servers": self.servers,
            "tensor": self.tensor,
            "weights": round(self.weights),
            "cache": round(self.cache),
            "bytes_per_token": round(self.bytes_per_token),
            "tokens": self.tokens,
            "requests": self.requests,
            "fits": self.fits,
        }


def cache_bytes_per_token(config: Config, tensor: int) -> float:
    """Bytes of keys and values that one GPU holds for a token: 2 layers x key-value heads / tensor
    x head x 2 bytes.

    Fewer heads than GPUs are repeated. Latent attention keeps its low-rank row, and the rotary
    part, on every GPU.

    Args:
        config: the model's config.json.
        tensor: GPUs of a server.
    """
    layers = config["num_hidden_layers"]
    if has_latent_attention(config):
        return BF16 * layers * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    return 2 * BF16 * layers * max(_key_value_heads(config) / tensor, 1) * head_size(config)


def _key_value_heads(config: Config) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def server_problems(config: Config, *, gpus: int, tensor: int, gpus_per_node: int) -> list[str]:
    """Why SGLang can't run servers of `tensor` GPUs each; none: it can.

    Source: `assert`s of the attention layers in sglang.srt.models (qwen2.py, qwen3_moe.py, llama.py, ...).

    Args:
        config: the model's config.json.
        gpus: of all servers together.
        tensor: --tp-size.
        gpus_per_node: a server stays on one node.
    """
    heads, groups, found = config["num_attention_heads"], _key_value_heads(config), []
    if gpus % tensor:
        found.append(f"must divide the {gpus} GPUs that serve")
    if tensor > gpus_per_node:
        found.append(f"must be at most --gpus-per-node {gpus_per_node}")
    if heads % tensor:
        found.append(f"must divide the model's {heads} heads")
    # Latent attention has one row for all heads, which every GPU keeps.
    if not has_latent_attention(config) and groups % tensor and tensor % groups:
        found.append(f"must divide, or be a multiple of, the model's {groups} key-value heads")
    return found


def serving_memory(
    config: Config, workload: Workload, *, gpus: int, tensor: int, gpu_bytes: float, fraction: float
) -> ServingMemory:
    """Estimate what fits on servers of `tensor` GPUs each, with weights in bfloat16.

    SGLang takes `fraction` of a GPU for weights and cache; the rest is for its activations, CUDA graphs and
    the buckets of a push.

    Args:
        config: the model's config.json.
        workload: gives the length of a request.
        gpus: of all servers together.
        tensor: --tp-size, which divides the number of GPUs.
        gpu_bytes: memory of a GPU.
        fraction: --mem-fraction-static.

    Raises:
        ValueError: the architecture is not supported.
    """
    counted = model_parameters(config)
    whole = sum(layer.whole for layer in counted.layers) + counted.final_norm
    weights = BF16 * (whole + (counted.total - whole) / tensor)
    cache, each = gpu_bytes * fraction - weights, cache_bytes_per_token(config, tensor)
    tokens, servers = max(int(cache / each), 0), gpus // tensor
    return ServingMemory(
        servers=servers,
        tensor=tensor,
        weights=weights,
        cache=cache,
        bytes_per_token=each,
        tokens=tokens,
        requests=servers * (tokens // workload.seq_length),
    )


def serving_candidates(
    config: Config, workload: Workload, *, gpus: int, gpus_per_node: int, gpu_bytes: float, fraction: float
) -> list[ServingMemory]:
    """Servers of each size that SGLang can run, the best first.

    The best are the smallest that run a whole batch of samples at a time, else those that run most
    requests. Where none runs a request, those that lack least.
    """
    sizes = [
        size
        for size in range(1, gpus + 1)
        if not server_problems(config, gpus=gpus, tensor=size, gpus_per_node=gpus_per_node)
    ]
    made = [
        serving_memory(config, workload, gpus=gpus, tensor=size, gpu_bytes=gpu_bytes, fraction=fraction)
        for size in sizes
    ]
    enough = workload.global_batch_size
    if not any(one.fits for one in made):
        return sorted(made, key=lambda one: one.lacks(workload))
    return sorted(made, key=lambda one: (-min(one.requests, enough), one.tensor))
