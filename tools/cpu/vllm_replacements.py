"""Replacements for a process that runs vLLM 0.32 without a GPU."""

import ctypes
import multiprocessing
import os
import signal

from tools.cpu.replacement import Replacement
from tools.process_group import PR_SET_PDEATHSIG

EARLY: list[Replacement] = []


def _ends_with_its_parent(original):
    def run_engine_core(*args, **kwargs) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # it ended before the signal was armed
            os._exit(1)
        original(*args, **kwargs)

    return run_engine_core


def _forked(original):
    def get_mp_context():
        return multiprocessing.get_context("fork")

    return get_mp_context


LATE = [
    Replacement(
        "vllm.v1.engine.core", "EngineCoreProc.run_engine_core", _ends_with_its_parent,
        "the engine's process outlives a server that is killed",
    ),
    Replacement(
        "vllm.utils.system_utils", "get_mp_context", _forked,
        "vLLM's CPU platform spawns the engine's process, which imports for seconds what a fork has imported",
    ),
]  # fmt: skip
