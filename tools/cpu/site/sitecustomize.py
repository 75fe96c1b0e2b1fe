"""Installs the import hook that MEGATRON_RL_CORR_CPU asks for; the process gets longer slices and
rarer collections.

Without that variable it does nothing at all.

Python imports this file at its start when the folder is on PYTHONPATH, so it must stay cheap: the hook
waits for the engine's first import before it loads anything.
"""

import contextlib
import gc
import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
_HOOKED = {
    "megatron": ("megatron", "transformer_engine"),
    "sglang": ("sglang", "sgl_kernel"),
    "vllm": ("vllm",),
    "vllm_v2": ("vllm", "triton"),
}


class _Waiting:
    """Meta-path finder: at the engine's first import it loads the replacements and asks them ever after."""

    def __init__(self, engine):
        self.engine = engine
        self.finder = None

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in _HOOKED[self.engine]:
            return None
        if self.finder is None:
            if _ROOT not in sys.path:
                sys.path.append(_ROOT)
            from tools.cpu.import_hook import ReplacingFinder

            self.finder = ReplacingFinder(self.engine)
        return self.finder.find_spec(name, path, target)


def _install(engine):
    if engine not in _HOOKED:
        # `site` swallows ordinary exceptions, and the process would go on without its replacements.
        sys.stderr.write(
            f"MEGATRON_RL_CORR_CPU must be one of {', '.join(_HOOKED)}, got {engine!r}; "
            "unset it to run unchanged\n"
        )
        sys.stderr.flush()
        os._exit(2)
    sys.meta_path.insert(0, _Waiting(engine))
    # An engine's import makes a million objects that stay; with the usual 700, walking them took 1 of its
    # 8 seconds or more. It stays so: what training drops is freed without the collector, cycles wait
    # somewhat longer.
    gc.set_threshold(100_000)
    # A gloo thread that wakes takes the core from the rank that holds its lock, and spins until it gets
    # it: half of a step's system time, a quarter of all. Threads of this class do not preempt each
    # other when they wake.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if "MEGATRON_RL_CORR_CPU" in os.environ:
    _install(os.environ["MEGATRON_RL_CORR_CPU"])
