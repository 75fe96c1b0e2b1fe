"""Defects for a test's SGLang server, switched on by files in the folder that PLANTED_DEFECTS names.

Stands before the package's own sitecustomize on the server's PYTHONPATH, and runs that one first.
"""

import importlib.util
import os
import sys
from pathlib import Path


def planted(name):
    return (Path(os.environ["PLANTED_DEFECTS"]) / name).exists()


def sampler(module):
    """ignore_temperature: sampling and log-probs at temperature 1, whatever is asked for. seed_42: one seed for all."""
    forward = module.Sampler.forward

    def planted_forward(self, logits_output, sampling_info, *args, **kwargs):
        if planted("ignore_temperature"):
            sampling_info.temperatures.fill_(1.0)
        if planted("seed_42"):
            sampling_info.sampling_seed = module.torch.full((len(sampling_info.temperatures),), 42)
        return forward(self, logits_output, sampling_info, *args, **kwargs)

    module.Sampler.forward = planted_forward


def keep_cache(module):
    """A flush that says it has flushed."""
    flush_cache = module.Scheduler.flush_cache

    def planted_flush_cache(self, *args, **kwargs):
        return True if planted("keep_cache") else flush_cache(self, *args, **kwargs)

    module.Scheduler.flush_cache = planted_flush_cache


AFTER_IMPORT = {"sglang.srt.layers.sampler": sampler, "sglang.srt.managers.scheduler": keep_cache}


class Planter:
    def find_spec(self, name, path=None, target=None):
        if name not in AFTER_IMPORT:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(spec for spec in others if spec is not None)
        execute = spec.loader.exec_module

        def exec_and_plant(module):
            execute(module)
            AFTER_IMPORT[name](module)

        spec.loader.exec_module = exec_and_plant
        return spec


for folder in sys.path:
    original = Path(folder) / "sitecustomize.py"
    if original.is_file() and original != Path(__file__):
        spec = importlib.util.spec_from_file_location("original_sitecustomize", original)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        break
sys.meta_path.insert(0, Planter())
