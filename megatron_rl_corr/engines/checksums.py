"""Checksums of tensors: 16 hexadecimal digits, computed where the tensor is.

On the CPU the start of SHA-256. On a GPU a hash of 32-bit words that depends on their places, by torch
operations alone, so that no weight is copied to the host: SGLang 0.5.23 has it as a kernel
(kernels/ops/memory/gpu_tensor_hash.py there).

The server's worker imports this module too: standard library and torch only.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_TILE = 8192  # words that one kernel block hashes; the tiles' hashes are added
_TILES_AT_ONCE = 128
_SEED = 0x243F6A88
_SEEDS = (_SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
_PLACE_FACTORS, _ROTATIONS = (0x27D4EB2D, 0x165667B1), (15, 13)
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_LOW32, _LOW64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def checksum(tensor: Tensor, device: str) -> str | None:
    """The checksum of a tensor as a server on `device` computes it; None for another device
    than cpu and cuda.
    """
    if device == "cpu":
        return cpu_checksum(tensor)
    return gpu_checksum(tensor) if device == "cuda" else None


def cpu_checksum(tensor: Tensor) -> str:
    """The first 8 bytes of SHA-256 over the tensor's bytes."""
    return hashlib.sha256(memoryview(_bytes(tensor).cpu().numpy())).digest()[:8].hex()


def gpu_checksum(tensor: Tensor) -> str:
    """Words w_i and their places i: mix(w_i ^ place(i)) summed over each tile, with two seeds; then mixed."""
    data = _bytes(tensor)
    if data.numel() % 4 or data.storage_offset() % 4:  # else no copy: a layer's experts are gigabytes
        data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
    words = data.view(torch.int32)
    total = 0
    for start in range(0, words.numel(), _TILE * _TILES_AT_ONCE):
        total += _hash_tiles(words[start : start + _TILE * _TILES_AT_ONCE], start, words.numel())
    return f"{_mix64(total) if words.numel() else 0:016x}"


def _hash_tiles(words: Tensor, start: int, count: int) -> int:
    """The sum of the hashes of some tiles, of which the first word is the tensor's word
    `start`, of `count`.
    """
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
