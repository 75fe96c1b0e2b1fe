"""pretrain_any.py, which ends all its processes in the N-th pass of the reference policy, its weights in place.

KILL_IN_REFERENCE_PASS=N; without it a run like any other.
"""

import os
import runpy
import signal
from pathlib import Path

import psutil

from megatron_rl_corr.mcore.reference import ReferencePass

passes = 0
run = ReferencePass.run


def killing(self):
    global passes
    passes += 1
    scored = run(self)
    if str(passes) == os.environ.get("KILL_IN_REFERENCE_PASS"):
        for writer in psutil.Process().children(recursive=True):  # of checkpoints: they would outlive it
            writer.kill()
        os.kill(os.getpid(), signal.SIGKILL)
    return scored


ReferencePass.run = killing
runpy.run_path(str(Path(__file__).with_name("pretrain_any.py")), run_name="__main__")
