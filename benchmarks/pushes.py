"""Many pushes in whole runs against real servers: does the probe accuse one that is well, and
what does it cost?

python benchmarks/pushes.py [--pushes 500] [--engine sglang vllm] [--dtype float32 bfloat16]
[--model dense moe]
                            [--out DIR]

A run trains a tiny Qwen3 with Adam on answers of two tokens, in float32, so that its weights move by as
much as a real run's in a step, and its log-probs become as sharp. Of each run: its exit status, the
pushes, those after which a server was suspicious and asked for more, the mean |log-ratio| of the worst
text over what simulated rounding explains, the bits against each server (positive: it differs), and the
seconds of a push with the probe and, in a shorter run before, without.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from local_run import environment, local_server, megatron_flags, torchrun  # noqa: E402

from benchmarks.quiet import only_tables  # noqa: E402

PLAIN = 40
"""Pushes of the run without the probe."""
REWARD = """def reward(prompt, output_ids, finish_reason):
    return (output_ids[0] * 7 + prompt.input_ids[0]) % 5 / 4
"""
COLUMNS = (
    "engine",
    "server",
    "model",
    "status",
    "pushes",
    "asked again",
    "times rounding: median",
    "max",
    "most bits",
    "push s",
    "without probe s",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pushes", type=int, default=500)
    add("--engine", nargs="+", choices=("sglang", "vllm"), default=["sglang", "vllm"])
    add(
        "--dtype",
        nargs="+",
        choices=("float32", "bfloat16"),
        default=["float32", "bfloat16"],
        help="the servers'",
    )
    add("--model", nargs="+", choices=("dense", "moe"), default=["dense", "moe"])
    add("--out", type=Path, help="new folder that keeps the runs (default: a temporary one)")
    options = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        for kind, engine, dtype in product(options.model, options.engine, options.dtype):
            row = measured(out / f"{engine}-{dtype}-{kind}", kind, engine, dtype, options.pushes)
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


def measured(folder: Path, kind: str, engine: str, dtype: str, pushes: int) -> tuple:
    """One row of the table."""
    folder.mkdir(parents=True)
    model = write_inputs(folder, kind)
    server = local_server(model, engine=engine, dtype=dtype, log_path=folder / "server.log", seed=0, slots=32)
    server.start()
    try:
        server.wait_ready()
        plain, _ = run(folder / "plain", model, server.url, engine, PLAIN, "--rollout-probe-push", "off")
        rows, status = run(folder / "probed", model, server.url, engine, pushes)
    finally:
        server.stop()
    over = [row["rollout/probe_over_rounding"] for row in rows]
    return (
        engine,
        dtype,
        kind,
        status,
        len(rows),
        sum(row["rollout/probe_rounds"] > 0 for row in rows),
        f"{statistics.median(over):.2f}",
        f"{max(over):.2f}",
        f"{max(row['rollout/probe_bits'] for row in rows):.1f}",
        *(f"{statistics.median(row['time/push_s'] for row in each):.2f}" for each in (rows, plain)),
    )


def write_inputs(folder: Path, kind: str) -> Path:
    """Write prompts.jsonl, reward.py and a tiny Qwen3, dense or moe, whose folder is returned."""
    model = folder / "model"
    maker = [sys.executable, ROOT / "benchmarks/tiny_qwen3_worker.py", model, kind]
    subprocess.run(maker, check=True, capture_output=True)
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n} + {n}:"}}\n' for n in range(16)))
    (folder / "reward.py").write_text(REWARD)
    return model


def run_flags(inputs: Path, log: Path, urls: list[str]) -> list:
    """Flags of a run with the inputs of `write_inputs`, whatever it trains with."""
    return [
        "--global-batch-size",
        8,
        "--lr-decay-style",
        "constant",
        "--eval-interval",
        100000,
        "--rollout-url",
        *urls,
        "--rollout-prompts",
        inputs / "prompts.jsonl",
        "--rollout-reward-function",
        f"{inputs / 'reward.py'}:reward",
        "--rollout-group-size",
        4,
        "--rollout-max-new-tokens",
        2,
        "--rollout-log-dir",
        log,
        "--rollout-correction-preset",
        "decoupled_token_is",
    ]


def run(folder: Path, model: Path, url: str, engine: str, steps: int, *more: str) -> tuple[list[dict], int]:
    """The rows of metrics.jsonl of a run of one process, and its exit status."""
    dense = json.loads((model / "config.json").read_text())["model_type"] == "qwen3"
    flags = megatron_flags(model, folder / "tensorboard")
    flags = [flag for flag in flags if not dense or not str(flag).startswith("--moe-")]
    command = torchrun(
        [
            *flags,
            *run_flags(folder.parent, folder, [url]),
            "--micro-batch-size",
            8,
            "--train-iters",
            steps,
            "--lr",
            1e-3,
            "--rollout-engine",
            engine,
            *more,
        ],
        processes=1,
    )
    folder.mkdir()
    with open(folder / "train.log", "w") as log:
        status = subprocess.run(
            command, cwd=ROOT, env=environment("megatron"), stdout=log, stderr=log
        ).returncode
    if not (folder / "metrics.jsonl").exists():
        raise SystemExit(f"{folder}: no step: {(folder / 'train.log').read_text()[-3000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], status


if __name__ == "__main__":
    with only_tables():
        main()
