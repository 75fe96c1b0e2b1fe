"""What our flags ask for, put into the Megatron of this process: for the launcher, and for a
patched Megatron.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl_corr.config.flags import name_flags, read
from megatron_rl_corr.config.problems import Problems, Refusal, known, numbered
from megatron_rl_corr.engines.secrets import for_message
from megatron_rl_corr.files import check_writable, refuse_link
from megatron_rl_corr.integrations import megatron_rl_hooks, megatron_sft
from megatron_rl_corr.tables import one_message, visible

PEER_MESSAGE_TIMEOUT_S = 10.0
"""How long a rank that learnt of another's failure in a collective waits for that rank's message."""
IN_PROCESS_RESTART = "--inprocess-restart"
"""Megatron's flag, with which a failure does not end the process."""

MEGATRONS_FOLDERS = ("--tensorboard-dir", "--wandb-save-dir", "--save")
"""Megatron's flags for folders that its last rank writes, the first two before any of our hooks is called."""
LOG_NAMES = ("metrics.jsonl", "experts.jsonl", "run.json", "tensorboard")
"""What a run writes in --rollout-log-dir: files, and a folder last."""

Install = Callable[[], Callable[[], None]]
"""Replaces Megatron's functions, and returns what leaves the servers after the last step."""

_begun = False
"""Whether this process has read its command line: a patched Megatron asks for the plugin again."""


def prepare(arguments: Sequence[str], *, for_all_ranks: bool = False, script: str | None = None) -> Install:
    """Read a whole command line, and look at what it names, before anything heavy is imported.

    Args:
        arguments: the command line.
        for_all_ranks: this process is there for all, and only checks what they would do.
        script: that the launcher runs, in whose folder Python does not look for modules yet; None: Megatron
            asks for the plugin itself.

    Raises:
        ValueError: lists everything that is wrong, each with its flag and the remedy. Every rank of the
            first host raises the same; what only the last rank of another host writes, and can't, is its
            own RefusedHere.
    """
    global _begun
    # Before anything else: a patched Megatron calls `load` as soon as our hooks import it.
    _begun = True
    problems, rank, ranks = Problems(), _number("RANK", 0), _number("WORLD_SIZE", 1)
    if any(argument.split("=")[0] == "--yaml-cfg" for argument in arguments):
        problems.add(
            "--yaml-cfg replaces every flag, the rollout ones too; give Megatron's settings as flags"
        )
    megatrons_own_rl = megatron_rl_hooks.ASKS in arguments
    if megatrons_own_rl:
        config, log_dir = megatron_rl_hooks.read(arguments, problems)
        options, settings = None, {"rollout_correction": config}
    elif megatron_sft.ASKS in arguments:
        warm_start, log_dir = megatron_sft.read(arguments, problems), None
        if for_all_ranks:
            problems.add(
                f"--rollout-corr-check is of runs that sample; leave it out with {megatron_sft.ASKS}"
            )
    else:
        config, options = read(arguments, problems)
        log_dir, settings = known(lambda: options.log_dir), {"rollout_correction": config, "rollout": options}
        # Another host may have other files at a path: there, they are looked at when one message
        # can speak for all.
        if for_all_ranks or rank == _number("LOCAL_RANK", rank):
            from megatron_rl_corr.mcore.checks.early_checks import EarlyChecks

            script_folder = None if script is None else str(Path(script).resolve().parent)
            EarlyChecks(config, options, script_folder, only_checked=for_all_ranks).collect(problems)

    folders, on_one_host = _last_ranks_folders(arguments, log_dir), _number("LOCAL_WORLD_SIZE", 1) == ranks
    if for_all_ranks or on_one_host:
        with problems.catch():
            _check_folders(folders)
    elif rank == ranks - 1:
        _check_folders(folders, RefusedHere)
    problems.raise_all()

    def install() -> Callable[[], None]:
        name_flags_in_logs()
        from megatron_rl_corr.mcore import versions
        from megatron_rl_corr.reduce.restarts import part_attempts

        part_attempts()
        versions.check_version()
        # before the hooks import it, as errors of two mixed releases are hard to read
        versions.check_training()
        from megatron_rl_corr.mcore import hooks

        if os.environ.get("RANK", "0") == "0":
            print(f"[rollout] Transformer Engine: {versions.transformer_engine()}", flush=True)
        if megatron_sft.ASKS in arguments:
            return megatron_sft.install(warm_start)
        report = StepReport(log_dir, settings, folders, _launch(script, arguments))
        if megatrons_own_rl:
            return megatron_rl_hooks.install(config, report)
        return hooks.install(config, options, report)

    return install


