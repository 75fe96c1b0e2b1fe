"""Four ranks over gloo, started once: runs every case of the sharded log-probs, saves inputs and
outputs per rank.

python vocab_worker.py FOLDER writes FOLDER/<rank>.pt. Tensor-parallel pairs are ranks 0-1 and 2-3.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # what a backward pass imports: once, before the forks
import torch.distributed as dist
import torch.multiprocessing as mp
from worker import WORLD, Collectives, init_gloo

from megatron_rl_corr.logprobs.linear import linear_logprobs
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.sampling_mask import SamplingMasks, sampling_mask_logprobs
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs

INF = float("inf")
TOKENS, COLUMNS, HIDDEN = 10, 12, 6
SIZES = (1, 2, 4)
MASK = [0, 1, 1, 1, 0, 1, 0, 0, 1, 0]

VOCAB_CASES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "chunks that do not divide": {"chunk_tokens": 3},
    "one token a chunk": {"chunk_tokens": 1},
    "one padded column": {"vocab_size": 11},
    "a rank of padding": {"vocab_size": 6, "chunk_tokens": 4},
    "a rank of -inf": {},
    "rows of -inf": {"temperature": 1.3},
    "rows of -inf, no entropy": {"temperature": 1.3, "with_entropy": False},
    "labels out of range": {"vocab_size": 10, "temperature": 0.7},
    "extreme": {"temperature": 0.7, "vocab_size": 11},
    "extreme bfloat16": {},
    "no entropy": {"with_entropy": False, "temperature": 1.3},
    "bfloat16": {"temperature": 0.7, "vocab_size": 10},
    "bfloat16, no entropy": {"with_entropy": False, "chunk_tokens": 4},
    "float16": {"vocab_size": 10},
    "float64": {"vocab_size": 10},
    "in place": {"temperature": 0.7, "vocab_size": 10, "inplace_gradient": True},
    "in place, no entropy": {
        "vocab_size": 10,
        "with_entropy": False,
        "inplace_gradient": True,
        "chunk_tokens": 3,
    },
    "in place, bfloat16": {"temperature": 0.7, "vocab_size": 10, "inplace_gradient": True},
    "no tokens": {},
    "sampled rows": {"temperature": 0.5, "vocab_size": 10, "chunk_tokens": 3, "sampled": MASK},
    "sampled rows, in place": {"vocab_size": 10, "inplace_gradient": True, "sampled": MASK},
    "sampled rows, bfloat16, no entropy": {"with_entropy": False, "sampled": MASK},
    "no sampled row": {"sampled": [0] * TOKENS},
    "collision": {"temperature": 1.3, "vocab_size": 10, "chunk_tokens": 3, "with_collision": True},
    "rows of -inf, collision, no entropy": {
        "temperature": 1.3,
        "with_entropy": False,
        "with_collision": True,
    },
    "sampled rows, bfloat16, collision": {"with_collision": True, "sampled": MASK, "inplace_gradient": True},
}


def spoil(tensor: torch.Tensor, sampled: list[int]) -> None:
    """Whatever the rows hold that were not sampled."""
    for row in range(len(sampled)):
        if not sampled[row]:
            tensor[row] = (float("nan"), INF, -INF)[row % 3]


def as_rows(options: dict) -> dict:
    """Its mask as the functions take it."""
    if "sampled" not in options:
        return options
    return options | {"sampled": SampledRows.of(np.array(options["sampled"]))}


def type_of(name: str) -> torch.dtype:
    return next((getattr(torch, t) for t in ("bfloat16", "float16", "float64") if t in name), torch.float32)


def vocab_inputs(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    tokens, support = 0 if name == "no tokens" else TOKENS, VOCAB_CASES[name].get("vocab_size", COLUMNS)
    logits = torch.randn(tokens, COLUMNS, generator=generator) * 4
    labels = torch.arange(tokens) % min(support, 6)
    if tokens:
        logits[2] += 300  # the size of the logits must not cost digits
        logits[3] = torch.tensor([40.0] + [0.0] * 11)  # a token that is certain
        labels[4] = -100  # a masked token
        labels[5] = support - 1 if "-inf" not in name else labels[5]
    if name == "a rank of -inf":
        logits[:, 6:9] = -INF  # all columns of rank 2 of 4, half of rank 1's of 2
        logits[1, 6:] = -INF
    if name.startswith("rows of -inf"):
        logits[[0, 7]] = -INF
        logits[6, :11] = -INF  # the last column alone is left, and the label is another
        logits[8, [2, 5]] = -INF  # the label's own
    if name == "labels out of range":
        labels[[0, 2, 7]] = torch.tensor([11, 12, -1])  # padding, behind it, before it
    if name.startswith("extreme"):
        logits[0, :4] = torch.tensor([-1e30, 1e30, 3.0, -1e30])
        logits[1] = -1e30
        logits[6] *= 30
        logits[7] = torch.arange(COLUMNS) * -9.0  # down to where exp is not a normal number
    logits[:, support:] = 1e4  # padding holds anything
    spoil(logits, VOCAB_CASES[name].get("sampled", ()))
    grads = torch.randn(2, tokens, generator=generator)
    return {"logits": logits.to(type_of(name)), "labels": labels, "grads": grads}


def run_case(compute: Callable, leaves: list[torch.Tensor], grads: torch.Tensor) -> dict:
    """This rank's outputs of compute, the gradients in its leaves, and the collectives of
    either direction.
    """
    with Collectives() as forward:
        logprobs, entropy, *collision = compute()
    outputs = [logprobs] if entropy is None else [logprobs, entropy]
    with Collectives() as backward:
        torch.autograd.backward(outputs, list(grads[: len(outputs)]))
    return {
        "logprobs": logprobs.detach(),
        "entropy": None if entropy is None else entropy.detach(),
        "collision": collision[0] if collision else None,
        "gradients": [leaf.grad for leaf in leaves],
        "forward": forward.names,
        "backward": backward.names,
    }


def run_sharded(inputs: dict[str, torch.Tensor], rank: int, size: int, compute: Callable) -> dict:
    """compute(logits) of this rank's columns; the logits are made from a leaf, as a layer makes them."""
    leaf = inputs["logits"].chunk(size, dim=1)[rank].clone().requires_grad_()
    logits = leaf * 1
    result = run_case(lambda: compute(logits), [leaf], inputs["grads"])
    return result | {"untouched": torch.equal(logits.nan_to_num(), leaf.nan_to_num())}


