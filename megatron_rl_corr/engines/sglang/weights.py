"""SGLang's parameters: where a Hugging Face tensor ends up, and which checksum the server gives it.

SGLang stacks q, k, v; gate, up; and latent attention's two down projections along dimension 0, and a layer's experts
into one tensor of three dimensions. /weights_checker (0.5.23) gives 16 hexadecimal digits for each parameter: on the
CPU the start of SHA-256; on a GPU a hash of 32-bit words that depends on their places (kernels/ops/memory/
gpu_tensor_hash.py there), computed here with torch, on any device.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterator, Mapping

import torch
from torch import Tensor

from megatron_rl_corr.engines.types import Part

_EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<kind>gate_proj|up_proj|down_proj|w[123])\.weight")
_LATENT = re.compile(r"(?P<module>.*)\.(?P<kind>q_a_proj|kv_a_proj_with_mqa)\.weight")
_STACKED = re.compile(r"(?P<module>.*)\.(?P<kind>q|k|v|gate|up)_proj\.(?P<what>weight|bias)")
_PLACE = {"q": 0, "k": 1, "v": 2, "gate": 0, "up": 1}
_EXPERT_STACK = {"gate_proj": ("w13_weight", 0), "up_proj": ("w13_weight", 1), "down_proj": ("w2_weight", 0),
                 "w1": ("w13_weight", 0), "w3": ("w13_weight", 1), "w2": ("w2_weight", 0)}  # fmt: skip
"""w1, w2, w3: Mixtral's names."""
_SHARED = re.compile(r"(?P<mlp>.*\.mlp)\.shared_experts\.(?P<kind>gate_up|down)_proj\.weight")
_LATENT_PLACE = {"q_a_proj": 0, "kv_a_proj_with_mqa": 1}
_VOCABULARY_ROWS = 64  # SGLang's vocabularies are padded with zeros to a multiple of it (0.5.23)


def server_parameter(name: str) -> tuple[str, Part]:
    """The server's name of the parameter that this tensor is a part of, and which part; others keep their names."""
    if match := _EXPERT.fullmatch(name):
        stack, place = _EXPERT_STACK[match["kind"]]
        return f"{match['layer']}.{stack}", (int(match["expert"]), place)
    if match := _LATENT.fullmatch(name):
        return f"{match['module']}.fused_qkv_a_proj_with_mqa.weight", (-1, _LATENT_PLACE[match["kind"]])
    if match := _STACKED.fullmatch(name):
        stack = "qkv_proj" if match["kind"] in "qkv" else "gate_up_proj"
        return f"{match['module']}.{stack}.{match['what']}", (-1, _PLACE[match["kind"]])
    return name, (-1, 0)


def held_in(parameter: str, held: Container[str]) -> str:
    """The parameter that a server with the parameters `held` has this one in: SGLang may make DeepSeek's shared expert
    the last of the experts."""
    match = _SHARED.fullmatch(parameter)
    if match is None or parameter in held:
        return parameter
    return f"{match['mlp']}.experts.{'w13' if match['kind'] == 'gate_up' else 'w2'}_weight"


def possible_layouts(parts: Mapping[Part, Tensor], *, rank: int, size: int) -> Iterator[Tensor]:
    """What tensor-parallel rank `rank` of `size` may hold of a parameter: whole, or its share of rows or columns.

    Which of them it does depends on the module; a checksum that fits one of them tells.
    """
    whole = _stacked(parts)
    yield whole
    if size == 1 and whole.dim() == 2 and len(parts) == 1 and whole.shape[0] % _VOCABULARY_ROWS:
        yield torch.cat([whole, whole.new_zeros(-whole.shape[0] % _VOCABULARY_ROWS, whole.shape[1])])
    if size > 1:
        for dim in (0, 1):
            if all(part.dim() > dim and part.shape[dim] % size == 0 for part in parts.values()):
                yield _stacked({key: part.chunk(size, dim)[rank] for key, part in parts.items()})


def _stacked(parts: Mapping[Part, Tensor]) -> Tensor:
    experts = sorted({expert for expert, _ in parts})
    rows = [torch.cat([parts[key] for key in sorted(parts) if key[0] == expert]) for expert in experts]
    return torch.stack(rows) if experts[0] >= 0 else rows[0]


# Checksums

_TILE = 8192  # words that one kernel block hashes; the tiles' hashes are added
_TILES_AT_ONCE = 128
_SEED = 0x243F6A88
_SEEDS = (_SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
_PLACE_FACTORS, _ROTATIONS = (0x27D4EB2D, 0x165667B1), (15, 13)
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_LOW32, _LOW64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def checksum(tensor: Tensor, device: str) -> str | None:
    """The checksum of a tensor as a server on `device` computes it; None for another device than cpu and cuda."""
    if device == "cpu":
        return cpu_checksum(tensor)
    return gpu_checksum(tensor) if device == "cuda" else None


def cpu_checksum(tensor: Tensor) -> str:
    """The first 8 bytes of SHA-256 over the tensor's bytes."""
    return hashlib.sha256(memoryview(_bytes(tensor).cpu().numpy())).digest()[:8].hex()


def gpu_checksum(tensor: Tensor) -> str:
    """Words w_i and their places i: mix(w_i ^ place(i)) summed over each tile, with two seeds; then mixed."""
    data = _bytes(tensor)
    data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
    words = data.view(torch.int32)
    total = 0
    for start in range(0, words.numel(), _TILE * _TILES_AT_ONCE):
        total += _hash_tiles(words[start : start + _TILE * _TILES_AT_ONCE], start, words.numel())
    return f"{_mix64(total) if words.numel() else 0:016x}"


def _hash_tiles(words: Tensor, start: int, count: int) -> int:
    """The sum of the hashes of some tiles, of which the first word is the tensor's word `start`, of `count`."""
    place = torch.arange(start, start + words.numel(), device=words.device) & _LOW32
    words = words.to(torch.int64) & _LOW32
    halves = []
    for seed, factor, rotation in zip(_SEEDS, _PLACE_FACTORS, _ROTATIONS, strict=True):
        rotated = ((place << rotation) | (place >> (32 - rotation))) & _LOW32
        mixed = _mix32(words ^ ((place * factor + seed) & _LOW32) ^ rotated)
        mixed = torch.cat([mixed, mixed.new_zeros(-mixed.numel() % _TILE)]).view(-1, _TILE)
        halves.append(_mix32((mixed.sum(1) & _LOW32) ^ (4 * count & _LOW32)))
    return sum((high << 32) | low for high, low in zip(*(half.tolist() for half in halves), strict=True))


def _mix32(x: Tensor) -> Tensor:
    """Murmur's finaliser of 32 bits, in the low half of 64: products wrap around above it."""
    x = ((x ^ (x >> 16)) * _MIX[0]) & _LOW32
    x = ((x ^ (x >> 13)) * _MIX[1]) & _LOW32
    return x ^ (x >> 16)


def _mix64(x: int) -> int:
    x &= _LOW64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _LOW64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _LOW64
    return x ^ (x >> 31)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