def _launch(script: str | None, arguments: Sequence[str]) -> Callable[[], dict[str, Any]]:
    """What makes the record of this start, on the rank that writes it."""
    from megatron_rl_corr.observability.launch_record import launch_record, variables_of_numbers

    # As they are now: scripts go to another folder, and Megatron sets variables of its own.
    folder, environment = os.getcwd(), variables_of_numbers()

    def made() -> dict[str, Any]:
        from megatron_rl_corr.mcore import versions

        return launch_record(
            sys.argv[0] if script is None else script,
            arguments,
            folder=folder,
            environment=environment,
            launcher=script is not None,
            megatron=versions.megatron_version,
            transformer_engine=versions.transformer_engine(),
        )

    return made


class RefusedHere(ValueError):
    """What this rank alone may know, such as a folder that only it writes: printed by
    whichever rank it is.
    """


def _number(variable: str, otherwise: int) -> int:
    """A number that torchrun has put into the environment."""
    return int(os.environ.get(variable, otherwise))


def _last_ranks_folders(arguments: Sequence[str], log_dir: str | None) -> dict[str, str]:
    """Flag -> folder of what the job's last rank writes: metrics, and what Megatron writes there."""
    folders = {} if log_dir is None else {"--rollout-log-dir": log_dir}
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, joined, value = word.partition("=")
        if flag in MEGATRONS_FOLDERS:
            folders[flag] = value if joined else following
    return {flag: folder for flag, folder in folders.items() if folder}


def _check_folders(folders: Mapping[str, str], error: type[ValueError] = ValueError) -> None:
    """Write a file into each. Raises `error` with all flags, folders and remedies where that fails."""
    problems = Problems()
    for flag, folder in folders.items():
        with problems.catch():
            check_writable(folder, flag)
            for name in LOG_NAMES if flag == "--rollout-log-dir" else ():
                _check_place(Path(folder, name))
    if problems:
        raise error(numbered(problems.found)) if error is RefusedHere else Refusal(problems.found)


def _check_place(path: Path) -> None:
    """ValueError where something else is in the place of what a run writes in --rollout-log-dir."""
    try:
        if path.name != "run.json":  # a link of that name is replaced
            refuse_link(path)
        kind, fits = (
            ("folder", path.is_dir()) if path.name == LOG_NAMES[-1] else ("plain file", path.is_file())
        )
        if path.exists() and not fits and not path.is_symlink():
            raise ValueError(f"--rollout-log-dir: {path} is no {kind}; remove it, or name another folder")
    except OSError as error:
        raise ValueError(f"--rollout-log-dir: {error.filename}: {error.strerror}") from None


