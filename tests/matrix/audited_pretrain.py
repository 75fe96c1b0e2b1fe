"""pretrain_any.py under tests/faults/audit; behind each step it notes where its processes listen."""

import json
import os
import runpy
from pathlib import Path

import psutil

from megatron_rl_corr.mcore.step import CorrectedStep

runpy.run_path(str(Path(__file__).parents[1] / "faults/audit/sitecustomize.py"))
run = CorrectedStep.run


def noted(self, *arguments):
    """As the original; then the sockets of this rank and of all that it has started."""
    result = run(self, *arguments)
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                told = {"pid": process.pid, "what": "listen", "of": f"{one.laddr.ip} {one.laddr.port}"}
                with open(os.environ["AUDIT_FILE"], "a") as file:
                    file.write(json.dumps(told) + "\n")
    return result


CorrectedStep.run = noted
runpy.run_path(str(Path(__file__).with_name("pretrain_any.py")), run_name="__main__")
