"""`megatron-rl-corr doctor`: examines every server in turn, prints what it says, returns the exit status."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_rl_corr.doctor.findings import Examination, Row, exit_status
from megatron_rl_corr.doctor.full import ask_full
from megatron_rl_corr.doctor.hf_scores import ask_model, read_config
from megatron_rl_corr.doctor.identity import experts_shape
from megatron_rl_corr.doctor.probe import Probe
from megatron_rl_corr.doctor.quick import Expected, Facts, ask_quick, ask_same
from megatron_rl_corr.doctor.table import as_json, as_table
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutError, RolloutServerError
from megatron_rl_corr.engines.sglang import requests
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout.client import RolloutClient

CONNECT_TIMEOUT_S = 5.0
INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """0: clean; 1: a finding; 2: something could not be asked. Raises ValueError for wrong flags."""
    if arguments.timeout <= 0:
        raise ValueError(f"--timeout must be positive, got {arguments.timeout:g}")
    try:
        examinations = asyncio.run(_examine(arguments))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("megatron-rl-corr doctor: interrupted; what was changed has been put back", file=sys.stderr)
        return INTERRUPTED
    print(as_json(examinations) if arguments.json else as_table(examinations))
    return exit_status(examinations)


async def _examine(arguments: argparse.Namespace) -> list[Examination]:
    """Servers are asked one after the other, so that one's load does not disturb another's answers."""
    sampling, config = _sampling(arguments), read_config(arguments.model) if arguments.model else None
    options = {
        "timeout_s": arguments.timeout, "connect_timeout_s": CONNECT_TIMEOUT_S, "api_key": _api_key(arguments)
    }
    examinations, asked = [], []
    async with RolloutClient(arguments.url, vocab_size=1, **options) as client:
        with suppress(RolloutServerError):  # told below, of each
            await client.find_servers(CONNECT_TIMEOUT_S)
        for url in client.base_urls:
            examination, probe = Examination(url), Probe(client, url, arguments.timeout)
            examinations.append(examination)
            try:
                served = config or await _served_config(probe)
                client.vocab_size = _vocab_size(url, arguments.vocab_size, served)
                expected = Expected(
                    sampling, arguments.expect_dtype, arguments.expect_routed_experts, experts_shape(served)
                )
                asked.append((probe, await _ask(probe, expected, arguments, examination.rows, first=not asked)))
            except RolloutError as error:
                examination.rows.append(Row("asked", "failed", str(error)))
                if asyncio.current_task().cancelling():  # Ctrl-C, and then what it had to put back failed
                    break
        if len(asked) > 1:
            await _compare(examinations, [probe for probe, _ in asked], [facts for _, facts in asked])
    return examinations


async def _ask(
    probe: Probe, expected: Expected, arguments: argparse.Namespace, rows: list[Row], *, first: bool
) -> Facts:
    """Everything about one server. Only the first is compared with the model, the others with the first."""

    def say(what: str) -> None:
        print(f"megatron-rl-corr doctor: {probe.url}: {what}", file=sys.stderr, flush=True)

    say("asking about log-probs, precision and cache")
    quick, facts = await ask_quick(probe, expected)
    rows += quick
    if arguments.model and first:
        rows += await ask_model(probe, arguments.model, say)
    if arguments.full:
        with _signals_cancel():
            await ask_full(probe, facts, arguments.model, say, rows)
    return facts


@contextmanager
def _signals_cancel() -> Iterator[None]:
    """Every SIGINT and SIGTERM cancels, as often as it comes; after the first, the rest of the process ignores them.

    asyncio's own handler ends all tasks at a second Ctrl-C, and SIGTERM would end the process: either would leave a
    server paused, with changed weights. What comes once the server is put back would only spoil the exit status.
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


async def _served_config(probe: Probe) -> dict:
    """config.json of the folder that the server was started with; empty where it cannot be read here."""
    folder = str((await probe.control(requests.model_info())).get("model_path"))
    return read_config(folder) if (Path(folder) / "config.json").is_file() else {}


def _vocab_size(url: str, given: int | None, config: dict) -> int:
    size = given if given is not None else config.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ValueError(
            f"the vocabulary size of {url} is not known here (got {size}), and an id outside the vocabulary would end "
            "the server; give --model HF_DIR whose config.json has it, or --vocab-size"
        )
    return size


def _sampling(arguments: argparse.Namespace) -> SamplingParams | None:
    given = {"temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": arguments.top_k}
    given = {name: value for name, value in given.items() if value is not None}
    sampling = SamplingParams(1, **given) if given else None
    if sampling is not None:
        load_engine("sglang").check_sampling(sampling)
    return sampling


def _api_key(arguments: argparse.Namespace) -> str | None:
    name = arguments.api_key_env
    if name is not None and not os.environ.get(name):
        raise ValueError(f"--api-key-env names {name}, which is not set; export it, or leave the flag out")
    return os.environ[name] if name else None
