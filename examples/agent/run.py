"""An agent, trained as it is: a harness with a tool asks the policy over OpenAI's protocol, and learns.

run.py [--agent openai_agents] [--seed 0] [--steps 32] [--out DIR] [-- more launcher flags]
run.py --stop

Makes a tiny Qwen3-MoE that calls a tool in the right form and mostly with wrong numbers, serves it with
SGLang, and trains it with Megatron on episodes of the agent, whose only word on them is a reward.
"""

import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE)]

from local_run import Example, local_server, make_model, megatron_flags, torchrun, train, wait_ready  # noqa: E402
from task import rows  # noqa: E402

EXAMPLE = Example("agent")
AGENTS = sorted(path.stem.removeprefix("with_") for path in HERE.glob("with_*.py"))
UNTRAINED = {"smolagents"}
"""Not trained here: its instructions have 3,400 tokens of this model, which knows sums alone."""
PYTHON = ROOT / ".venv-agents/bin/python"
"""What `make setup-agents` makes: the agents' packages need others than the servers."""


def parse_arguments(argv):
    parser = EXAMPLE.parser(
        __doc__, steps=32, seed_help="of the model, the sampling and the order of the sums"
    )
    add = parser.add_argument
    trained = [name for name in AGENTS if name not in UNTRAINED]
    add("--agent", choices=trained, default="openai_agents", help="which harness (default openai_agents)")
    add("--python", type=Path, default=PYTHON, help="the harness's interpreter (default .venv-agents')")
    add(
        "--supervised-steps", type=int, default=400, help="of the training that makes the model (default 400)"
    )
    return parser.parse_args(argv)


def training_command(out, url, options):
    """torchrun's command line."""
    flags = [
        *megatron_flags(out / "model", out / "tensorboard"),
        "--seq-length",
        128,
        "--expert-model-parallel-size",
        2,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        64,
        "--train-iters",
        options.steps,
        "--lr",
        3e-4,
        "--min-lr",
        2e-5,
        "--lr-decay-style",
        "linear",
        "--seed",
        options.seed + 1,
        "--eval-interval",
        options.steps,
        "--rollout-url",
        url,
        "--rollout-prompts",
        out / "train.jsonl",
        "--rollout-input-key",
        "messages",
        "--rollout-label-key",
        "label",
        "--rollout-group-size",
        8,
        "--rollout-max-new-tokens",
        24,
        # The agent: a function that runs one episode against a URL, in a process of its own.
        "--rollout-agent",
        f"{HERE / f'with_{options.agent}.py'}:run",
        "--rollout-agent-python",
        options.python,
        "--rollout-agent-max-turns",
        6,
        "--rollout-agent-timeout-s",
        120,
        "--rollout-correction-preset",
        "decoupled_token_is",
        "--rollout-log-dir",
        out,
        "--rollout-save-trajectories",
        out / "samples",
        *options.launcher_flags,
    ]
    return torchrun(flags, processes=2)


def run(options, out, running):
    started = time.monotonic()
    EXAMPLE.say(f"1/4 making sums and a tiny Qwen3-MoE that calls a tool mostly wrongly in {out}")
    (out / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(512, seed=options.seed)))
    make_model(
        HERE / "make_model.py", out / "model", "--seed", options.seed, "--steps", options.supervised_steps
    )
    EXAMPLE.say(f"2/4 starting SGLang in bfloat16; its log is {out / 'server.log'}")
    server = local_server(
        out / "model", dtype="bfloat16", log_path=out / "server.log", seed=options.seed, slots=64
    )
    server.start()
    running.add(server.pid)
    try:
        wait_ready(server)
        EXAMPLE.say(f"3/4 training with 2 processes on the agent {options.agent}; log: {out / 'train.log'}")
        status = train(training_command(out, server.url, options), out / "train.log", running, server.pid)
    finally:
        server.stop()
    if status:
        EXAMPLE.say(f"training ended with status {status}: see {out / 'train.log'} and {out / 'server.log'}")
        return status
    from megatron_rl_corr.commands.report.page import write_page
    from megatron_rl_corr.observability.metrics_file import read_metrics

    rewards = [step["reward/mean"] for step in read_metrics(out / "metrics.jsonl")]
    EXAMPLE.say(f"4/4 the run, drawn: {write_page(out)}")
    few = max(1, len(rewards) // 10)
    EXAMPLE.say(
        f"reward: {rewards[0]:.2f} in the first step, of the model as it was; "
        f"{sum(rewards[-few:]) / few:.2f} over the last {few}; "
        f"all of it took {time.monotonic() - started:.0f} s"
    )
    return 0


def main(argv=None):
    return EXAMPLE.main(run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
