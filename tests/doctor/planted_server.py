"""An SGLang server with defects that files switch on, in the folder that PLANTED_DEFECTS names.

Its command line is sglang.launch_server's. Run in a fork that has SGLang, so it reads again what is
read at an import.
"""

import os
import runpy
import time
from pathlib import Path

from sglang.srt.layers import logits_processor, sampler
from sglang.srt.managers import scheduler


def planted(name):
    return (Path(os.environ["PLANTED_DEFECTS"]) / name).exists()


def plant_in_sampler(module):
    """ignore_temperature: sampling and log-probs at temperature 1, whatever is asked for. seed_42:
    one seed for all.
    """
    forward = module.Sampler.forward

    def planted_forward(self, logits_output, sampling_info, *args, **kwargs):
        if planted("ignore_temperature"):
            sampling_info.temperatures.fill_(1.0)
        if planted("seed_42"):
            sampling_info.sampling_seed = module.torch.full((len(sampling_info.temperatures),), 42)
        return forward(self, logits_output, sampling_info, *args, **kwargs)

    module.Sampler.forward = planted_forward


def plant_in_scheduler(module):
    """keep_cache: a flush that says it has flushed. slow_loop: answers leave 50 ms before
    their batch is over.
    """
    flush_cache, process_batch_result = module.Scheduler.flush_cache, module.Scheduler.process_batch_result

    def planted_flush_cache(self, *args, **kwargs):
        return True if planted("keep_cache") else flush_cache(self, *args, **kwargs)

    def planted_process_batch_result(self, *args, **kwargs):
        process_batch_result(self, *args, **kwargs)
        if planted("slow_loop"):
            time.sleep(0.05)

    module.Scheduler.flush_cache = planted_flush_cache
    module.Scheduler.process_batch_result = planted_process_batch_result


def plant_in_logits(module):
    """exchange: logits of the two ids that the file names are exchanged, whatever weights are pushed."""
    get_logits = module.LogitsProcessor._get_logits

    def planted_get_logits(self, *args, **kwargs):
        logits = get_logits(self, *args, **kwargs)
        if planted("exchange"):
            one, other = map(int, Path(os.environ["PLANTED_DEFECTS"], "exchange").read_text().split())
            logits[:, [one, other]] = logits[:, [other, one]]
        return logits

    module.LogitsProcessor._get_logits = planted_get_logits


sampler.SGLANG_RETURN_ORIGINAL_LOGPROB = sampler.get_bool_env_var("SGLANG_RETURN_ORIGINAL_LOGPROB")
if "PLANTED_DEFECTS" in os.environ:
    plant_in_sampler(sampler)
    plant_in_scheduler(scheduler)
    plant_in_logits(logits_processor)
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