def name_flags_in_logs() -> None:
    """From now on, warnings that this package logs have flags in place of the library's fields."""
    make = logging.getLogRecordFactory()

    def named(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.startswith(f"{__package__}."):
            record.msg, record.args = one_message(name_flags(for_message(record.getMessage()))), ()
        return record

    logging.setLogRecordFactory(named)


class StepReport:
    """Writes each step's metrics; opens its files at the first one, as only one rank reports."""

    def __init__(
        self,
        log_dir: str | None,
        settings: dict[str, Any],
        folders: Mapping[str, str],
        launch: Callable[[], dict[str, Any]],
    ):
        self._log_dir, self._settings, self._launch, self._log = log_dir, settings, launch, None
        self._folders = [f"{flag} {folder}" for flag, folder in folders.items() if flag != "--save"]

    def __call__(self, metrics: dict[str, float], writer: Any) -> None:
        """writer: Megatron's TensorBoard writer, or None. Raises OSError where a disk is full, or fails."""
        from megatron_rl_corr.observability.run_log import RunLog

        try:
            if self._log is None:
                launch = {"first_step": int(metrics["step"])} | self._launch()
                self._log = RunLog(self._log_dir, self._settings, writer, launch)
            self._log.write(metrics)
        except OSError as error:
            raise OSError(
                f"{' or '.join(self._folders)}: {error}, so step {metrics['step']:.0f} is not written there; "
                "make room, or name another folder, and go on from the last checkpoint with --load"
            ) from error


def load() -> None:
    """Called by a patched Megatron while it is imported, where MEGATRON_RL_CORR=1; does
    nothing a second time.

    With --help Megatron tells its own flags alone; the launcher that describes only looks.
    """
    if _begun or {"-h", "--help", "--rollout-corr-describe"} & set(sys.argv):
        return
    try:
        install = prepare(sys.argv[1:])
    except ValueError as error:
        refuse("MEGATRON_RL_CORR", error)
        sys.exit(2)
    from megatron_rl_corr.mcore.versions import UnsupportedMegatron

    try:
        leave_servers = install()
    except UnsupportedMegatron as error:
        refuse("MEGATRON_RL_CORR", error)
        sys.exit(2)
    from megatron_rl_corr.mcore import hooks

    hooks.wrap_pretrain(lambda pretrain: run_to_the_end(pretrain, leave_servers))


def run_to_the_end[**Arguments, Result](
    run: Callable[Arguments, Result], leave_servers: Callable[[], None]
) -> Callable[Arguments, Result]:
    """Wraps `run`, so that the servers are left after it.

    An exception on any rank ends all ranks: this process with status 1 and a message, every other one
    within seconds, by its own `FailureWatch`. With Megatron's in-process restart only errors that no
    restart can fix do.
    """
    import functools

    from megatron_rl_corr.engines.errors import RolloutError
    from megatron_rl_corr.reduce.failure import WATCH, PeerFailure, StartupError

    restarts = IN_PROCESS_RESTART in sys.argv
    final = (PeerFailure, RolloutError, StartupError) if restarts else Exception

    @functools.wraps(run)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not restarts:
            WATCH.start(_leave_after_peer)
        try:
            try:
                result = run(*args, **kwargs)
            except SystemExit:  # --exit-interval, --exit-duration-in-mins, a signal: all ranks end here
                leave_servers()
                raise
            leave_servers()
            return result
        except final as error:
            _end(error, in_one_line=isinstance(error, (RolloutError, StartupError)))
        finally:
            WATCH.stop()

    return guarded


def _end(error: Exception, *, in_one_line: bool) -> None:
    """End this process because of an error, once the other ranks know of it."""
    from megatron_rl_corr.reduce.failure import EXIT_TIMEOUT_S, WATCH, PeerFailure

    is_peers, end = isinstance(error, PeerFailure), time.monotonic() + PEER_MESSAGE_TIMEOUT_S
    # If several ranks fail, as when the connection to the first breaks, one of them prints its error.
    while (failure := WATCH.peer_failure()) is None and is_peers and time.monotonic() < end:
        time.sleep(0.1)
    if failure is None and not is_peers:
        if not in_one_line:
            told = "".join(traceback.format_exception(error))
            print(visible(for_message(told)), file=sys.stderr, end="", flush=True)
        notes = getattr(error, "__notes__", ()) if in_one_line else ()
        print(
            f"\nmegatron_rl_corr: {_message(error, in_one_line)}",
            *notes,
            sep="\n  ",
            file=sys.stderr,
            flush=True,
        )
        WATCH.report(error)
    if not WATCH.claim_exit():
        time.sleep(EXIT_TIMEOUT_S)  # the watch's thread is about to end the process
    try:
        WATCH.clean_up()
    finally:
        if failure is not None:
            _leave_after_peer(failure)
        _leave(1)


def _message(error: Exception, in_one_line: bool) -> str:
    rank = os.environ.get("RANK", "0")
    text = str(error) if in_one_line else f"rank {rank} failed: {type(error).__name__}: {error}"
    return one_message(name_flags(for_message(text)))


def _leave_after_peer(failure: str) -> None:
    """End this process because another rank has failed."""
    rank = os.environ.get("RANK", "0")
    told = one_message(name_flags(failure))
    print(f"megatron_rl_corr: {told}; this is rank {rank}", file=sys.stderr, flush=True)
    _leave(1)


def refuse(program: str, message: object) -> None:
    """Print what is wrong with the command line, on rank 0, or where it is this rank's own."""
    if os.environ.get("RANK", "0") == "0" or isinstance(message, RefusedHere):
        print(f"{program}: {visible(for_message(name_flags(message)))}", file=sys.stderr, flush=True)


def _leave(status: int) -> None:
    """End at once: the other ranks may be gone, and an orderly shutdown would wait for them."""
    import multiprocessing

    for child in multiprocessing.active_children():  # checkpoint writers: os._exit would leave them behind
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
