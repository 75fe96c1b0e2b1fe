"""pretrain_any.py, whose ranks are all killed at one request of a push, before it is sent or
once it is answered.

KILL_AT is PUSH:REQUEST:SIDE:N. PUSH: 1 for the first push of the run. REQUEST: a method of ServerControl.
SIDE: before or after. N: the N-th such request of the push. With SERVER the process group of that number
is killed instead; the time of it is written to the file KILLED.
"""

import functools
import os
import runpy
import signal
import time
from pathlib import Path

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.weight_sync.servers import WeightServers
from tests.faults import killing

PUSH, REQUEST, SIDE, NUMBER = os.environ["KILL_AT"].split(":")
pushes, requests = 0, 0
use, request = WeightServers.use, getattr(ServerControl, REQUEST)


def counted_use(self, states):
    global pushes, requests
    pushes, requests = pushes + 1, 0
    use(self, states)


def kill():
    if "SERVER" in os.environ:
        os.killpg(int(os.environ["SERVER"]), signal.SIGKILL)
        Path(os.environ["KILLED"]).write_text(str(time.time()))
    else:
        killing.kill_all()


@functools.wraps(request)
async def killed_request(self, *arguments, **options):
    global requests
    requests += 1
    is_it = (pushes, requests) == (int(PUSH), int(NUMBER))
    if is_it and SIDE == "before":
        kill()
    answer = await request(self, *arguments, **options)
    if is_it and SIDE == "after":
        kill()
    return answer


WeightServers.use = counted_use
setattr(ServerControl, REQUEST, killed_request)
script = Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"
runpy.run_path(str(script), run_name="__main__")
