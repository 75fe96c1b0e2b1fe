"""The command `megatron-rl-corr`: checks servers, draws runs, compares corrections, installs the
plugin in Megatron.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from megatron_rl_corr import __version__
from megatron_rl_corr.engines.secrets import for_message
from megatron_rl_corr.tables import visible

# Packages are imported by the subcommand that needs them, so that --help answers at once.

PROGRAM = "megatron-rl-corr"
EXTRAS = {"matplotlib": "report"}
"""A module that a plain installation does not bring -> the extra of setup.py that does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 on success, 2 with a message on stderr for anything the user can fix.

    1 is the doctor's, when it has findings; 141 means that the reader of standard output went
    away, as `head` does.
    """
    arguments = _parser().parse_args(argv)
    try:
        status = arguments.run(arguments) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # What is still buffered would raise again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        needed = f"needs {missing}: pip install 'megatron_rl_corr[{EXTRAS[missing]}]'"
        print(f"{PROGRAM} {arguments.command}: error: {needed}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"{PROGRAM} {arguments.command}: error: {visible(for_message(str(error)))}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Tools for RL runs that train with megatron_rl_corr."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    _add_doctor(commands)

    report = commands.add_parser("report", help="write report.html and overview.png into a run's folder")
    report.add_argument("run_dir", metavar="RUN_DIR", help="folder that holds the run's metrics.jsonl")
    report.set_defaults(run=_report)

    diagnose = commands.add_parser("diagnose", help="say what the mismatch of a run comes from")
    diagnose.add_argument("run_dir", metavar="RUN_DIR", help="folder that holds the run's metrics.jsonl")
    diagnose.set_defaults(run=_diagnose)

    _add_incident(commands)
    _add_accept(commands)

    advise = commands.add_parser("advise", help="say which weights a run, or its samples, ask for")
    advise.add_argument(
        "paths",
        metavar="RUN_DIR|FILE.parquet",
        nargs="+",
        help="the folder of --rollout-log-dir; or the folder, or files, of --rollout-save-trajectories",
    )
    advise.set_defaults(run=_advise)

    correct = commands.add_parser("correct", help="compare corrections on samples that a run has saved")
    correct.add_argument(
        "files", metavar="FILE.parquet", nargs="+", help="written by --rollout-save-trajectories"
    )
    correct.add_argument(
        "--preset", metavar="NAME", nargs="+", default=[], help="presets to compare; see presets"
    )
    correct.add_argument(
        "--config", metavar="YAML", nargs="+", default=[], help="files of settings to compare"
    )
    correct.add_argument("--json", action="store_true", help="print every metric as JSON, not a table")
    correct.set_defaults(run=_correct)

    _add_samples(commands)
    _add_rollout(commands)
    _add_gateway(commands)
    _add_patch(commands)

    export = commands.add_parser("export", help="write a Megatron checkpoint as a Hugging Face folder")
    export.add_argument(
        "checkpoint", metavar="DIR", help="the folder that --save named, or an iter_ one in it"
    )
    export.add_argument(
        "--hf-checkpoint", metavar="HF_DIR", required=True, help="the model that training began with"
    )
    export.add_argument("--out", metavar="OUT", required=True, help="a new folder")
    export.set_defaults(run=_export)

    flags = commands.add_parser("model-flags", help="print Megatron's flags for a Hugging Face model")
    flags.add_argument("hf_dir", metavar="HF_DIR", help="folder that holds the model's config.json")
    flags.set_defaults(run=_model_flags)

    _add_plan(commands)

    presets = commands.add_parser(
        "presets", help="list the correction presets: weights, what the rules keep, loss"
    )
    presets.set_defaults(run=_presets)
    return parser


def _add_doctor(commands) -> None:
    doctor = commands.add_parser("doctor", help="check live rollout servers for train-inference mismatch")
    add = doctor.add_argument
    from megatron_rl_corr.config.run import AUTO, ENGINES

    add(
        "--url",
        metavar="URL",
        action="append",
        required=True,
        help="a server's address; once for each server",
    )
    add(
        "--engine",
        choices=[AUTO, *ENGINES],
        default=AUTO,
        help="what the servers run (default: each is asked)",
    )
    add(
        "--model", metavar="HF_DIR", help="compare log-probs with this Hugging Face folder's model in float32"
    )
    add("--full", action="store_true", help="also pause the server and change its weights for a moment")
    add("--json", action="store_true", help="print JSON, not tables")
    add("--expect-dtype", choices=["float32", "bfloat16", "float16"], help="what the trainer computes in")
    add("--expect-routed-experts", action="store_true", help="the run replays the routing")
    add("--temperature", metavar="T", type=float, help="what the run samples with (default: any)")
    add("--top-p", metavar="P", type=float, help="what the run samples with (default: 1)")
    add("--top-k", metavar="K", type=int, help="what the run samples with (default: -1, off)")
    add(
        "--vocab-size",
        metavar="V",
        type=int,
        help="vocabulary size, if neither --model nor the server has it",
    )
    add("--timeout", metavar="S", type=float, default=60.0, help="seconds for one request (default 60)")
    add("--api-key-env", metavar="NAME", help="environment variable that holds the servers' (admin) API key")
    doctor.set_defaults(run=_doctor)


def _add_incident(commands) -> None:
    from megatron_rl_corr.commands.incident.arguments import add_arguments

    incident = commands.add_parser(
        "incident", help="write a folder from which a step of a run can be done again elsewhere"
    )
    add_arguments(incident)
    incident.set_defaults(run=_incident)


def _incident(arguments: argparse.Namespace) -> int:
    from megatron_rl_corr.commands.incident.command import run

    return run(arguments, sys.stdout)


def _add_accept(commands) -> None:
    from megatron_rl_corr.commands.accept.arguments import add_arguments

    accept = commands.add_parser(
        "accept", help="try a run's model at learning rate 0: is what is trained what is sampled?"
    )
    add_arguments(accept)
    accept.set_defaults(run=_accept)


def _accept(arguments: argparse.Namespace) -> int:
    from megatron_rl_corr.commands.accept.command import run

    return run(arguments)


def _add_plan(commands) -> None:
    from megatron_rl_corr.commands.planner.arguments import add_arguments

    plan = commands.add_parser(
        "plan", help="what fits on which GPUs: layouts, memory, flags, from config.json alone"
    )
    add_arguments(plan)
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from megatron_rl_corr.commands.planner.command import run

    return run(arguments, sys.stdout)


def _add_samples(commands) -> None:
    samples = commands.add_parser("samples", help="print saved samples: text, reward, D, what was dropped")
    add = samples.add_argument
    add(
        "paths",
        metavar="RUN_DIR|FILE.parquet",
        nargs="+",
        help="the folder of --rollout-log-dir or --rollout-save-trajectories, or files of the latter",
    )
    add("--step", metavar="N", type=int, help="the step (default: the last one)")
    add("--group", metavar="G", type=int, help="only the samples of this group")
    order = samples.add_mutually_exclusive_group()
    for name, text in {
        "worst": "lowest rewards first",
        "best": "highest rewards first",
        "dropped": "only samples of which nothing enters the loss",
    }.items():
        order.add_argument(f"--{name}", dest="order", action="store_const", const=name, help=text)
    add("--limit", metavar="N", type=int, default=10, help="samples printed, at most (default 10)")
    text = samples.add_mutually_exclusive_group()
    text.add_argument(
        "--tokenizer", metavar="HF_DIR", help="makes the text (default: that of the run's model)"
    )
    text.add_argument("--ids", action="store_true", help="print ids, not text")
    add(
        "--color",
        choices=["auto", "always", "never"],
        default="auto",
        help="colour tokens by D (default: on a terminal; NO_COLOR turns it off)",
    )
    samples.set_defaults(run=_samples)


def _samples(arguments: argparse.Namespace) -> None:
    from megatron_rl_corr.commands.samples.sample_text import run

    if arguments.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {arguments.limit}")
    # samples hold any character, and not every terminal does
    sys.stdout.reconfigure(errors="backslashreplace")
    run(arguments, sys.stdout)


def _add_rollout(commands) -> None:
    from megatron_rl_corr.commands.rollout.flags import add_flags

    rollout = commands.add_parser(
        "rollout", help="sample and score prompts without a trainer, into sample files"
    )
    rollout.add_argument("--out", metavar="DIR", required=True, help="a folder for the Parquet files")
    rollout.add_argument(
        "--groups", metavar="N", type=int, help="prompts that are sampled (default: each row once)"
    )
    rollout.add_argument(
        "--seed", metavar="S", type=int, default=0, help="of the order of prompts and of samples"
    )
    add_flags(rollout)
    rollout.set_defaults(run=_rollout)


def _rollout(arguments: argparse.Namespace) -> None:
    import asyncio
    from pathlib import Path

    from megatron_rl_corr.commands.rollout.flags import config_of, named
    from megatron_rl_corr.commands.rollout.offline import OfflineRun
    from megatron_rl_corr.engines.errors import RolloutError

    options = config_of(arguments)
    if arguments.groups is not None and arguments.groups < 1:
        raise ValueError(f"--groups must be at least 1, got {arguments.groups}")
    try:
        run = OfflineRun(options, Path(arguments.out), seed=arguments.seed, groups=arguments.groups)
        summary = asyncio.run(run.run(lambda line: print(line, flush=True)))
    except (RolloutError, ValueError) as error:
        raise ValueError(named(error)) from error
    print("\n".join([*summary.lines(), f"written: {arguments.out}"]))


def _add_gateway(commands) -> None:
    from megatron_rl_corr.commands.gateway.arguments import add_arguments

    gateway = commands.add_parser(
        "gateway", help="serve agents by OpenAI's and Anthropic's protocols, to try one"
    )
    add_arguments(gateway)
    gateway.set_defaults(run=_gateway)


def _gateway(arguments: argparse.Namespace) -> None:
    import asyncio

    from megatron_rl_corr.commands.gateway.standalone import serve
    from megatron_rl_corr.engines.errors import RolloutError

    try:
        asyncio.run(serve(arguments, lambda line: print(line, flush=True)))
    except RolloutError as error:
        raise ValueError(error) from error


def _add_patch(commands) -> None:
    patch = commands.add_parser("patch", help="install the plugin hook into a Megatron checkout")
    patch.add_argument(
        "--megatron-root", metavar="DIR", required=True, help="the folder that holds megatron/"
    )
    what = patch.add_mutually_exclusive_group()
    for name, text in {
        "check": "tell whether the checkout has the hook or can take it; the default",
        "apply": "add the hook's lines, and save the original file beside the changed one",
        "revert": "remove the hook's lines",
        "diff": "print what --apply would change",
    }.items():
        what.add_argument(f"--{name}", dest="what", action="store_const", const=name, help=text)
    patch.set_defaults(run=_patch, what="check")


def _patch(arguments: argparse.Namespace) -> None:
    from megatron_rl_corr.integrations import patch_tree as patching

    tree = patching.read_tree(arguments.megatron_root)
    if arguments.what == "diff":
        sys.stdout.write(patching.diff(tree))
        return
    print(tree.summary)
    if arguments.what == "apply":
        print(patching.apply(tree))
    elif arguments.what == "revert":
        print(patching.revert(tree))


def _doctor(arguments: argparse.Namespace) -> int:
    from megatron_rl_corr.commands.doctor.command import run

    return run(arguments)


def _report(arguments: argparse.Namespace) -> None:
    from megatron_rl_corr.commands.report.page import write_page

    print(f"report: {write_page(arguments.run_dir)}")


def _diagnose(arguments: argparse.Namespace) -> None:
    from megatron_rl_corr.commands.diagnose.ledger_text import diagnosis

    print(visible(diagnosis(arguments.run_dir)))


def _advise(arguments: argparse.Namespace) -> None:
    from megatron_rl_corr.commands.advise.advice import advice

    print(visible(advice(arguments.paths)))


def _correct(arguments: argparse.Namespace) -> None:
    import json

    from megatron_rl_corr.commands.correct.compare import KeptBatch, comparison
    from megatron_rl_corr.config.correction import RolloutCorrectionConfig
    from megatron_rl_corr.rollout.sample_file import read_trajectories

    configs = {name: RolloutCorrectionConfig.from_preset(name) for name in arguments.preset}
    configs |= {path: RolloutCorrectionConfig.from_yaml(path) for path in arguments.config}
    if not configs:
        raise ValueError("nothing to compare; give --preset, --config or both")
    samples = [sample for path in arguments.files for sample in read_trajectories(path)]
    batch = KeptBatch.of(samples)
    columns = {name: batch.metrics(config) for name, config in configs.items()}
    if arguments.json:
        print(json.dumps(columns))
    else:
        print(f"{len(samples)} samples of {len(arguments.files)} files, as one batch\n{comparison(columns)}")


def _export(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    from megatron_rl_corr.commands.export.megatron_checkpoint import (
        MegatronCheckpoint,
        export_checkpoint,
        newest,
    )
    from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint

    checkpoint = MegatronCheckpoint(newest(Path(arguments.checkpoint)))
    print(f"exporting {checkpoint.folder}", flush=True)

    def progress(written: int, whole: int) -> None:
        print(f"{written / 2**30:.1f} of {whole / 2**30:.1f} GiB", flush=True)

    export_checkpoint(checkpoint, HFCheckpoint(arguments.hf_checkpoint), Path(arguments.out), progress)
    print(f"written: {arguments.out}")


def _model_flags(arguments: argparse.Namespace) -> None:
    from megatron_rl_corr.models.hf_checkpoint import read_config
    from megatron_rl_corr.models.megatron_flags import model_flags
    from megatron_rl_corr.models.providers import takes_bridge

    config = read_config(arguments.hf_dir)
    if takes_bridge(config, "auto"):
        with redirect_stdout(sys.stderr):  # Megatron-Bridge logs there
            from megatron_rl_corr.mcore.bridge_model import flags_of

            flags = flags_of(arguments.hf_dir)
    else:
        flags = model_flags(config)
    # Without quotes, so that a shell's $(...) can take them: none has a blank in it.
    print(" ".join(flags))


def _presets(arguments: argparse.Namespace) -> None:
    from megatron_rl_corr.commands.correct.correction_text import loss_as_text, rules_as_text, weights_as_text
    from megatron_rl_corr.config.correction import PRESETS
    from megatron_rl_corr.tables import text_table

    rows = [("preset", "weights", "keeps", "loss")]
    for name, config in PRESETS.items():
        first, *others = rules_as_text(config)
        rows.append((name, weights_as_text(config), first, loss_as_text(config)))
        rows += [("", "", rule, "") for rule in others]
    print("\n".join(text_table(rows)))


if __name__ == "__main__":
    sys.exit(main())
