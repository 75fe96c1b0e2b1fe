"""Checksums of weights, against bytes by hand and against SGLang's own kernels."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl_corr.engines import checksums
from megatron_rl_corr.engines.checksums import checksum, cpu_checksum, gpu_checksum

WORKER = Path(__file__).with_name("sglang_hash_worker.py")


def test_cpu_checksum_then_the_start_of_sha256_over_the_bytes():
    tensor = torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)  # 3f80 c000, the lower byte first
    assert cpu_checksum(tensor) == hashlib.sha256(bytes([0x80, 0x3F, 0x00, 0xC0])).hexdigest()[:16]


@pytest.mark.parametrize("function", [cpu_checksum, gpu_checksum])
def test_checksum_when_one_bit_or_two_places_change_then_another(function):
    x = torch.arange(20_000, dtype=torch.float32)
    flipped, swapped = x.clone(), x.clone()
    flipped.view(torch.int32)[-1] ^= 1
    swapped[[3, 9000]] = swapped[[9000, 3]]
    assert len({function(x), function(flipped), function(swapped), function(x[:-1])}) == 4
    assert function(x.view(100, 200).t()) == function(x.view(100, 200).t().contiguous()) != function(x)


def test_gpu_checksum_when_taken_in_pieces_then_the_same(monkeypatch):
    x = torch.randn(5 * 8192 + 3)
    whole = gpu_checksum(x)
    monkeypatch.setattr(checksums, "_TILES_AT_ONCE", 2)
    assert gpu_checksum(x) == whole


def test_checksum_when_sglang_runs_on_another_device_then_none_is_made_up():
    assert checksum(torch.ones(2), "npu") is None


def test_gpu_checksum_when_sglangs_own_kernels_run_then_equal(tmp_path):
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed; make setup installs it")
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(3, 5, generator=generator),
        torch.randn(7, generator=generator).bfloat16(),  # 14 bytes: no whole number of words
        torch.randn(8192, generator=generator),  # one tile
        torch.randn(2 * 8192 + 1, generator=generator),
        torch.zeros(9000),
    ]
    torch.save(tensors, tmp_path / "tensors.pt")
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, WORKER, tmp_path / "tensors.pt"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [gpu_checksum(tensor) for tensor in tensors]
