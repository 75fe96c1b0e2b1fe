"""The study: the same run with a mismatch under each correction, and a twin without one, against a
real SGLang server.

run.py [--quick] [--arms none,twin] [--seeds 2,3,4] [--steps N] [--response-length N] [--lr X]
       [--rounding int4_group] [--lag K] [--out DIR] [-- more launcher flags]
run.py --stop

Called again with the same folder it goes on: finished runs are kept, one that was cut short is begun anew.
"""

import json
import re
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE), str(HERE.parent / "quickstart")]

from arms import ARMS, QUICK  # noqa: E402
from local_run import Example, local_server, make_model, megatron_flags, torchrun, train, wait_ready  # noqa: E402
from reward import KINDS  # noqa: E402

from megatron_rl_corr.files import write_atomically  # noqa: E402
from megatron_rl_corr.observability.metrics_file import FILE_NAME, read_metrics  # noqa: E402

EXAMPLE = Example("study")
PROMPTS_A_KIND, LONGEST_PROMPT = 4, 10
GROUP, BATCH = 8, 64
NOT_FINITE = re.compile("found (NaN|Inf) in local grad norm")
"""What Megatron ends a run with whose gradient is not finite."""
SAMPLES = "trajectories"
OF_A_RUN = ("steps", "response_length", "lr", "rounding", "lag", "launcher_flags")
"""Settings that all runs of a folder share."""


def parse_arguments(argv):
    parser = EXAMPLE.parser(__doc__, steps=150)
    add = parser.add_argument
    add("--quick", action="store_true", help=f"the arms {', '.join(QUICK)} with seed 2")
    add("--arms", type=_names, help=f"of {','.join(ARMS)} (default all)")
    add("--seeds", type=_numbers, help="of the model, the order of prompts and the trainer (default 2,3,4)")
    add(
        "--response-length", type=int, default=32, help="tokens that a response may have, and is rewarded for"
    )
    add("--lr", type=float, default=8e-3, help="learning rate")
    add(
        "--rounding",
        choices=("none", "fp8_blockwise", "int4_group"),
        default="int4_group",
        help="of the weights that are pushed",
    )
    add("--lag", type=int, default=4, help="versions that samples may be old")
    options = parser.parse_args(argv)
    options.arms = options.arms or (QUICK if options.quick else tuple(ARMS))
    options.seeds = options.seeds or ((2,) if options.quick else (2, 3, 4))
    options.out = options.out or EXAMPLE.home / ("quick" if options.quick else "full")
    return options


def _names(text):
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise ValueError(unknown)
    return names


def _numbers(text):
    return tuple(map(int, text.split(",")))