def run_vocab_case(name: str, rank: int, size: int, group) -> dict:
    inputs, options = vocab_inputs(name), as_rows({"with_entropy": True} | VOCAB_CASES[name])
    return run_sharded(
        inputs,
        rank,
        size,
        lambda logits: vocab_parallel_logprobs(logits, inputs["labels"], tp_group=group, **options),
    )


IDS = 4
IDS_CASES = {
    name: VOCAB_CASES[name]
    for name in (
        "plain",
        "temperature",
        "a rank of padding",
        "rows of -inf",
        "labels out of range",
        "no entropy",
        "bfloat16",
        "in place",
        "in place, bfloat16",
        "no tokens",
        "sampled rows",
        "sampled rows, in place",
        "sampled rows, bfloat16, collision",
        "no sampled row",
    )
}
"""The same with the log-probs of IDS more ids of each token, the label among them or not."""


def ids_inputs(name: str) -> dict[str, torch.Tensor]:
    made, generator = vocab_inputs(name), torch.Generator().manual_seed(1 + sum(map(ord, name)))
    tokens, support = len(made["labels"]), VOCAB_CASES[name].get("vocab_size", COLUMNS)
    drawn = [torch.randperm(support, generator=generator)[:IDS] for _ in range(tokens)]
    ids = torch.stack(drawn) if drawn else torch.zeros(0, IDS)
    if tokens:
        made["grads"][:, 1] = 0.0  # a token of which the loss wants nothing
    id_grads = torch.randn(tokens, IDS, generator=generator)
    id_grads[1:2] = 0.0
    return made | {"ids": ids.int(), "id_grads": id_grads}


def run_ids_case(name: str, rank: int, size: int, group) -> dict:
    inputs, options = ids_inputs(name), as_rows({"with_entropy": True} | IDS_CASES[name])
    leaf = inputs["logits"].chunk(size, dim=1)[rank].clone().requires_grad_()
    with Collectives() as forward:
        outputs = vocab_parallel_logprobs(
            leaf * 1, inputs["labels"], tp_group=group, ids=inputs["ids"], **options
        )
    logprobs, entropy, of_ids = outputs[0], outputs[1], outputs[-1]
    wanted = [(logprobs, inputs["grads"][0]), (of_ids, inputs["id_grads"])]
    wanted += [] if entropy is None else [(entropy, inputs["grads"][1])]
    with Collectives() as backward:
        torch.autograd.backward(*zip(*wanted, strict=True))
    return {
        "logprobs": logprobs.detach(),
        "entropy": None if entropy is None else entropy.detach(),
        "of_ids": of_ids.detach(),
        "gradient": leaf.grad,
        "forward": forward.names,
        "backward": backward.names,
    }


SUPPORT_CASES = {
    "plain": {},
    "temperature and chunks": {"temperature": 0.7, "chunk_ids": 4},
    "no entropy": {},
    "collision": {"temperature": 0.7, "chunk_ids": 4, "with_collision": True},
}


