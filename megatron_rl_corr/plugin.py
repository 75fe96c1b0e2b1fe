"""What our flags ask for, put into the Megatron of this process: for the launcher, and for a patched Megatron."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from megatron_rl_corr.config.flags import name_flags, parse
from megatron_rl_corr.integrations import megatron_rl_hooks

TIME_TO_TELL_S = 10.0
"""So long a rank that learnt of another's failure in a collective waits for its message."""
IN_PROCESS_RESTART = "--inprocess-restart"
"""Megatron's flag: a failure is no end of the process then."""

Install = Callable[[], Callable[[], None]]
"""Puts the hooks in, and returns what leaves the servers after the last step."""

_begun = False


def prepare(arguments: Sequence[str]) -> Install:
    """Read a whole command line, before anything heavy is imported. ValueError names the flag and the remedy."""
    global _begun
    # A patched Megatron asks for the plugin as soon as our hooks import it: that is too late, and once is enough.
    _begun = True
    if any(argument.split("=")[0] == "--yaml-cfg" for argument in arguments):
        raise ValueError("--yaml-cfg replaces every flag, the rollout ones too; give Megatron's settings as flags")
    megatrons_own_rl = megatron_rl_hooks.ASKS in arguments
    try:
        if megatrons_own_rl:
            config, log_dir = megatron_rl_hooks.parse(arguments)
            settings = {"rollout_correction": config}
        else:
            config, options = parse(arguments)
            settings, log_dir = {"rollout_correction": config, "rollout": options}, options.log_dir
    except OSError as error:
        raise ValueError(
            f"--rollout-correction-config {error.filename} cannot be read: {error.strerror}"
        ) from error

    def install() -> Callable[[], None]:
        from megatron_rl_corr.mcore import versions

        versions.check_version()
        versions.check_training()  # before the hooks import it: of two mixed releases that would be a puzzle
        from megatron_rl_corr.mcore import hooks
        from megatron_rl_corr.observability.run_log import RunLog

        logs: list[RunLog] = []

        def report(metrics: dict, writer) -> None:
            if not logs:  # only the rank that reports opens files
                logs.append(RunLog(log_dir, settings, writer))
            logs[0].write(metrics)

        if megatrons_own_rl:
            return megatron_rl_hooks.install(config, report)
        return hooks.install(config, options, report)

    return install


def load() -> None:
    """Called by a patched Megatron while it is imported, where MEGATRON_RL_CORR=1; does nothing a second time.

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
    """`run`, and then leave the servers.

    An exception on any rank ends all: the process with status 1 and a message, every other one within seconds, by its
    own `FailureWatch`. With Megatron's in-process restart only what no restart can mend does.
    """
    import functools

    from megatron_rl_corr.engines.errors import RolloutError
    from megatron_rl_corr.parallel.failure import WATCH, PeerFailure, StartupError

    restarts = IN_PROCESS_RESTART in sys.argv
    final = (PeerFailure, RolloutError, StartupError) if restarts else Exception

    @functools.wraps(run)
    def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not restarts:
            WATCH.start(_leave_as_told)
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
    from megatron_rl_corr.parallel.failure import EXIT_TIMEOUT_S, WATCH, PeerFailure

    is_peers, end = isinstance(error, PeerFailure), time.monotonic() + TIME_TO_TELL_S
    # Of several that fail, as when a connection to the first breaks, one tells.
    while (told := WATCH.peer_failure()) is None and is_peers and time.monotonic() < end:
        time.sleep(0.1)
    if told is None and not is_peers:
        if not in_one_line:
            traceback.print_exception(error)
        notes = getattr(error, "__notes__", ()) if in_one_line else ()
        print(f"\nmegatron_rl_corr: {_says(error, in_one_line)}", *notes, sep="\n  ", file=sys.stderr, flush=True)
        WATCH.report(error)
    if not WATCH.claim_exit():
        time.sleep(EXIT_TIMEOUT_S)  # the watch's thread is about to end the process
    try:
        WATCH.clean_up()
    finally:
        if told is not None:
            _leave_as_told(told)
        _leave(1)


def _says(error: Exception, in_one_line: bool) -> str:
    rank = os.environ.get("RANK", "0")
    return name_flags(error if in_one_line else f"rank {rank} failed: {type(error).__name__}: {error}")


def _leave_as_told(told: str) -> None:
    """End this process because another rank has failed."""
    print(f"megatron_rl_corr: {told}; this is rank {os.environ.get('RANK', '0')}", file=sys.stderr, flush=True)
    _leave(1)


def refuse(program: str, message: object) -> None:
    """Say once what is wrong with the command line."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{program}: {name_flags(message)}", file=sys.stderr, flush=True)


def _leave(status: int) -> None:
    """End at once: the other ranks may be gone, and an orderly shutdown would wait for them."""
    import multiprocessing

    for child in multiprocessing.active_children():  # checkpoint writers: os._exit would leave them behind
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
