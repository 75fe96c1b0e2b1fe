"""Tokens a second from the bytes of a /generate answer to tensors, on one core, beside orjson
and typed msgspec.

python benchmarks/ingest.py [--lengths 128 1024 4096 32768] [--repeats 31] [--routes]

With --routes: answers with routed experts, seconds an answer beside orjson, base64 and numpy, which check
nothing. The answers have the form of SGLang 0.5.23, 44 bytes a token. All give the same tensors, and the
run fails if not. Times are the thread's own, so that other work on the machine counts less; the
least of the repeats.
"""

import argparse
import base64
import datetime
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import orjson
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.correction import machine_name
from benchmarks.quiet import only_tables
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.engines.sglang.responses import parse_generate
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory

VOCAB_SIZE = 151_936
PROMPT = torch.tensor([1, 2, 3])
MODELS = {
    "30B-A3B": ExpertShape(48, tuple(range(48)), 8, 128),
    "235B-A22B": ExpertShape(94, tuple(range(94)), 8, 128),
    "1T, first layer dense": ExpertShape(61, tuple(range(1, 61)), 8, 384),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 4096, 32768])
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--routes", action="store_true", help="answers with routed experts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = (
        f"Python {platform.python_version()}, orjson {orjson.__version__}, msgspec {msgspec.__version__}"
    )
    print(f"{datetime.date.today()}, {versions}, {machine_name('cpu')}\n")
    if options.routes:
        print_routes(options.lengths, options.repeats)
        return
    print("| response | this package (M tokens/s) | orjson | msgspec, typed | ratio to orjson | to msgspec |")
    print("|---|---|---|---|---|---|")
    for text in (False, True):
        for length in options.lengths:
            body = answer(length, text)
            check_equal(ours(body), plain(body))
            check_equal(ours(body), typed(body))
            times = seconds((ours, plain, typed), body, options.repeats)
            our, by_orjson, by_msgspec = (length / taken / 1e6 for taken in times)
            print(
                f"| {length} tokens{', with their text' * text} | {our:.2f} | {by_orjson:.2f} | "
                f"{by_msgspec:.2f} | {our / by_orjson:.2f}x | {our / by_msgspec:.2f}x |"
            )


def print_routes(lengths: Sequence[int], repeats: int) -> None:
    """A table of models and lengths."""
    print("| model | response | MB | this package (ms) | orjson, base64, numpy, unchecked | ratio |")
    print("|---|---|---|---|---|---|")
    for name, shape in MODELS.items():
        for length in lengths:
            body, routes = routed_answer(length, shape)
            check_equal([routed(body, shape)], [routes[:, list(shape.layers)]])
            times = seconds([partial(routed, shape=shape), unchecked], body, repeats)
            print(
                f"| {name} | {length} tokens | {len(body) / 1e6:.1f} | {times[0] * 1e3:.1f} | "
                f"{times[1] * 1e3:.1f} | {times[1] / times[0]:.2f}x |"
            )


def routed_answer(length: int, shape: ExpertShape) -> tuple[bytes, torch.Tensor]:
    """An answer whose tokens went to random distinct experts, as SGLang writes it, and the routes."""
    draw = np.random.default_rng(0)
    rows = PROMPT.numel() + length - 1
    start, step = draw.integers(shape.experts, size=(2, rows, shape.num_layers, 1))
    # k distinct ids: an arithmetic progression modulo a number of experts, by an odd step.
    ids = (start + (step | 1) * np.arange(shape.top_k)) % shape.experts
    found = orjson.loads(answer(length, False))
    found["meta_info"]["routed_experts"] = base64.b64encode(ids.astype("<i4").tobytes()).decode()
    return orjson.dumps(found), torch.from_numpy(ids).to(shape.dtype)


def routed(body: bytes, shape: ExpertShape) -> torch.Tensor:
    """With all checks: that experts exist and are distinct, for each token and layer."""
    return trajectory_in(body, shape).routed_experts