def support_inputs(name: str) -> dict[str, torch.Tensor]:
    """[T, 5] sampling masks of 1 to 5 ids in any order, then -1; some wholly on one rank; the
    label among them.

    The first and the last tokens have none.
    """
    generator = torch.Generator().manual_seed(len(name))
    tokens = 9
    logits = torch.randn(tokens, COLUMNS, generator=generator) * 4
    logits[2] += 300
    support = torch.full((tokens, 5), -1, dtype=torch.int32)
    for token in range(tokens - 1):
        size = 1 + token % 5
        support[token, :size] = torch.randperm(COLUMNS, generator=generator)[:size].int()
    support[1, :2] = torch.tensor([11, 9])  # the last of four ranks
    labels = support[:, 0].long().clamp(min=0)
    support[0] = -1
    return {
        "logits": logits,
        "labels": labels,
        "support": support,
        "grads": torch.randn(2, tokens, generator=generator),
    }


def ragged(support: torch.Tensor) -> SamplingMasks:
    """[T, K] with -1 behind each token's ids."""
    return SamplingMasks.of(support[support >= 0], (support >= 0).sum(dim=1).numpy())


def run_support_case(name: str, rank: int, size: int, group) -> dict:
    inputs, options = support_inputs(name), {"with_entropy": name != "no entropy"} | SUPPORT_CASES[name]
    return run_sharded(
        inputs,
        rank,
        size,
        lambda logits: sampling_mask_logprobs(
            logits, inputs["labels"], ragged(inputs["support"]), tp_group=group, **options
        ),
    )


LINEAR_CASES = {
    "plain": {"chunk_tokens": 4},
    "temperature, padding": {"temperature": 0.7, "vocab_size": 10, "chunk_tokens": 3},
    "a rank of padding, no entropy": {"vocab_size": 6, "with_entropy": False},
    "share of the caller": {"reduce_hidden_gradient": False, "chunk_tokens": 4},
    "bfloat16": {"temperature": 0.7, "chunk_tokens": 4},
    "bfloat16, fp32 head": {"temperature": 0.7, "vocab_size": 11, "chunk_tokens": 4, "fp32_lm_head": True},
    "float64": {},
    "sampled rows": {"temperature": 0.7, "vocab_size": 10, "chunk_tokens": 3, "sampled": MASK},
    "sampled rows, share of the caller": {
        "reduce_hidden_gradient": False,
        "chunk_tokens": 4,
        "sampled": MASK,
    },
    "sampled rows, bfloat16, fp32 head": {"chunk_tokens": 3, "fp32_lm_head": True, "sampled": MASK},
    "no sampled row": {"sampled": [0] * TOKENS},
    "collision": {"temperature": 1.3, "vocab_size": 10, "chunk_tokens": 3, "with_collision": True},
    "sampled rows, bfloat16, fp32 head, collision": {
        "chunk_tokens": 3,
        "fp32_lm_head": True,
        "with_collision": True,
        "sampled": MASK,
    },
}


def linear_inputs(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    labels = torch.arange(TOKENS) % 6
    labels[4] = -100
    hidden = (torch.randn(TOKENS, HIDDEN, generator=generator) * 2).to(type_of(name))
    spoil(hidden, LINEAR_CASES[name].get("sampled", ()))
    return {
        "hidden": hidden,
        "weight": torch.randn(COLUMNS, HIDDEN, generator=generator).to(type_of(name)),
        "labels": labels,
        "grads": torch.randn(2, TOKENS, generator=generator),
    }


def run_linear_case(name: str, rank: int, size: int, group) -> dict:
    inputs, options = linear_inputs(name), as_rows({"with_entropy": True} | LINEAR_CASES[name])
    hidden = inputs["hidden"].requires_grad_()
    weight = inputs["weight"].chunk(size)[rank].clone().requires_grad_()
    return run_case(
        lambda: linear_logprobs(hidden, weight, inputs["labels"], tp_group=group, **options),
        [hidden, weight],
        inputs["grads"],
    )


KINDS = {
    "vocab": (VOCAB_CASES, vocab_inputs, run_vocab_case),
    "ids": (IDS_CASES, ids_inputs, run_ids_case),
    "support": (SUPPORT_CASES, support_inputs, run_support_case),
    "linear": (LINEAR_CASES, linear_inputs, run_linear_case),
}


def main(rank: int, folder: str) -> None:
    init_gloo(rank, folder)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {1: None, 2: pairs[rank // 2], 4: dist.group.WORLD}
    results = {
        kind: {(name, size): run(name, rank % size, size, groups[size]) for name in cases for size in SIZES}
        for kind, (cases, _, run) in KINDS.items()
    }
    results["inputs"] = {
        kind: {name: make(name) for name in cases} for kind, (cases, make, _) in KINDS.items()
    }
    results["options"] = {kind: cases for kind, (cases, _, _) in KINDS.items()}
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # fork: torch is imported once for all ranks; this process has run nothing of it.
    mp.start_processes(main, args=(sys.argv[1],), nprocs=WORLD, start_method="fork")
