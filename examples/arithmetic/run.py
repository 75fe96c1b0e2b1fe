"""Arithmetic: from a data set of chat messages and a verifier to a Hugging Face folder that solves more.

run.py [--seed 0] [--steps 80] [--out DIR] [-- more launcher flags]
run.py --stop

Makes a tiny Qwen3-MoE that is mostly wrong, serves it with SGLang, trains it with Megatron and the
built-in `math` reward on chat messages, evaluates it on two sets of held-out questions, and asks the
exported folder the same.
"""

import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE)]

from local_run import Example, local_server, make_model, megatron_flags, torchrun, train, wait_ready  # noqa: E402
from solve import NEW_TOKENS, share_solved  # noqa: E402
from task import KINDS, split  # noqa: E402

EXAMPLE = Example("arithmetic")
EVERY = 20
"""Steps from one evaluation to the next."""


def parse_arguments(argv):
    parser = EXAMPLE.parser(
        __doc__, steps=80, seed_help="of the model, the sampling and the order of the questions"
    )
    parser.add_argument(
        "--supervised-steps", type=int, default=450, help="of the training that makes the model (default 450)"
    )
    return parser.parse_args(argv)


def write_data(folder):
    """train.jsonl, and a held-out file of each kind: JSON lines with messages and a label."""
    folder.mkdir()
    parts = {kind: split(kind) for kind in KINDS}
    files = {"train": [row for training, _ in parts.values() for row in training]}
    files |= {kind: held_out for kind, (_, held_out) in parts.items()}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def training_command(out, url, options):
    """torchrun's command line."""
    model, data = out / "model", out / "data"
    flags = [
        *megatron_flags(model, out / "tensorboard"),
        "--expert-model-parallel-size",
        2,
        "--micro-batch-size",
        128,
        "--global-batch-size",
        256,
        "--train-iters",
        options.steps,
        "--lr",
        5e-4,
        "--min-lr",
        5e-5,
        "--lr-decay-style",
        "linear",
        "--seed",
        options.seed + 1,
        "--eval-interval",
        EVERY,
        "--rollout-url",
        url,
        # The data: messages, in the tokenizer's own chat template.
        "--rollout-prompts",
        data / "train.jsonl",
        "--rollout-input-key",
        "messages",
        "--rollout-label-key",
        "label",
        # The reward: math-verify compares the answer with the label.
        "--rollout-reward-function",
        "math",
        # Groups of 16 whose samples are all right or all wrong are replaced, as long as there are others.
        "--rollout-group-size",
        16,
        "--rollout-max-new-tokens",
        NEW_TOKENS,
        "--rollout-group-filter",
        "spread",
        "--rollout-group-filter-exhausted",
        "take",
        # Two sets that are not trained on, answered greedily.
        "--rollout-eval-prompts",
        *[f"{kind}={data / kind}.jsonl" for kind in KINDS],
        "--rollout-eval-temperature",
        0,
        "--rollout-correction-preset",
        "decoupled_geo_rs_token_tis",
        # The preset's bounds are for long responses: of five tokens a single one moves the mean by a
        # fifth of itself.
        "--rollout-rs",
        "seq_mean_ratio",
        "--rollout-rs-threshold",
        "0.9_1.1",
        "--rollout-log-dir",
        out,
        "--rollout-save-trajectories",
        out / "samples",
        "--rollout-save-hf",
        out / "hf",
        *options.launcher_flags,
    ]
    return torchrun(flags, processes=2)


def run(options, out, running):
    started = time.monotonic()
    EXAMPLE.say(f"1/5 making data of chat messages and a tiny Qwen3-MoE that is mostly wrong in {out}")
    write_data(out / "data")
    make_model(
        HERE / "make_model.py", out / "model", "--seed", options.seed, "--steps", options.supervised_steps
    )
    before = sampled(out, out / "model")
    EXAMPLE.say(f"2/5 starting SGLang in bfloat16; its log is {out / 'server.log'}")
    server = local_server(
        out / "model", dtype="bfloat16", log_path=out / "server.log", seed=options.seed, slots=128
    )
    server.start()
    running.add(server.pid)
    try:
        wait_ready(server)
        EXAMPLE.say(f"3/5 training with 2 processes; their log is {out / 'train.log'}")
        status = train(training_command(out, server.url, options), out / "train.log", running, server.pid)
    finally:
        server.stop()
    if status:
        EXAMPLE.say(f"training ended with status {status}: see {out / 'train.log'} and {out / 'server.log'}")
        return status
    from megatron_rl_corr.commands.report.page import write_page

    EXAMPLE.say(f"4/5 the run, drawn: {write_page(out)}")
    exported = out / "hf" / f"iter_{options.steps:07d}"
    EXAMPLE.say(f"5/5 the exported folder {exported}, asked with transformers:")
    after = sampled(out, exported)
    for kind in KINDS:
        greedy = share_solved(exported, out / "data" / f"{kind}.jsonl")
        EXAMPLE.say(
            f"    held-out {kind:<12} right when sampled: {before[kind]:.2f} before, {after[kind]:.2f} "
            f"after; solved greedily: {greedy:.2f}"
        )
    EXAMPLE.say(f"all of it took {time.monotonic() - started:.0f} s")
    return 0


def sampled(out, model):
    """Kind -> share of right answers, of 8 samples to each held-out question."""
    return {
        kind: share_solved(model, out / "data" / f"{kind}.jsonl", samples=8, greedy=False) for kind in KINDS
    }


def main(argv=None):
    return EXAMPLE.main(run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
