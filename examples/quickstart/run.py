"""The quickstart: make a tiny MoE, serve it with SGLang or vLLM, train it with Megatron against
that, draw the run.

run.py [--engine vllm] [--seed 0] [--steps 60] [--server-dtype bfloat16] [--router-replay R3] [--asynchronous]
       [--colocate] [--out DIR] [-- more launcher flags]
run.py --stop
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE)]

from comparison import Run, draw, table  # noqa: E402
from local_run import (  # noqa: E402
    HIDDEN_GPU,
    Example,
    local_server,
    make_model,
    megatron_flags,
    torchrun,
    train,
    wait_ready,
)
from reward import KINDS, WANTED_TOKENS  # noqa: E402

from tools import cpu  # noqa: E402

EXAMPLE = Example("quickstart")
PROMPTS_A_KIND = 4
TITLES = {"sglang": "SGLang", "vllm": "vLLM"}


def parse_arguments(argv):
    parser = EXAMPLE.parser(
        __doc__, steps=60, seed_help="of the model's weights, the sampling and the order of prompts"
    )
    add = parser.add_argument
    add(
        "--engine",
        choices=TITLES,
        default="sglang",
        help="the program that samples; vllm needs make setup-vllm",
    )
    add(
        "--server-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="bfloat16 shows a real mismatch with the float32 trainer, float32 next to none",
    )
    add(
        "--router-replay",
        choices=("off", "R3"),
        default="off",
        help="experts of a token in training: Megatron's choice, or the server's",
    )
    add(
        "--asynchronous",
        action="store_true",
        help="train twice: each step waiting for its samples, then with samples that are made during the "
        "step before",
    )
    add(
        "--colocate",
        action="store_true",
        help="trainer and server take turns, as on the same GPUs: while one works, the other frees memory",
    )
    options = parser.parse_args(argv)
    if options.colocate and (options.engine != "sglang" or options.asynchronous):
        parser.error(
            "--colocate: the server has no memory while the trainer trains, so it can't sample ahead "
            "(--asynchronous); and the release of its memory is tested with --engine sglang alone"
        )
    if options.engine == "vllm" and options.router_replay != "off":
        parser.error(
            "--router-replay R3 needs --engine sglang: without a GPU, vLLM returns routed experts from its "
            "V2 model runner only, which Triton's interpreter runs at some ten tokens a second"
        )
    return options


def write_prompts(path):
    rows = [{"prompt": f"{kind} {i}:", "kind": kind} for kind in KINDS for i in range(PROMPTS_A_KIND)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def training_command(out, folder, model, url, options, *ahead):
    """torchrun's command line; folder: for the run's logs, ahead: flags for sampling ahead of training."""
    flags = [
        *megatron_flags(model, folder / "tensorboard"),
        "--tensor-model-parallel-size",
        2,
        "--pipeline-model-parallel-size",
        2,
        "--sequence-parallel",
        "--expert-model-parallel-size",
        2,
        "--expert-tensor-parallel-size",
        1,
        "--micro-batch-size",
        16,
        "--global-batch-size",
        64,
        "--train-iters",
        options.steps,
        "--lr",
        2e-3,
        "--lr-decay-style",
        "constant",
        "--seed",
        options.seed + 1,
        "--eval-interval",
        1000,
        "--rollout-url",
        url,
        "--rollout-engine",
        options.engine,
        "--rollout-prompts",
        out / "prompts.jsonl",
        "--rollout-reward-function",
        f"{HERE / 'reward.py'}:reward",
        "--rollout-group-size",
        8,
        "--rollout-max-new-tokens",
        WANTED_TOKENS,
        "--rollout-log-dir",
        folder,
        # Token weights truncated at 2; a response whose geometric mean ratio is off by 0.4% is rejected.
        "--rollout-correction-preset",
        "decoupled_geo_rs_token_tis",
        "--rollout-rs",
        "seq_mean_ratio",
        "--rollout-rs-threshold",
        "0.996_1.004",
        "--router-replay",
        options.router_replay,
        *ahead,
        *(["--rollout-colocate", "--rollout-weight-transport", "tensor"] if options.colocate else []),
        *options.launcher_flags,
    ]
    return torchrun(flags, processes=4)


def server_flags(options):
    flags = {
        "--enable-return-routed-experts": options.router_replay == "R3",
        "--enable-memory-saver": options.colocate,
    }
    return [flag for flag, given in flags.items() if given]


def run(options, out, running):
    EXAMPLE.say(f"1/4 making a tiny Qwen3-MoE and its tokenizer in {out / 'model'}")
    model = out / "model"
    make_model(HERE / "make_model.py", model, "--seed", options.seed)
    write_prompts(out / "prompts.jsonl")
    EXAMPLE.say(
        f"2/4 starting {TITLES[options.engine]} in {options.server_dtype}; its log is {out / 'server.log'}"
    )
    server = local_server(
        model,
        engine=options.engine,
        dtype=options.server_dtype,
        log_path=out / "server.log",
        seed=options.seed,
        slots=64,
        extra_arguments=server_flags(options),
    )
    server.start()
    running.add(server.pid)
    try:
        wait_ready(server)
        used = cpu.transformer_engine(HIDDEN_GPU)
        for folder, ahead in runs(out, options).items():
            folder.mkdir(exist_ok=True)
            how, log = ", samples made during the step before" if ahead else "", folder / "train.log"
            EXAMPLE.say(
                f"3/4 training with 4 processes, TP 2 x PP 2 x EP 2, Transformer Engine: {used}{how}; "
                f"their log is {log}"
            )
            status = train(
                training_command(out, folder, model, server.url, options, *ahead), log, running, server.pid
            )
            if status:
                EXAMPLE.say(f"training ended with status {status}: see {log} and {out / 'server.log'}")
                return status
    finally:
        server.stop()
    from megatron_rl_corr.commands.report.page import write_page

    for folder in runs(out, options):
        EXAMPLE.say(f"4/4 the run, drawn: {write_page(folder)}")
    if options.asynchronous:
        compared = [Run("synchronous", out), Run("asynchronous", out / "asynchronous")]
        print(table(compared))
        EXAMPLE.say(f"both, drawn: {draw(compared, out / 'comparison.png')}")
    return 0


def runs(out, options):
    """The folder of each training run, and its flags for sampling ahead of training."""
    # A step moves the tiny model by more than 0.4%: samples of older weights need wider bounds.
    ahead = ["--rollout-max-lag", 1, "--rollout-rs-threshold", "0.7_1.4"]
    return {out: []} | ({out / "asynchronous": ahead} if options.asynchronous else {})


def main(argv=None):
    return EXAMPLE.main(run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