def unchecked(body: bytes) -> np.ndarray:
    """As a client decodes them that trusts the server: still int32, of every layer."""
    found = orjson.loads(body)["meta_info"]
    np.array([row[0] for row in found["output_token_logprobs"]], dtype=np.float32)
    return np.frombuffer(base64.b64decode(found["routed_experts"]), "<i4")


def ours(body: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """With all its checks."""
    trajectory = trajectory_in(body)
    return trajectory.output_ids, trajectory.rollout_logprobs


def trajectory_in(body: bytes, experts: ExpertShape | None = None) -> Trajectory:
    """What the client makes of an answer."""
    asked = SampleRequest(
        PROMPT,
        SamplingParams(1 << 20),
        "r1",
        seed=0,
        prompt_index=0,
        sample_index=0,
        vocab_size=VOCAB_SIZE,
        experts=experts,
    )
    return parse_generate(body, asked, server="http://127.0.0.1")


def plain(body: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """With the one check that the ids are those the log-probs are of."""
    answer = orjson.loads(body)
    rows = answer["meta_info"]["output_token_logprobs"]
    ids = np.array(answer["output_ids"], dtype=np.int64)
    if not np.array_equal(ids, [row[1] for row in rows]):
        raise ValueError("the ids differ")
    return torch.from_numpy(ids), torch.from_numpy(np.array([row[0] for row in rows], dtype=np.float32))


class Meta(msgspec.Struct):
    """The part of meta_info that `typed` reads; the rest is skipped without making objects of it."""

    output_token_logprobs: list[tuple[float | None, int, str | None]]


class Answer(msgspec.Struct):
    """An answer, as `typed` decodes it."""

    output_ids: list[int]
    meta_info: Meta


DECODER = msgspec.json.Decoder(Answer)


def typed(body: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """As `plain`, decoded into types that msgspec checks."""
    answer = DECODER.decode(body)
    values, row_ids, _ = zip(*answer.meta_info.output_token_logprobs, strict=True)
    ids = np.array(answer.output_ids, dtype=np.int64)
    if not np.array_equal(ids, row_ids):
        raise ValueError("the ids differ")
    return torch.from_numpy(ids), torch.from_numpy(np.array(values, dtype=np.float32))


def check_equal(some: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> None:
    if not all(torch.equal(one, other) for one, other in zip(some, others, strict=True)):
        raise SystemExit("they read different tensors")


def seconds(works: Sequence[Callable[[bytes], object]], body: bytes, repeats: int) -> list[float]:
    """The least time of each; they take turns, so that other work on the machine slows all of them."""
    times = [[] for _ in works]
    for _ in range(repeats):
        for work, taken in zip(works, times, strict=True):
            start = time.thread_time()
            work(body)
            taken.append(time.thread_time() - start)
    return list(map(min, times))


def answer(length: int, text: bool) -> bytes:
    """An answer of random ids, whose log-probs are float32 written as the doubles they are."""
    draw = random.Random(0)
    ids = [draw.randrange(VOCAB_SIZE) for _ in range(length)]
    logprobs = np.array([-draw.expovariate(0.5) for _ in ids], dtype=np.float32).tolist()
    words = ["".join(draw.choices("abcdefghij \n", k=draw.randint(1, 8))) for _ in ids]
    meta = {
        "id": "e99ec98902664b42930ff6ca2adca0f0",
        "finish_reason": {"type": "length", "length": length},
        "prompt_tokens": PROMPT.numel(),
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [
            [value, token, word if text else None]
            for value, token, word in zip(logprobs, ids, words, strict=True)
        ],
        "output_token_logprobs_length": length,
        "completion_tokens": length,
        "cached_tokens": 0,
        "weight_versions": [{"version": "default", "start": 0, "end": length}],
        "e2e_latency": 3.262865906001025,
    }
    return orjson.dumps({"text": "".join(words), "output_ids": ids, "meta_info": meta})


if __name__ == "__main__":
    with only_tables():
        main()
