"""A stand-in for a package of GPU kernels: every name can be imported, a call raises KernelMissingError."""

from importlib.machinery import ModuleSpec
from types import ModuleType


class KernelMissingError(RuntimeError):
    """A kernel was called that exists only on a GPU."""


class _Kernel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, item: str) -> "_Kernel":
        if item.startswith("__"):
            raise AttributeError(item)
        return _Kernel(f"{self._name}.{item}")

    def __call__(self, *args, **kwargs):
        raise KernelMissingError(
            f"{self._name} needs a GPU; without one it is a stand-in that can only be imported"
        )


class _StubModule(ModuleType):
    def __getattr__(self, item: str) -> _Kernel:
        if item.startswith("__"):
            raise AttributeError(item)
        value = _Kernel(f"{self.__name__}.{item}")
        setattr(self, item, value)
        return value


class StubLoader:
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: _StubModule makes a name when it is read."""
