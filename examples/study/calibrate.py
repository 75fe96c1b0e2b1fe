"""What numerics alone do to the bounds that the project recommends: one trained policy, served
in several ways.

calibrate.py [--steps N] [--seed 2] [--response-length N] [--out DIR]
calibrate.py --stop

Trains the study's model without a mismatch for a while, then samples from it as each kind of server would,
scores the samples with the trainer, and leaves the weights as they are: what differs is the numerics of
the serving, and nothing else. Called again with the same folder it goes on.
"""

import argparse
import dataclasses
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE), str(HERE.parent / "quickstart")]

from arms import ARMS  # noqa: E402
from local_run import Example, make_model, train  # noqa: E402
from run import SAMPLES, keep_settings, study_server, training_command, write_prompts  # noqa: E402

EXAMPLE = Example("calibration")
WARMED, LEARNING_RATE = 12, 4e-3
"""Steps and learning rate that make the policy whose numerics are measured: it has learned
half of the task.
"""


@dataclasses.dataclass(frozen=True)
class Serving:
    """One way to serve the policy: the server's number type, how the pushed weights are
    rounded, and replay.
    """

    name: str
    dtype: str
    rounding: str = "none"
    replay: bool = False


SERVINGS = (
    Serving("float32", "float32"),
    Serving("bf16", "bfloat16"),
    Serving("bf16, R3", "bfloat16", replay=True),
    Serving("FP8 weights", "bfloat16", "fp8_blockwise"),
    Serving("FP8 weights, R3", "bfloat16", "fp8_blockwise", replay=True),
    Serving("4-bit weights", "bfloat16", "int4_group"),
    Serving("4-bit weights, R3", "bfloat16", "int4_group", replay=True),
)


def parse_arguments(argv):
    parser = EXAMPLE.parser(__doc__, steps=4)
    parser.add_argument(
        "--seed", type=int, default=2, help="of the model and the order of prompts (default 2)"
    )
    parser.add_argument("--response-length", type=int, default=32, help="tokens that a response may have")
    options = parser.parse_args(argv)
    options.out = options.out or EXAMPLE.home / "last"
    return options


def settings(options, **changed):
    """The study's settings of one run."""
    unmoved = {
        "steps": options.steps,
        "response_length": options.response_length,
        "launcher_flags": options.launcher_flags,
        "rounding": "none",
        "lag": 0,
        "lr": 0.0,
    }
    return argparse.Namespace(**(unmoved | changed))


def run_one(folder, arm, server, model, options, changed, running):
    """One run in a new folder; 0, or its exit status with where to look."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = training_command(
        folder.parents[1], folder, arm, options.seed, server.url, settings(options, **changed), model=model
    )
    status = train(command, folder / "train.log", running, server.pid)
    if status:
        EXAMPLE.say(
            f"{arm.name} ended with status {status}: see {folder / 'train.log'} and {server.log_path}"
        )
        return status
    (folder / "finished").touch()
    return 0


def folder_of(out, name):
    return out / "runs" / name.replace(", ", "-").replace(" ", "-")


def finished(out, name):
    return (folder_of(out, name) / "finished").exists()


def run(options, out, running):
    now = {name: getattr(options, name) for name in ("steps", "seed", "response_length", "launcher_flags")}
    problem = keep_settings(out, now, any((out / "runs").glob("*/finished")))
    if problem:
        EXAMPLE.say(problem)
        return 2
    write_prompts(out / "prompts.jsonl", options.response_length)
    first = out / "first"
    if not (first / "tokenizer.json").exists():  # its last file
        make_model(HERE.parent / "quickstart/make_model.py", first, "--seed", options.seed)
    for dtype in ("float32", "bfloat16"):
        servings = [
            serving for serving in SERVINGS if serving.dtype == dtype and not finished(out, serving.name)
        ]
        if servings:
            status = run_against(dtype, servings, first, options, out, running)
            if status:
                return status
    from calibration_report import write_calibration  # it loads torch, which --help needs not

    print(write_calibration({one.name: folder_of(out, one.name) / SAMPLES for one in SERVINGS}, out))
    EXAMPLE.say(f"the table and the picture: {out / 'calibration.md'}, calibration.json, calibration.png")
    return 0


def trained_policy(out):
    """The Hugging Face folder that the first run wrote."""
    return out / "hf" / f"iter_{WARMED:07d}"


def run_against(dtype, servings, first, options, out, running):
    """The runs against one server, which each of them sends its weights first; the exit status."""
    with study_server(EXAMPLE, first, dtype, out, running) as server:
        if not finished(out, "first"):
            EXAMPLE.say(f"training the policy that is measured, {WARMED} steps")
            warm = dataclasses.replace(
                ARMS["twin"], flags=(*ARMS["twin"].flags, "--rollout-save-hf", out / "hf")
            )
            changed = {"steps": WARMED, "lr": LEARNING_RATE}
            status = run_one(folder_of(out, "first"), warm, server, first, options, changed, running)
            if status:
                return status
        for number, serving in enumerate(servings, 1):
            EXAMPLE.say(f"{serving.name} ({number} of {len(servings)} in {dtype})")
            arm = dataclasses.replace(ARMS["r3" if serving.replay else "none"], name=serving.name)
            changed = {"rounding": serving.rounding}
            status = run_one(
                folder_of(out, serving.name), arm, server, trained_policy(out), options, changed, running
            )
            if status:
                return status
    return 0


def main(argv=None):
    return EXAMPLE.main(run, parse_arguments(argv), resumes=True)


if __name__ == "__main__":
    sys.exit(main())
