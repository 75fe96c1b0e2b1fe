"""`megatron-rl-corr doctor`: examines one server after the other and prints a table, or JSON."""

import argparse
import asyncio
import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_rl_corr.commands.doctor.full_check import ask_full
from megatron_rl_corr.commands.doctor.reference_model import ask_model, experts_shape
from megatron_rl_corr.config.run import AUTO
from megatron_rl_corr.doctor.findings import DEFECTS, KINDS, Examination, Finding, Row, exit_status
from megatron_rl_corr.doctor.probe import Probe
from megatron_rl_corr.doctor.questions import Expected, Facts, ask_quick, ask_same
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.secrets import keep_secret, redacted
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import UnsupportedByEngine
from megatron_rl_corr.models.hf_checkpoint import read_model
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.tables import text_table
from megatron_rl_corr.weight_sync.updatable import check_memory

CONNECT_TIMEOUT_S = 5.0
INTERRUPTED = 130
MARKS = {"ok": "ok", "note": "note", "finding": "FOUND", "failed": "FAILED"}


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: the command line, as cli.py parses it.

    Returns:
        The exit status: 0 without findings, 1 with one, 2 if a question could not be asked,
        130 if interrupted.

    Raises:
        ValueError: a flag is wrong.
    """
    if arguments.timeout <= 0:
        raise ValueError(f"--timeout must be positive, got {arguments.timeout:g}")
    key = _Key()
    keep_secret(key, _api_key(arguments))
    try:
        examinations = asyncio.run(_examine(arguments))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(
            "megatron-rl-corr doctor: interrupted; the servers have their weights back and sample",
            file=sys.stderr,
        )
        return INTERRUPTED
    print(redacted(as_json(examinations) if arguments.json else as_table(examinations)))
    return exit_status(examinations)


class _Key:
    """Keeps the key out of what is printed, when no client holds it any more."""


async def _examine(arguments: argparse.Namespace) -> list[Examination]:
    """One server after the other, so that the load of one does not disturb the answers of another."""
    sampling, config = _sampling(arguments), _given_config(arguments.model)
    options = {
        "engine": arguments.engine,
        "timeout_s": arguments.timeout,
        "connect_timeout_s": CONNECT_TIMEOUT_S,
        "api_key": _api_key(arguments),
    }
    examinations, asked = [], []
    async with AsyncExitStack() as stack:
        for address in RolloutClient(arguments.url, vocab_size=1, **options).base_urls:
            # A client for each: one that does not answer must not keep the others from being recognised.
            client = await stack.enter_async_context(RolloutClient([address], vocab_size=1, **options))
            try:
                await client.find_servers(CONNECT_TIMEOUT_S)
            except RolloutError as error:
                examinations.append(Examination(address, [Row("asked", "failed", str(error))]))
                continue
            for url in client.base_urls:
                probe = Probe(client, url, arguments.timeout)
                examination = Examination(url, remedies=probe.engine.remedies)
                examinations.append(examination)
                if sampling is not None:
                    probe.engine.check_sampling(sampling)
                try:
                    served = config or await _served_config(probe)
                    client.vocab_size = _vocab_size(url, arguments.vocab_size, served)
                    expected = Expected(
                        sampling,
                        arguments.expect_dtype,
                        arguments.expect_routed_experts,
                        experts_shape(served),
                    )
                    asked.append(
                        (probe, await _ask(probe, expected, arguments, examination.rows, first=not asked))
                    )
                except RolloutError as error:
                    examination.rows.append(Row("asked", "failed", str(error)))
                    if asyncio.current_task().cancelling():  # Ctrl-C, and restoring the server failed
                        return examinations
        if len(asked) > 1:
            await _compare(examinations, [probe for probe, _ in asked], [facts for _, facts in asked])
    return examinations


async def _ask(
    probe: Probe, expected: Expected, arguments: argparse.Namespace, rows: list[Row], *, first: bool
) -> Facts:
    """All questions to one server. Only the first server is compared with the model, the
    others with the first.
    """

    def say(what: str) -> None:
        print(f"megatron-rl-corr doctor: {probe.url}: {what}", file=sys.stderr, flush=True)

    await _require_memory(probe)
    say("asking about log-probs, precision and cache")
    quick, facts = await ask_quick(probe, expected)
    rows += quick
    if arguments.model and first:
        rows += await ask_model(probe, facts.half, arguments.model, say)
    if arguments.full:
        with _signals_cancel():
            await ask_full(probe, facts, arguments.model, say, rows)
    return facts


async def _require_memory(probe: Probe) -> None:
    """RolloutProtocolError for a server whose memory a trainer has: it would not answer, or end on a GPU."""
    try:
        name = (await probe.served_model()).weight_version
    except UnsupportedByEngine:
        return
    check_memory(probe.url, name, endpoint=probe.engine.model_info().endpoint, colocated=False)


@contextmanager
def _signals_cancel() -> Iterator[None]:
    """Every SIGINT and SIGTERM cancels the task; after the block they are ignored if one has come.

    asyncio's own handler ends all tasks at a second Ctrl-C, and SIGTERM would end the process: either
    would leave a server paused with changed weights. A signal after the restoration could only change
    the exit status.
    """
    loop, cancel = asyncio.get_running_loop(), asyncio.current_task().cancel
    interrupted = False

    def interrupt(number, frame) -> None:
        nonlocal interrupted
        interrupted = True
        loop.call_soon_threadsafe(cancel)  # and wakes the loop

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if interrupted else handler)


async def _compare(examinations: list[Examination], probes: list[Probe], facts: list[Facts]) -> None:
    by_server = {examination.server: examination.rows for examination in examinations}
    try:
        for url, row in await ask_same(probes, facts):
            by_server[url].append(row)
    except RolloutError as error:
        by_server[error.url].append(Row("servers", "failed", str(error)))


def _given_config(folder: str | None) -> dict | None:
    try:
        return read_model(folder) if folder else None
    except ValueError as error:
        raise ValueError(f"--model: {error}") from None


async def _served_config(probe: Probe) -> dict:
    """config.json of the folder that the server was started with; {} if this machine cannot read it."""
    try:
        folder = str((await probe.served_model()).path)
    except UnsupportedByEngine:
        return {}
    return read_model(folder) if (Path(folder) / "config.json").is_file() else {}


def _vocab_size(url: str, given: int | None, config: dict) -> int:
    size = given if given is not None else config.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ValueError(
            f"the vocabulary size of {url} is not known (got {size}), and an id outside the vocabulary would "
            "crash the server; give --model HF_DIR whose config.json has it, or --vocab-size"
        )
    return size


def _sampling(arguments: argparse.Namespace) -> SamplingParams | None:
    given = {"temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": arguments.top_k}
    given = {name: value for name, value in given.items() if value is not None}
    sampling = SamplingParams(1, **given) if given else None
    if sampling is not None and arguments.engine != AUTO:  # else once it is known what answers
        load_engine(arguments.engine).check_sampling(sampling)
    return sampling


def _api_key(arguments: argparse.Namespace) -> str | None:
    name = arguments.api_key_env
    if name is not None and not os.environ.get(name):
        raise ValueError(f"--api-key-env names {name}, which is not set; export it, or leave the flag out")
    return os.environ[name] if name else None


# Output


def as_table(examinations: list[Examination]) -> str:
    """A table per server, then the findings by kind of mismatch with their remedies, then a summary line."""
    lines = []
    for examination in examinations:
        lines.append(examination.server)
        rows = []
        for row in examination.rows:
            rows.append((f"{MARKS[row.status]:6}", row.check, row.message))
            for bucket, numbers in row.numbers.get("buckets", {}).items():
                rows.append(("", "", f"  {f'pi_rollout {bucket}':18}  {_distance(numbers)}"))
        lines += [*text_table(rows, indent="  "), ""]
    findings = [finding for examination in examinations for finding in examination.findings]
    for kind, means in KINDS.items():
        of_kind = [finding for finding in findings if finding.kind == kind]
        if of_kind:
            lines.append(f"{kind} mismatch: {means}")
            for finding in of_kind:
                lines += _described(finding)
            lines.append("")
    return "\n".join([*lines, _summary(examinations, len(findings))])


def as_json(examinations: list[Examination]) -> str:
    """{"exit_status", "servers": [{"server", "rows", "findings"}]}; non-finite numbers become null."""
    servers = [
        {
            "server": examination.server,
            "rows": [asdict(row) for row in examination.rows],
            "findings": [
                {
                    "name": f.name,
                    "kind": f.kind,
                    "message": f.message,
                    "remedy": f.remedy,
                    "numbers": dict(f.numbers),
                }
                for f in examination.findings
            ],
        }
        for examination in examinations
    ]
    return json.dumps(_finite({"exit_status": exit_status(examinations), "servers": servers}), indent=2)


def _described(finding: Finding) -> list[str]:
    return [
        f"  {finding.name} ({finding.server})",
        f"    {DEFECTS[finding.name].means}",
        f"    measured: {finding.message}",
        f"    fix: {finding.remedy or 'none is known'}",
    ]


def _summary(examinations: list[Examination], findings: int) -> str:
    failed = [examination.server for examination in examinations if examination.failed]
    found = "nothing found" if not findings else f"{findings} finding{'s' if findings > 1 else ''}"
    return f"{found}; could not ask everything of {', '.join(failed)}" if failed else found


def _distance(numbers: Mapping[str, float]) -> str:
    sizes = f"max |D| {numbers['max']:.1e}, mean {numbers['mean']:.1e}, k3 {numbers['k3']:.1e}"
    return f"{sizes} over {numbers['tokens']} tokens"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
