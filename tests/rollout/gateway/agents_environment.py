"""Runs programs that have the official clients, against a gateway in this process."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from megatron_rl_corr.rollout.gateway.server import Gateway
from tests.rollout.gateway.scripted_session import SAMPLING, ScriptedSession

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-agents/bin/python"


def require_clients():
    if not PYTHON.exists():
        pytest.skip("the official clients are not installed; make setup-agents installs them")


async def run_client(script, *arguments):
    """(status, stdout, stderr) of `python SCRIPT ARGUMENTS` by the interpreter of the clients."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        script,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=variables,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), errors.decode()


def all_cases(script, *, root=False):
    """(what the program printed, the session that it asked, what the session raised)."""
    require_clients()

    async def run():
        async with Gateway(SAMPLING, alive_after_s=0.1) as gateway:
            session = ScriptedSession()
            key = gateway.open_episode(session)
            url = gateway.root_url if root else gateway.base_url
            status, out, errors = await run_client(Path(__file__).with_name(script), url, key)
            assert status == 0, errors
            with pytest.raises(RuntimeError, match="no server is left") as failure:
                gateway.close_episode(key)
            return json.loads(out), session, failure.value

    return asyncio.run(run())
