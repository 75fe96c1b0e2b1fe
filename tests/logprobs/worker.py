"""Every case of the Triton log-probs, in a process of its own: saves inputs and outputs.

python worker.py FILE runs on a GPU, and with TRITON_INTERPRET=1 on a CPU: Triton reads that before
any kernel is made.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_rl_corr.logprobs import triton_backend as label_logprobs
from megatron_rl_corr.logprobs import vocab
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.torch_backend import LogitColumns
from megatron_rl_corr.logprobs.triton_backend import Blocks

NAN, INF = float("nan"), float("inf")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


class Fixed(Blocks):
    """As many tiles a program, however few tokens there are."""

    def span(self, columns, rows, logits):
        return self.tiles * self.columns


# A tile has 32 columns by the interpreter, as fits a width that it goes through; on a GPU 4096.
ONE_PART = Fixed(lanes=2, elements=16, tiles=100) if INTERPRETED else Fixed(tiles=100)
PARTS = ONE_PART._replace(tiles=2)
TILE = ONE_PART.columns

PLAIN = {"width": 2 * TILE + 16, "tokens": 5, "dtype": torch.float32, "blocks": ONE_PART}
CASES: dict[str, dict] = {
    **{
        f"width {name}, {kind}": {"width": width, "blocks": blocks}
        for name, width in {
            "1": 1,
            "2": 2,
            "tile - 1": TILE - 1,
            "tile": TILE,
            "tile + 1": TILE + 1,
            "two tiles": 2 * TILE,
            "three tiles + 7": 3 * TILE + 7,
            "five tiles": 5 * TILE,
        }.items()
        for kind, blocks in {"one part": ONE_PART, "parts": PARTS}.items()
    },
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16, parts, odd rows": {"dtype": torch.bfloat16, "blocks": PARTS, "width": 4 * TILE + 3},
    "float16": {"dtype": torch.float16, "temperature": 1.3},
    "temperature 0.7": {"temperature": 0.7, "blocks": PARTS},
    "temperature 300": {"temperature": 300.0},
    "no entropy": {"with_entropy": False, "blocks": PARTS},
    "padding": {"limit": TILE + 13},
    "padding, parts": {"limit": 3 * TILE + 5, "width": 5 * TILE, "blocks": PARTS},
    "only padding": {"limit": 0},
    "a later rank": {"first": 1000},
    "rows apart": {"pitch": 3 * TILE},
    "rows apart by an odd number": {"pitch": 3 * TILE + 1, "blocks": PARTS},
    "in place": {"inplace": True},
    "in place, bfloat16, parts": {
        "inplace": True,
        "dtype": torch.bfloat16,
        "blocks": PARTS,
        "width": 4 * TILE,
    },
    "one token": {"tokens": 1, "blocks": PARTS},
    "more tokens than the merge has": {"tokens": 35, "width": 3 * TILE, "blocks": PARTS},
    "no tokens": {"tokens": 0},
    "32-bit labels": {"labels": torch.int32},
    "one upstream for all": {"expanded": True},
    "sampled rows": {"sampled": [1, 0, 1, 1, 0], "tokens": 5, "limit": TILE + 13},
    "sampled rows, bfloat16, parts": {
        "sampled": [0, 1, 1, 0, 1, 1, 0],
        "tokens": 7,
        "width": 5 * TILE,
        "blocks": PARTS,
        "dtype": torch.bfloat16,
    },
    "sampled rows, in place, no entropy": {
        "sampled": [0, 0, 1, 0, 1, 0],
        "tokens": 6,
        "inplace": True,
        "with_entropy": False,
    },
    "no sampled row": {"sampled": [0] * 5},
    "collision": {"with_collision": True, "temperature": 0.7, "limit": TILE + 13},
    "collision, parts, no entropy": {
        "with_collision": True,
        "with_entropy": False,
        "blocks": PARTS,
        "width": 5 * TILE,
    },
    "collision, sampled rows, bfloat16, parts": {
        "with_collision": True,
        "sampled": [0, 1, 1, 0, 1, 1, 0],
        "tokens": 7,
        "width": 5 * TILE,
        "blocks": PARTS,
        "dtype": torch.bfloat16,
    },
    "blocks as they are": {"blocks": label_logprobs.BLOCKS, "width": 4096 + 33},
}
"""What differs from PLAIN; temperature 1, limit the width, with entropy, first 0."""


def inputs(name: str) -> dict:
    case = PLAIN | CASES[name]
    tokens, width, dtype = case["tokens"], case["width"], case["dtype"]
    limit, first = case.get("limit", width), case.get("first", 0)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    logits = torch.randn(tokens, width, generator=generator) * 4
    labels = torch.randint(max(limit, 1), (tokens,), generator=generator)
    grads = torch.randn(2, tokens, generator=generator)
    if case.get("expanded"):
        grads[:] = grads[:, :1]
    if tokens >= 5:
        logits[1] += 300  # the size of the logits must not cost digits
        logits[2] = 26.0
        logits[2, labels[2]] = 40.0  # a token that is almost certain
        logits[3, : width // 2] = -INF
        labels[3] = max(limit - 1, 0)
        if not case.get("expanded"):
            labels[4], grads[0, 4] = -100 - first, 0  # a masked token
    logits[:, limit:] = 1e4  # padding holds anything
    for row, sampled in enumerate(case.get("sampled", ())):
        if not sampled:
            # Whatever is there, and whatever comes from upstream.
            logits[row] = (NAN, INF, -INF)[row % 3]
            labels[row], grads[:, row] = (-100 - first, 0)[row % 2], (NAN, 2.0)[row % 2]
    settings = {
        "first": first,
        "limit": limit,
        "temperature": case.get("temperature", 1.0),
        "with_entropy": case.get("with_entropy", True),
        "chunk_tokens": 1024,
        "with_collision": case.get("with_collision", False),
    }
    labels = (labels + first).to(case.get("labels", torch.int64))
    return {"logits": logits.to(dtype), "labels": labels, "grads": grads, "settings": settings}


def placed(tensor: torch.Tensor, pitch: int | None) -> torch.Tensor:
    """On the device; with a pitch, rows that far apart."""
    if pitch is None:
        return tensor.to(DEVICE)
    wide = torch.full((tensor.shape[0], pitch), NAN, dtype=tensor.dtype, device=DEVICE)
    wide[:, : tensor.shape[1]] = tensor.to(DEVICE)
    return wide[:, : tensor.shape[1]]


def run(
    logits, labels, grads, settings, blocks=ONE_PART, pitch=None, inplace=False, expanded=False, sampled=None
) -> dict:
    """One rank alone, as vocab.py calls the two functions, which it does not check."""
    logits, labels, grads = placed(logits, pitch), labels.to(DEVICE), grads.to(DEVICE)
    before = logits.contiguous().clone()
    if expanded:
        # One number behind all tokens, as of a sum; not a number where a reader takes them for adjacent.
        grads[:, 1:] = NAN
        grads = grads[:, :1].expand_as(grads)
    columns, with_entropy = LogitColumns(**settings), settings["with_entropy"]
    sampled = None if sampled is None else SampledRows.of(np.array(sampled), DEVICE)
    stats = label_logprobs.label_stats(logits, labels, columns, sampled, blocks=blocks)
    combined = label_logprobs.combine_stats(stats[None], with_entropy, sampled)
    # What is there must not matter.
    out = logits if inplace else placed(torch.full(logits.shape, NAN, dtype=logits.dtype), pitch)
    label_logprobs.logits_gradient(
        logits,
        labels,
        combined,
        grads[0],
        grads[1] if with_entropy else None,
        columns,
        out=out,
        sampled=sampled,
        blocks=blocks,
    )
    logprobs, entropy = combined[0], combined[1]
    beyond = out.new_empty(0)
    if pitch is not None:
        beyond = out.as_strided((out.shape[0], pitch - out.shape[1]), out.stride(), out.shape[1])
    untouched = inplace or torch.equal(logits.contiguous().view(torch.uint8), before.view(torch.uint8))
    result = {
        "stats": stats,
        "logprobs": logprobs,
        "entropy": entropy,
        "gradient": out.clone(),
        "untouched": untouched,
        "collision": combined[4:],
        "beyond": beyond.isnan().all(),
    }
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in result.items()}


def run_case(name: str) -> dict:
    keys = ("blocks", "pitch", "inplace", "expanded", "sampled")
    case = {key: CASES[name][key] for key in keys if key in CASES[name]}
    return run(**inputs(name), **case)


def strange_rows() -> dict:
    """Nothing finite, a NaN, +inf, a NaN among -inf, all finite; and two columns of padding."""
    logits = torch.randn(5, 2 * TILE + 3, generator=torch.Generator().manual_seed(3))
    logits[0] = -INF
    logits[1, TILE + 3] = NAN
    logits[2, 7] = INF
    logits[3] = -INF
    logits[3, 2 * TILE] = NAN
    settings = {
        "first": 0,
        "limit": 2 * TILE + 1,
        "temperature": 0.5,
        "with_entropy": True,
        "chunk_tokens": 1,
    }
    arguments = {"logits": logits, "labels": torch.full((5,), 2), "settings": settings}
    return {
        (kind, blocks_name): run(grads=grads, blocks=blocks, **arguments)
        for kind, grads in {"upstream": torch.ones(2, 5), "no upstream": torch.zeros(2, 5)}.items()
        for blocks_name, blocks in {"one part": ONE_PART, "parts": PARTS}.items()
    }


def far_rows() -> dict:
    """The last of three rows begins behind element 2^31; the rest of the storage is never touched."""
    pitch, width = 2**30 + 16, 2 * TILE
    logits = torch.empty(2 * pitch + width, dtype=torch.bfloat16, device=DEVICE).as_strided(
        (3, width), (pitch, 1)
    )
    logits.copy_(torch.randn(3, width, generator=torch.Generator().manual_seed(4)))
    settings = {"first": 0, "limit": width, "temperature": 1.0, "with_entropy": True, "chunk_tokens": 1}
    labels, grads = torch.tensor([0, 1, 2]), torch.randn(2, 3, generator=torch.Generator().manual_seed(5))
    given = {"logits": logits.cpu().clone(), "labels": labels, "grads": grads, "settings": settings}
    return {"inputs": given, "result": run(logits, labels, grads, settings, inplace=True)}


def first_programs() -> torch.Tensor:
    """[2, 4, 3] of what the first two of six programs write of three rows of two parts; NaN elsewhere."""
    logits, labels = torch.randn(3, 2 * TILE), torch.zeros(3, dtype=torch.int64)
    partial = torch.full((2, 4, 3), NAN)
    label_logprobs.stats_kernel[2,](
        logits,
        logits.stride(0),
        labels,
        labels,
        partial,
        3,
        2,
        0,
        2 * TILE,
        TILE,
        1.0,
        1.0,
        WITH_ENTROPY=True,
        WITH_COLLISION=False,
        SOME_ROWS=False,
        ROWS=ONE_PART.elements,
        LANES=ONE_PART.lanes,
        VECTOR=1,
    )
    return partial


def refusals() -> list[str]:
    """Messages on float64, and on columns that are not adjacent."""
    messages = []
    for logits in (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(4, 2).T):
        try:
            label_logprobs.label_stats(
                logits,
                torch.zeros(2, dtype=torch.int64),
                LogitColumns(0, 4, 1.0, with_entropy=False, chunk_tokens=1),
            )
            messages.append("went on")
        except ValueError as error:
            messages.append(str(error))
    return messages


# Two ranks of vocab_parallel_logprobs, on the Triton backend whatever the device.

SHARDED = {
    "plain": {},
    "inplace": {"inplace_gradient": True, "temperature": 0.7},
    "a rank of padding": {"vocab_size": 20, "with_entropy": False},
    "bfloat16": {"vocab_size": 45},
    "sampled rows, two ranks": {"vocab_size": 45, "sampled": [0, 1, 1, 0, 1, 0, 1]},
    "collision, two ranks": {"vocab_size": 45, "temperature": 0.7, "with_collision": True},
}


def sharded_inputs(name: str) -> dict:
    generator = torch.Generator().manual_seed(len(name))
    logits = torch.randn(7, 48, generator=generator) * 4
    labels = torch.randint(20, (7,), generator=generator)
    if name in ("plain", "inplace"):
        labels[3:] += 28
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    for row, sampled in enumerate(SHARDED[name].get("sampled", ())):
        logits[row] = logits[row] if sampled else NAN
    return {"logits": logits.to(dtype), "labels": labels, "grads": torch.randn(2, 7, generator=generator)}


def sharded(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    vocab.backend = lambda logits: label_logprobs
    results = {}
    for name, options in SHARDED.items():
        given, options = sharded_inputs(name), {"with_entropy": True} | options
        if "sampled" in options:
            options["sampled"] = SampledRows.of(np.array(options["sampled"]))
        leaf = given["logits"].chunk(2, dim=1)[rank].clone().requires_grad_()
        # The head of a model writes what inplace_gradient overwrites; a leaf is not its to write.
        logits = leaf * 1
        logprobs, entropy, *collision = vocab.vocab_parallel_logprobs(
            logits, given["labels"], tp_group=dist.group.WORLD, **options
        )
        outputs = [logprobs] if entropy is None else [logprobs, entropy]
        torch.autograd.backward(outputs, list(given["grads"][: len(outputs)]))
        results[name] = {
            "logprobs": logprobs.detach(),
            "entropy": None if entropy is None else entropy.detach(),
            "gradient": leaf.grad,
            "collision": torch.stack(collision) if collision else torch.empty(0, 7),
        }
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def merged() -> tuple[torch.Tensor, torch.Tensor]:
    """The statistics of two halves of the columns, merged, and those of all columns at once."""
    logits = torch.randn(5, 2 * TILE, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    labels = torch.tensor([0, TILE - 1, TILE, TILE + 1, 2 * TILE - 1], device=DEVICE)

    def stats(first: int, width: int) -> torch.Tensor:
        part = logits[:, first : first + width].contiguous()
        columns = LogitColumns(first, width, 0.7, True, 8, with_collision=True)
        return label_logprobs.label_stats(part, labels, columns, blocks=ONE_PART)

    halves = torch.stack([stats(0, TILE), stats(TILE, TILE)])
    return label_logprobs.merge_stats(halves).cpu(), stats(0, 2 * TILE).cpu()


def main(file: Path) -> None:
    results = {
        "cases": {name: (inputs(name), run_case(name)) for name in CASES},
        "strange": strange_rows(),
        "far": far_rows(),
        "refusals": refusals(),
        "merged": merged(),
    }
    if INTERPRETED:
        results["first programs"] = first_programs()
        mp.start_processes(sharded, args=(str(file.parent),), nprocs=2, start_method="fork")
        results["sharded"] = [torch.load(file.parent / f"{rank}.pt") for rank in range(2)]
        results["sharded options"] = SHARDED
        results["sharded inputs"] = {name: sharded_inputs(name) for name in SHARDED}
    torch.save(results, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