def write_prompts(path, response_length):
    rows = [
        {"prompt": f"{kind} {i}:", "kind": kind, "wanted_tokens": response_length}
        for kind in KINDS
        for i in range(PROMPTS_A_KIND)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def training_command(out, folder, arm, seed, url, options, model=None):
    """torchrun's command line for one run: one process, since the servers need the other core."""
    model = model or out / f"model-seed{seed}"
    mismatch = (
        [] if arm.is_twin else ["--rollout-push-rounding", options.rounding, "--rollout-max-lag", options.lag]
    )
    flags = [
        *megatron_flags(model, folder / "tensorboard"),
        "--seq-length",
        LONGEST_PROMPT + options.response_length,
        "--micro-batch-size",
        BATCH,
        "--global-batch-size",
        BATCH,
        "--train-iters",
        options.steps,
        "--lr",
        options.lr,
        "--lr-decay-style",
        "constant",
        "--seed",
        seed + 1,
        "--eval-interval",
        10 * options.steps,
        "--rollout-url",
        url,
        "--rollout-engine",
        "sglang",
        "--rollout-prompts",
        out / "prompts.jsonl",
        "--rollout-reward-function",
        f"{HERE / 'sized_reward.py'}:reward",
        "--rollout-group-size",
        GROUP,
        "--rollout-max-new-tokens",
        options.response_length,
        "--rollout-log-dir",
        folder,
        "--rollout-save-trajectories",
        folder / SAMPLES,
        # A policy that collapses is as sure of itself as one likes, and rounding moves it by as much:
        # no bound ends it.
        "--rollout-max-probe-log-ratio",
        "inf",
        "--rollout-max-first-step-kl",
        "inf",
        *mismatch,
        *arm.flags,
        *options.launcher_flags,
    ]
    return torchrun(flags, processes=1)


def run_folder(out, arm, seed):
    return out / "runs" / arm.name / f"seed{seed}"


def finished(out, arm, seed):
    """What is kept of a finished run; None where there is none, or its file was cut short: it is run anew."""
    try:
        return json.loads((run_folder(out, arm, seed) / "finished.json").read_text())
    except (FileNotFoundError, ValueError):
        return None


def run_one(out, arm, seed, server, options, running):
    """One run, in a new folder; the exit status of one that is not finished, or 0."""
    folder, started = run_folder(out, arm, seed), time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "train.log"
    status = train(training_command(out, folder, arm, seed, server.url, options), log, running, server.pid)
    nonfinite = status != 0 and bool(NOT_FINITE.search(log.read_text(errors="replace")))
    metrics = folder / FILE_NAME
    trained = len(read_metrics(metrics)) if metrics.exists() else 0
    if status:
        EXAMPLE.say(
            f"training ended with status {status} after {trained} steps: see {log} and {server.log_path}"
        )
        if trained < options.steps and not nonfinite:
            return status
    # A process that fails once the last step is written has lost nothing of the study: its status is kept.
    kept = {"seconds": time.monotonic() - started, "ended_nonfinite": nonfinite, "status": status}
    write_atomically(folder / "finished.json", json.dumps(kept).encode())
    return 0


def remaining_text(out, todo, planned):
    """How many runs are finished and how long the others will take, if they take as long as those did."""
    done = [kept["seconds"] for arm, seed in planned if (kept := finished(out, arm, seed))]
    text = f"{len(done)} of {len(planned)} runs are finished"
    if done and todo:
        text += f"; about {sum(done) / len(done) * len(todo) / 60:.0f} min left"
    return text


def run(options, out, running):
    now = {name: getattr(options, name) for name in OF_A_RUN}
    problem = keep_settings(out, now, any((out / "runs").glob("*/*/finished.json")))
    if problem:
        EXAMPLE.say(problem)
        return 2
    write_prompts(out / "prompts.jsonl", options.response_length)
    for seed in options.seeds:
        if not (out / f"model-seed{seed}" / "tokenizer.json").exists():  # its last file
            make_model(HERE.parent / "quickstart/make_model.py", out / f"model-seed{seed}", "--seed", seed)
    planned = [(ARMS[name], seed) for seed in options.seeds for name in options.arms]
    failed = []
    for dtype in ("bfloat16", "float32"):
        chosen = [(arm, seed) for arm, seed in planned if arm.is_twin == (dtype == "float32")]
        todo = [one for one in chosen if not finished(out, *one)]
        if todo:
            failed += run_against(dtype, todo, planned, options, out, running)
    status = report(options, out) if any(finished(out, *one) for one in planned) else 0
    if failed:
        names = ", ".join(f"{arm.name} of seed {seed}" for arm, seed in failed)
        EXAMPLE.say(f"not finished: {names}; the same command runs them anew")
        return 1
    return status


@contextmanager
def study_server(example, model, dtype, out, running):
    """An SGLang server of the model in a dtype, which each run sends its own weights first;
    stopped at the end.
    """
    server = local_server(
        model,
        dtype=dtype,
        log_path=out / f"server-{dtype}.log",
        seed=0,
        slots=BATCH,
        extra_arguments=["--enable-return-routed-experts"],
    )
    example.say(f"starting SGLang in {dtype}; its log is {server.log_path}")
    server.start()
    running.add(server.pid)
    try:
        wait_ready(server)
        yield server
    finally:
        server.stop()


def run_against(dtype, todo, planned, options, out, running):
    """The runs against one server of a dtype, which each of them sends its own weights first;
    those that failed.

    A run that fails leaves the others theirs, unless the server has ended: then nothing of them can run.
    """
    failed = []
    with study_server(EXAMPLE, out / f"model-seed{options.seeds[0]}", dtype, out, running) as server:
        for index, (arm, seed) in enumerate(todo):
            others = [one for one in planned if not finished(out, *one)]
            EXAMPLE.say(f"{arm.name}, seed {seed} ({remaining_text(out, others, planned)})")
            if run_one(out, arm, seed, server, options, running):
                failed.append((arm, seed))
                if not server.is_running():
                    EXAMPLE.say(f"the server has ended: see {server.log_path}")
                    return failed + todo[index + 1 :]
    return failed


def keep_settings(out, now, has_runs):
    """Write settings.json, or say how those of the runs that are finished in the folder differ."""
    path = out / "settings.json"
    if not has_runs:
        write_atomically(path, json.dumps(now).encode())
        return None
    try:
        before = json.loads(path.read_text())
        differing = [
            f"{name} {before[name]} there, {now[name]} now" for name in now if before[name] != now[name]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return (
            f"--out {out} has runs, and {path} does not say with which settings ({error!r}); name another "
            "folder"
        )
    if differing:
        return f"--out {out} has runs with other settings: {'; '.join(differing)}; name another folder"
    return None


def report(options, out):
    """The report of all runs that are finished in the folder, whichever of them were asked for this time."""
    runs = {}
    for arm in ARMS.values():
        names = [path.name for path in (out / "runs" / arm.name).glob("seed*")]
        # a copy, seed2.bak, is none
        for seed in sorted(int(name[4:]) for name in names if name[4:].isdecimal()):
            if kept := finished(out, arm, seed):
                path = run_folder(out, arm, seed) / FILE_NAME
                steps = read_metrics(path) if path.exists() else []
                runs.setdefault(arm.name, {})[seed] = steps, kept["ended_nonfinite"]
    from report import write_report  # it loads torch, which --help needs not

    settings = {name: getattr(options, name) for name in OF_A_RUN}
    print(write_report(runs, settings, out, lambda arm, seed: run_folder(out, ARMS[arm], seed) / SAMPLES))
    EXAMPLE.say(
        f"the table, the numbers, the pictures: {out / 'study.md'}, study.json, study.png, study_mismatch.png"
    )
    return 0


def main(argv=None):
    return EXAMPLE.main(run, parse_arguments(argv), resumes=True)


if __name__ == "__main__":
    sys.exit(main())
