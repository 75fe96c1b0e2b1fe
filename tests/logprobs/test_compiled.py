"""What the Triton log-probs compile to for Hopper (sm_90), by Triton's own ahead-of-time
compiler and assembler.

That needs no GPU and is the nearest to one without it: it shows that the kernels lower, as they are
launched at 8192 tokens of 151936 columns, and their loads, stores, barriers and registers. It shows
neither their numbers, which the interpreter does, nor their speed.
"""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from megatron_rl_corr.logprobs import triton_backend as kernels  # noqa: E402
from megatron_rl_corr.logprobs.sampled_rows import SampledRows  # noqa: E402
from megatron_rl_corr.logprobs.torch_backend import LogitColumns  # noqa: E402

NAMES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    int: "i32",
    float: "fp32",
}


KERNELS = ("stats_kernel", "merge_kernel", "combine_kernel", "gradient_kernel")


class Launches:
    """Stands in for a kernel, and compiles it for what it is called with."""

    def __init__(self, kernel):
        self.kernel, self.binaries = kernel, []

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **options):
        constants = {name: options.pop(name) for name in self.kernel.arg_names if name in options}
        names = self.kernel.arg_names[: len(arguments)]
        signature, hints = dict.fromkeys(self.kernel.arg_names, "constexpr"), {}
        for index, (name, value) in enumerate(zip(names, arguments, strict=True)):
            signature[name] = NAMES[value.dtype if isinstance(value, torch.Tensor) else type(value)]
            number = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if (
                isinstance(number, int)
                and number % 16 == 0
                and not self.kernel.params[index].do_not_specialize
            ):
                hints[index,] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, hints)
        self.binaries.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


@pytest.fixture
def launches(monkeypatch, tmp_path) -> dict[str, Launches]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stands = {name: Launches(getattr(kernels, name)) for name in KERNELS}
    for name, stand in stands.items():
        monkeypatch.setattr(kernels, name, stand)
    return stands


def given(
    dtype: torch.dtype, with_entropy: bool, pitch: int = 151936, with_collision: bool = False
) -> tuple[dict, LogitColumns]:
    """Tensors without storage, for shapes alone; and all columns of a vocabulary."""
    logits = torch.empty(8192, pitch, dtype=dtype, device="meta")[:, :151936]
    tensors = {"logits": logits, "labels": torch.empty(8192, dtype=torch.int64, device="meta")}
    return tensors, LogitColumns(
        0, 151936, 0.7, with_entropy, chunk_tokens=1024, with_collision=with_collision
    )


def some(sampled: bool) -> SampledRows | None:
    """Every second of 8192 rows, without storage."""
    order = torch.empty(8192, dtype=torch.int64, device="meta")
    return SampledRows(order, np.arange(8193) // 2) if sampled else None


def accesses(ptx: str, operation: str) -> tuple[int, int]:
    """How many of 16 bytes; how many others."""
    every = re.findall(rf"\b{operation}\.global\S*", ptx)
    wide = [one for one in every if ".v4.b32" in one]
    return len(wide), len(every) - len(wide)


def loops(ptx: str) -> list[str]:
    """Bodies of the innermost loops: from a label to a branch back to it."""
    blocks = re.split(r"^(?=\$L__BB)", ptx, flags=re.MULTILINE)[1:]
    # What follows the branch is the loop's no more.
    split = [re.split(rf"\bbra\S*\s+{re.escape(block[: block.index(':')])};", block) for block in blocks]
    return [parts[0] for parts in split if len(parts) > 1]


def assert_registers_suffice(binary, folder: Path):
    """No spill, and 20 warps or more of a multiprocessor's 64: 65536 registers / (20 x 32) = 102."""
    file = folder / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True)
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["REG"] <= 102


