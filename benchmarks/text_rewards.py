"""What text costs the event loop: long responses that end together are decoded, sent to worker
processes and scored.

text_rewards.py [--samples 64] [--tokens 32768] [--workers 2]

The tokenizer is a byte-level one, trained here on the project's pages; the reward functions are
the package's. `loop` is the longest time that the event loop, which also talks to the servers,
could do nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.quiet import only_tables  # noqa: E402
from megatron_rl_corr.data.prompt import Prompt  # noqa: E402
from megatron_rl_corr.data.rewards import Rewards  # noqa: E402
from megatron_rl_corr.data.tokenizer import Tokenizer  # noqa: E402
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan  # noqa: E402


def tokenizer(text: str) -> Tokenizer:
    """Merges of bytes, as those of most models."""
    from tokenizers import Tokenizer as Bytes
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Bytes(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=5000, initial_alphabet=alphabet))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=made), "here")


def sample(ids: list[int]) -> Trajectory:
    """A response of these ids."""
    return Trajectory(
        0,
        0,
        torch.tensor([1]),
        torch.tensor(ids),
        torch.zeros(len(ids)),
        "stop",
        (VersionSpan("v", 0, len(ids)),),
        0,
        "http://server",
    )


async def longest_pause(worst: list[float]) -> None:
    """Keep the longest time between two turns of the loop that are 1 ms apart."""
    last = time.perf_counter()
    while True:
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        worst[0], last = max(worst[0], now - last - 0.001), now


async def run(spec: str, words: Tokenizer, samples: list[Trajectory], workers: int) -> tuple[float, float]:
    """Seconds until all samples have their rewards, and the loop's longest pause."""
    rewards, prompt = (
        Rewards(spec, workers=workers, limit_s=60.0, tokenizer=words),
        Prompt(0, [1], {}, "p", label="x"),
    )
    await rewards.start()
    await rewards.score(prompt, samples[0])
    worst = [0.0]
    watch, begun = asyncio.create_task(longest_pause(worst)), time.perf_counter()
    await asyncio.gather(*[rewards.score(prompt, one) for one in samples])
    seconds = time.perf_counter() - begun
    watch.cancel()
    await rewards.close()
    return seconds, worst[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("samples", 64), ("tokens", 32768), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))
    words = tokenizer(text)
    ids = words.encode(text)
    ids = (ids * (1 + options.tokens // len(ids)))[: options.tokens]
    samples = [sample(ids) for _ in range(options.samples)]
    print(
        "| reward | samples | tokens of each | seconds | ms a sample | loop, ms |\n|---|---|---|---|---|---|"
    )
    for spec in (f"length:max={options.tokens}", "exact", "f1", "math"):
        seconds, pause = asyncio.run(run(spec, words, samples, options.workers))
        print(
            f"| {spec} | {options.samples} | {options.tokens} | {seconds:.2f} | "
            f"{1e3 * seconds / options.samples:.1f} | {1e3 * pause:.0f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    with only_tables():
        sys.exit(main())
