"""pretrain_any.py with a fault: INTERRUPT is "signal:N" or "overflow:N", in the N-th iteration.

signal: this process gets SIGTERM once the iteration's update is made; overflow: a gradient of it becomes infinite.
"""

import os
import runpy
import signal
from pathlib import Path

from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.training import get_args, training

KIND, AT = os.environ["INTERRUPT"].split(":")


def interrupted(training_log):
    def logged(losses, totals, rate, iteration, *args, **kwargs):
        if iteration == int(AT):
            os.kill(os.getpid(), signal.SIGTERM)
        return training_log(losses, totals, rate, iteration, *args, **kwargs)

    return logged


def overflowing(unscale):
    def unscaled(self):
        if get_args().curr_iteration + 1 == int(AT):
            self._collect_main_grad_data_for_unscaling()[0].fill_(float("inf"))
        return unscale(self)

    return unscaled


if KIND == "signal":
    training.training_log = interrupted(training.training_log)
elif KIND == "overflow":
    name = "_unscale_main_grads_and_check_for_nan"
    setattr(MixedPrecisionOptimizer, name, overflowing(getattr(MixedPrecisionOptimizer, name)))
runpy.run_path(str(Path(__file__).with_name("pretrain_any.py")), run_name="__main__")
