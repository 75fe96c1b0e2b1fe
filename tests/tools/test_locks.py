"""gpu.lock, resolved without a GPU: its pins agree with each other and lack nothing; and with
what the tests take.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix.releases import OVERLAID, wheel_folder
from tests.matrix.test_transformer_engine import REAL

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements/gpu.lock"
UV = "uv==0.13.9"
EXTENSION = "transformer_engine_torch"
EXTENSION_NEEDS = [
    "torch>=2.1",
    "einops",
    "onnxscript",
    "onnx",
    "packaging",
    "pydantic",
    "nvdlfw-inspect",
    "nvidia-cudnn-frontend>=1.29.0",
    "transformer_engine_cu13==2.20.2",
]
"""What its source asks for. It is published as source only, and asking it would need torch."""


def pins(text):
    """{name: version} of a lock."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(text, folder, *options):
    """Status, what uv resolves the lines to with all that they require, and what it says;
    nothing is installed.
    """
    wheels = [line for line in text.splitlines() if not line.startswith(EXTENSION + "==")]
    (folder / "in.txt").write_text("\n".join([*wheels, *EXTENSION_NEEDS]))
    command = [
        wheel_folder(UV) / "bin/uv",
        "pip",
        "compile",
        *options,
        "--no-build",
        "--no-header",
        "--no-annotate",
        "--no-python-downloads",
        "--python",
        sys.executable,
        "--python-version",
        "3.12",
        # With the oldest C library that the lock is for (GLIBC in scripts/setup).
        "--python-platform",
        "x86_64-manylinux_2_34",
        "in.txt",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    """The lock, resolved; afterwards the answers of the package index lie in uv's cache."""
    status, found, said = resolve(LOCK.read_text(), tmp_path_factory.mktemp("resolved"))
    if status and "error sending request" in said:
        pytest.skip(f"gpu.lock is not resolved, since the package index does not answer: {said[-300:]}")
    assert status == 0, said
    return found


def test_gpu_lock_when_resolved_then_its_pins_agree_and_nothing_is_missing(resolved):
    expected = pins(LOCK.read_text())
    del expected[normal(EXTENSION)]
    assert pins(resolved) == expected


@pytest.mark.parametrize("name, version", [("triton", "3.7.1"), ("torch", "2.13.0")])
def test_gpu_lock_when_one_pin_contradicts_then_it_is_named(resolved, tmp_path, name, version):
    changed = re.sub(rf"(?m)^{name}==.*$", f"{name}=={version}", LOCK.read_text())
    status, _, said = resolve(changed, tmp_path, "--offline")
    assert status != 0 and f"you require {name}=={version}" in " ".join(said.split()), said


def test_gpu_lock_when_a_pin_is_left_out_then_it_is_found_missing(resolved, tmp_path):
    status, found, said = resolve(re.sub(r"(?m)^onnx-ir==.*$", "", LOCK.read_text()), tmp_path, "--offline")
    assert status == 0, said
    assert "onnx-ir" in pins(found)


def test_gpu_lock_when_read_then_it_has_one_cuda_and_the_releases_that_the_tests_hold():
    found = pins(LOCK.read_text())
    engines = [found[name] for name in ("transformer-engine", "transformer-engine-cu13", normal(EXTENSION))]
    assert engines == [REAL.split("==")[1]] * 3
    assert found["megatron-core"] == OVERLAID[-1]
    # CUDA 13 throughout: torch's runtime, its libraries and Transformer Engine's.
    assert found["nvidia-cuda-runtime"].startswith("13.")
    # Headers of another minor version are refused by the compiler.
    compiler = [
        found[f"nvidia-{name}"] for name in ("cuda-runtime", "cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl")
    ]
    assert {version.split(".")[1] for version in compiler} == {"0"}
    assert not [name for name in found if name.endswith("-cu12") and name != "nvidia-cutlass-dsl-libs-cu12"]


@pytest.mark.parametrize("name", ["torch", "sglang", "megatron-core", "transformers", "triton"])
def test_locks_when_compared_then_cpu_and_gpu_hold_one_version(name):
    both = [pins((ROOT / f"requirements/{device}.lock").read_text())[name] for device in ("cpu", "gpu")]
    assert both[0] == both[1]
