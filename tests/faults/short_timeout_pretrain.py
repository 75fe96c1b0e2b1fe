"""pretrain_any.py with minutes of eight seconds in --distributed-timeout-minutes."""

import runpy
from datetime import timedelta
from pathlib import Path

from megatron.core import parallel_state
from megatron.training import initialize

SECONDS = 8


def short(*, minutes):
    return timedelta(seconds=SECONDS * minutes)


initialize.timedelta = parallel_state.timedelta = short
runpy.run_path(str(Path(__file__).parents[1] / "matrix/pretrain_any.py"), run_name="__main__")