@pytest.mark.parametrize(
    "dtype, with_entropy, sampled, with_collision",
    [
        (torch.bfloat16, False, True, False),
        (torch.bfloat16, True, False, False),
        (torch.float32, True, True, False),
        (torch.bfloat16, True, True, True),
        (torch.float32, True, True, True),
    ],
    ids=str,
)
def test_stats_when_compiled_then_16_byte_loads_and_threads_that_meet_only_at_the_end(
    launches, dtype, with_entropy, sampled, with_collision, tmp_path
):
    tensors, columns = given(dtype, with_entropy, with_collision=with_collision)
    kernels.label_stats(**tensors, columns=columns, sampled=some(sampled))
    (binary,) = launches["stats_kernel"].binaries
    ptx, loads = binary.asm["ptx"], 32 * dtype.itemsize // 16
    # 32 elements a thread, in the loop of whole tiles and in the last. Alone: the row's number,
    # label and its logit.
    assert accesses(ptx, "ld") == (2 * loads, 2 + sampled)
    (body,) = loops(ptx)
    assert accesses(body, "ld") == (loads, 0)
    assert "shfl" not in body and "bar.sync" not in body
    # One exponential an element, and one a tile.
    assert body.count("ex2.approx") == 33
    assert_registers_suffice(binary, tmp_path)
    assert_registers_suffice(launches["merge_kernel"].binaries[0], tmp_path)


def test_stats_when_rows_are_not_aligned_then_threads_meet_only_at_the_end_too(launches, tmp_path):
    tensors, columns = given(torch.bfloat16, True, pitch=151937)
    kernels.label_stats(**tensors, columns=columns)
    (binary,) = launches["stats_kernel"].binaries
    (body,) = loops(binary.asm["ptx"])
    assert accesses(body, "ld") == (0, 32)
    assert "shfl" not in body and "bar.sync" not in body
    assert_registers_suffice(binary, tmp_path)


def test_merge_when_a_row_has_as_many_parts_as_tiles_then_it_lowers(launches, tmp_path):
    # One token of 151936 columns: 37.1 tiles of 4096, in 64 places.
    tensors, columns = given(torch.bfloat16, True)
    kernels.label_stats(
        tensors["logits"][:1], tensors["labels"][:1], columns, blocks=kernels.Blocks(programs=1000)
    )
    assert launches["merge_kernel"].binaries[0].src.constants[7,] == 64
    assert_registers_suffice(launches["merge_kernel"].binaries[0], tmp_path)


@pytest.mark.parametrize("shards, num_stats", [(1, 4), (8, 4), (8, 5)])
def test_combine_when_of_many_ranks_then_it_lowers_and_its_logarithm_is_exact_near_one(
    launches, shards, num_stats, tmp_path
):
    kernels.combine_stats(torch.empty(shards, num_stats, 8192, device="meta"), True, some(True))
    (binary,) = launches["combine_kernel"].binaries
    # The hardware's lg2 is 2^-22 off near 1, where the log-prob of a token that is almost certain lies.
    assert "lg2.approx" not in binary.asm["ptx"]
    assert_registers_suffice(binary, tmp_path)


@pytest.mark.parametrize(
    "dtype, with_entropy, sampled",
    [(torch.bfloat16, False, True), (torch.bfloat16, True, False), (torch.float32, True, True)],
    ids=str,
)
def test_gradient_when_compiled_then_16_byte_loads_and_stores_and_no_contraction(
    launches, dtype, with_entropy, sampled, tmp_path
):
    tensors, columns = given(dtype, with_entropy)
    rows, combined = torch.empty(8192, device="meta"), torch.empty(4, 8192, device="meta")
    kernels.logits_gradient(
        *tensors.values(),
        combined,
        rows,
        rows if with_entropy else None,
        columns,
        out=tensors["logits"],
        sampled=some(sampled),
    )
    (binary,) = launches["gradient_kernel"].binaries
    ptx, tile = binary.asm["ptx"], 32 * dtype.itemsize // 16
    # A loop that only writes zeros, one of whole tiles, one of what padding is in. Alone: what a
    # token has one of.
    assert accesses(ptx, "ld") == (2 * tile, (7 if with_entropy else 5) + sampled)
    assert accesses(ptx, "st") == (3 * tile, 0)
    assert sorted((accesses(body, "ld")[0], accesses(body, "st")[0]) for body in loops(ptx)) == [
        (0, tile),
        (tile, tile),
        (tile, tile),
    ]
    assert "fma." not in ptx and "shfl" not in ptx and "bar.sync" not in ptx
    assert_registers_suffice(binary, tmp_path)
