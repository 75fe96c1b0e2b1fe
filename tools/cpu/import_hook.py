"""Import hook that applies the replacements: early ones before an engine's first module, late ones
after their own.
"""

import importlib.machinery
from collections import defaultdict
from pathlib import Path
from types import ModuleType

from tools.cpu.process_environment import TRANSFORMER_ENGINE
from tools.cpu.replacement import Replacement

# `megatron` itself is a namespace without code; these are the modules through which it is entered.
ENTRIES = {
    "megatron": ("megatron.core", "megatron.training"),
    "sglang": ("sglang",),
    "vllm": ("vllm",),
    "vllm_v2": ("vllm",),
}


class ReplacingFinder:
    """Meta-path finder that never finds a module of its own, but wraps what the path finder found.

    A late replacement is applied right after its module was executed, hence before another module can copy
    the original name from it. Where torch sees a GPU the finder is inert.
    """

    def __init__(self, engine: str) -> None:
        import torch

        self.entries = ENTRIES[engine]
        self.early: list[Replacement] = []
        self.late: dict[str, list[Replacement]] = defaultdict(list)
        self.stub: str | None = None
        self.hidden: str | None = None
        if torch.cuda.is_available():
            return
        if engine == "megatron":
            from tools.cpu.megatron_replacements import EARLY, LATE

            self.hidden = "transformer_engine"
        elif engine == "vllm":
            from tools.cpu.vllm_replacements import EARLY, LATE
        elif engine == "vllm_v2":
            from tools.cpu.vllm_replacements import EARLY
            from tools.cpu.vllm_replacements import LATE_V2 as LATE
        else:
            from tools.cpu.sglang_replacements import EARLY, LATE, STUB

            self.stub = STUB
        self.early = list(EARLY)
        for replacement in LATE:
            self.late[replacement.module].append(replacement)

    def find_spec(self, name: str, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        if name == self.hidden:
            return _without_gpu(name)
        if name not in self.entries and name not in self.late:
            return self._stub_spec(name, path)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader, name)
        return spec

    def _wrap(self, loader, name: str) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if name in self.entries:
                while self.early:
                    self.early.pop(0).apply()
            execute(module)
            for replacement in self.late.get(name, ()):
                replacement.apply()

        loader.exec_module = exec_module

    def _stub_spec(self, name: str, path) -> importlib.machinery.ModuleSpec | None:
        if self.stub is None or name.partition(".")[0] != self.stub:
            return None
        if importlib.machinery.PathFinder.find_spec(name, path) is not None:
            return None
        from tools.cpu.stub import StubLoader

        return importlib.machinery.ModuleSpec(name, StubLoader(), is_package=True)


class _NeedsGPU:
    """Loads nothing, so that Megatron takes the package for one that is not installed."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        raise ModuleNotFoundError(f"{spec.name} needs a GPU, and there is none", name=spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def _without_gpu(name: str) -> importlib.machinery.ModuleSpec | None:
    """The stand-in's spec, if it is on the path; a package that needs a GPU is as good as none."""
    spec = importlib.machinery.PathFinder.find_spec(name)
    if (
        spec is not None
        and spec.origin is not None
        and TRANSFORMER_ENGINE in Path(spec.origin).resolve().parents
    ):
        return spec
    return importlib.machinery.ModuleSpec(name, _NeedsGPU())
