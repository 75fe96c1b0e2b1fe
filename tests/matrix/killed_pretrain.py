"""pretrain_any.py, which ends all its processes at a moment that is the worst for what it leaves behind.

KILL_AT is MOMENT:N, "none:0" for a run like any other. N-th pass of the reference: "pass", its weights in
the place of the live ones. N-th save of a reference that is reset: "written", its folder is whole and
Megatron has not begun; "moving", a part of it is in the checkpoint; "moved", all of it is, and the
checkpoint is not finished. N-th bucket of the second push: "bucket", the servers have it.
"""

import contextlib
import os
import runpy
import shutil
import signal
from pathlib import Path

import psutil

from megatron_rl_corr.mcore.forward import BatchForward
from megatron_rl_corr.mcore.reference import checkpoint as reference_checkpoint
from megatron_rl_corr.weight_sync.servers import WeightServers

MOMENT, _, NUMBER = os.environ["KILL_AT"].partition(":")
reached = dict.fromkeys(("pass", "written", "moving", "moved", "bucket"), 0)
run, finish, move, send = BatchForward.run, reference_checkpoint._finish, shutil.move, WeightServers.send


def reach(moment):
    reached[moment] += 1
    if (moment, str(reached[moment])) != (MOMENT, NUMBER):
        return
    # the ranks, and writers of their checkpoints,
    for process in psutil.Process().parent().children(recursive=True):
        if process.pid != os.getpid():  # which would outlive them
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def killed_pass(self):
    scored = run(self)
    reach("pass")
    return scored


def killed_finish(*arguments):
    finish(*arguments)
    if os.environ["RANK"] == "0":
        reach("written")


def killed_move(source, target):
    if (MOMENT, str(reached["moving"] + 1)) == ("moving", NUMBER):  # as onto another file system
        Path(target).mkdir()
        for path in sorted(Path(source).iterdir())[:2]:
            shutil.copy(path, target)
    reach("moving")
    move(source, target)
    reach("moved")


def killed_send(self, bucket, version):
    send(self, bucket, version)
    if version.endswith("-1"):
        reach("bucket")


BatchForward.run, reference_checkpoint._finish, WeightServers.send = killed_pass, killed_finish, killed_send
reference_checkpoint.shutil.move = killed_move
runpy.run_path(str(Path(__file__).with_name("pretrain_any.py")), run_name="__main__")
