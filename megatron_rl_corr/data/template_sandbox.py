"""Jinja's sandbox with a short way for what chat templates do most.

Templates come with checkpoints, and run in a sandbox. Its look at each attribute and call is half of what
the rendering of a long conversation takes; keys of a message, methods of texts, a loop's names and values of
a namespace need none.
"""

from __future__ import annotations

from types import BuiltinMethodType
from typing import Any

from jinja2 import Environment
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_OF_DICTS = frozenset(dir(dict))
_OF_TEXTS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
"""The two can reach any attribute of what they format."""
_OF_LOOPS = frozenset(("first", "last", "index", "index0", "revindex", "revindex0", "length"))
_VALUES = frozenset((bool, int, str))
"""Types of a template's own variables from which nothing can be reached."""
_FROM_LOOPS = ("_loop_vars", "_block_vars")
"""What compiled templates give to each call, for those that ask for the context."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """As its base in all that templates can see."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """obj.attribute."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _OF_TEXTS) or (kind is LoopContext and attribute in _OF_LOOPS):
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):
            value = getattr(obj, attribute, None)
            if type(value) in _VALUES:
                return value
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """obj(*args, **kwargs)."""
        if type(obj) is BuiltinMethodType and type(obj.__self__) is str and obj.__name__ in _OF_TEXTS:
            for name in _FROM_LOOPS:
                kwargs.pop(name, None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


def shorten(environment: Environment) -> None:
    """Give the sandbox of a compiled template these short ways."""
    if type(environment) is ImmutableSandboxedEnvironment:
        environment.__class__ = TemplateSandbox
