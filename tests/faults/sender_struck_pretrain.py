"""pretrain_any.py, of which the sender of a stage gets a signal in the middle of a bucket: KILL is
RANK:PUSH:SIGNAL, in the job's first attempt. When that was is written to the file STRUCK.
"""

import os
import runpy
import signal
import time
from pathlib import Path

from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.transports.broadcast import UpdateGroup
from tests.faults.mid_bucket import interrupted

RANK, PUSH, SIGNAL = os.environ["KILL"].split(":")
IS_IT = (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (RANK, "0")
pushes = 0
begin_push, send = WeightServers.begin_push, UpdateGroup.send


def counted_push(self):
    global pushes
    pushes += 1
    begin_push(self)


def strike():
    Path(os.environ["STRUCK"]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.Signals[SIGNAL])


def struck_send(self, bucket):
    return interrupted(send, self, bucket, strike) if IS_IT and pushes == int(PUSH) else send(self, bucket)


WeightServers.begin_push, UpdateGroup.send = counted_push, struck_send
runpy.run_path(str(Path(__file__).parents[1] / "matrix/pretrain_any.py"), run_name="__main__")
