"""pretrain_any.py; a server ends, by SIGKILL, when a rank is about to send it a request.

With KILL_SERVER="PID URL N:ENDPOINT[ TAGS]" it is the N-th request of that kind from a rank.
"""

import os
import runpy
import signal
from pathlib import Path

from megatron_rl_corr.engines.control import ServerControl

pid, victim, moment = os.environ["KILL_SERVER"].split(" ", 2)
count, _, wanted = moment.partition(":")
ask, seen = ServerControl.ask, 0


async def ask_or_kill(self, url, request, **options):
    global seen
    tags = (request and request.json or {}).get("tags")
    if url == victim and request.endpoint + (f" {','.join(tags)}" if tags else "") == wanted:
        seen += 1
        if seen == int(count):
            os.killpg(int(pid), signal.SIGKILL)
            print(f"[killed] {wanted}", flush=True)
    return await ask(self, url, request, **options)


ServerControl.ask = ask_or_kill
runpy.run_path(str(Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"), run_name="__main__")
