"""Replace one attribute of a module, or add what it misses: its place, its new value and the reason."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MARK = "_megatron_rl_corr_cpu"


@dataclass(frozen=True)
class Replacement:
    """`module.name` becomes `make(original)`; `name` may be a path such as `Tensor.to`."""

    module: str
    name: str
    make: Callable[[Any], Any]
    why: str

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"

    def locate(self) -> tuple[Any, str]:
        """The object that holds the attribute, and the attribute's last name."""
        owner, last = _owner(self.module, self.name)
        if not hasattr(owner, last):
            raise RuntimeError(
                f"tools.cpu replaces {self.target}, which this version does not have; "
                "install the versions of requirements/cpu.lock"
            )
        return owner, last

    def apply(self) -> None:
        owner, last = self.locate()
        new = self.make(getattr(owner, last))
        # a class method is bound anew each time it is read
        setattr(getattr(new, "__func__", new), MARK, True)
        setattr(owner, last, new)

    def is_applied(self) -> bool:
        owner, last = self.locate()
        return hasattr(getattr(owner, last), MARK)


@dataclass(frozen=True)
class MissingName:
    """`module.name`, which may be a path, becomes `value` where it is read without ever having been made."""

    module: str
    name: str
    value: Any
    why: str

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"

    def locate(self) -> tuple[Any, str]:
        return _owner(self.module, self.name)

    def apply(self) -> None:
        owner, last = self.locate()
        if not hasattr(owner, last):
            setattr(owner, last, self.value)

    def is_applied(self) -> bool:
        owner, last = self.locate()
        return hasattr(owner, last)


@dataclass(frozen=True)
class NewEntry:
    """The mapping `module.name` gets an entry `key`, made once its module was executed."""

    module: str
    name: str
    key: str
    make: Callable[[], Any]
    why: str

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}[{self.key!r}]"

    def apply(self) -> None:
        getattr(importlib.import_module(self.module), self.name)[self.key] = self.make()

    def is_applied(self) -> bool:
        return self.key in getattr(importlib.import_module(self.module), self.name)


def _owner(module: str, name: str) -> tuple[Any, str]:
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, last
