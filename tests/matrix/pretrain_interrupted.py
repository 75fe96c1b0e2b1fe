"""pretrain_any.py with a fault: INTERRUPT is "signal:N", "overflow:N" or "rejected:N", in the N-th iteration.

signal: this process gets SIGTERM once the iteration's update is made; overflow: a gradient of it becomes
infinite; rejected: Megatron's rerun state machine finds a gradient wrong, computes it again, and wants
to save and leave.
"""

import os
import runpy
import signal
from pathlib import Path

from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.rerun_state_machine import RerunStateMachine
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


def rejecting(validate_result):
    def validated(self, result, rejection_func, *args, **kwargs):
        rejected = get_args().curr_iteration + 1 == int(AT)
        return validate_result(
            self, result, (lambda result: True) if rejected else rejection_func, *args, **kwargs
        )

    return validated


if KIND == "signal":
    training.training_log = interrupted(training.training_log)
elif KIND == "overflow":
    name = "_unscale_main_grads_and_check_for_nan"
    setattr(MixedPrecisionOptimizer, name, overflowing(getattr(MixedPrecisionOptimizer, name)))
elif KIND == "rejected":
    RerunStateMachine.validate_result = rejecting(RerunStateMachine.validate_result)
runpy.run_path(str(Path(__file__).with_name("pretrain_any.py")), run_name="__main__")
