"""Collects what several checks refuse, so that a user sees everything that is wrong at once, in
one numbered list.

A check raises ValueError for one thing that is wrong, as ever; who runs several of them
collects their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Refusal(ValueError):
    """One or more things that are wrong. Its text is that of a single one as it is, or a numbered list.

    Args:
        problems: the text of each, with flag or field, value and remedy.
        partial: what could be made nevertheless; to read a refused value of it raises `Unknown`.
    """

    def __init__(self, problems: Iterable[str], partial: Any = None):
        self.problems, self.partial = tuple(dict.fromkeys(problems)), partial
        super().__init__(numbered(self.problems))

    def __reduce__(self) -> tuple:
        return type(self), (self.problems,)

    def each(self, change: Callable[[str], str]) -> Refusal:
        """The same with `change(text)` in the place of each text."""
        return Refusal(map(change, self.problems), self.partial)


class Unknown(Exception):
    """A check needs a value that was refused: it is left out silently, as what it would say may
    follow from that.
    """


class Nothing:
    """Stands for settings that could not be made: whatever is read of it is Unknown."""

    def __getattr__(self, name: str) -> Any:
        raise Unknown(name)


def problems_of(error: BaseException) -> tuple[str, ...]:
    """The texts of an error: several of `Refusal`, else one."""
    return error.problems if isinstance(error, Refusal) else (str(error),)


def numbered(problems: Iterable[str]) -> str:
    """One text as it is; several as a list with their number above it.

    Example: "2 problems:\\n  1. `loss` ...\\n  2. `urls` ...".
    """
    texts = list(problems)
    if len(texts) == 1:
        return texts[0]
    width = len(str(len(texts)))
    lines = []
    for number, text in enumerate(texts, start=1):
        first, *others = text.split("\n")
        lines += [f"  {number:>{width}}. {first}", *(f"{' ' * (width + 4)}{other}" for other in others)]
    return "\n".join([f"{len(texts)} problems:", *lines])


def known[Value](read: Callable[[], Value]) -> Value | None:
    """read(), or None where it reads a refused value."""
    try:
        return read()
    except Unknown:
        return None


class Problems:
    """Runs checks, and goes on after those that refuse something.

    Example:
        problems = Problems() folder = problems.check("folder", lambda: opened(path))
        problems.check("files", lambda: folder.check_files(), needs=["folder"])  # left out if there is no
        folder problems.raise_all()
    """

    def __init__(self):
        self.found: list[str] = []
        """The texts of what was refused, without repetitions."""
        self._failed: set[str] = set()
        """Names of checks that refused something, or were left out."""
        self._unknown: Unknown | None = None

    def __bool__(self) -> bool:
        return bool(self.found)

    def add(self, error: BaseException | str) -> None:
        """Take an error up; one that was found already is not listed again."""
        texts = [error] if isinstance(error, str) else problems_of(error)
        self.found += [text for text in dict.fromkeys(texts) if text not in self.found]

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Take up what one check raises: ValueError and OSError; a check that needs a refused
        value is left out.
        """
        try:
            yield
        except Unknown as unknown:
            self._unknown = unknown
        except (ValueError, OSError) as error:
            self.add(error)

    def accepts(self, check: Callable[[], object]) -> bool:
        """True if check() refuses nothing; one that is left out counts as passed."""
        try:
            check()
        except Unknown as unknown:
            self._unknown = unknown
        except (ValueError, OSError) as error:
            self.add(error)
            return False
        return True

    def check[Result](
        self, name: str, run: Callable[[], Result], *, needs: Iterable[str] = ()
    ) -> Result | None:
        """The result of run(); None where it refuses something, or a check that it needs did or was left out.

        Args:
            name: of this check, for what needs it.
            run: raises ValueError or OSError for what is wrong.
            needs: names of checks before it.
        """
        if self._failed.isdisjoint(needs):
            with self.catch():
                return run()
        self._failed.add(name)
        return None

    def passed(self, *names: str) -> bool:
        """True if none of these checks refused anything or was left out."""
        return self._failed.isdisjoint(names)

    def raise_all(self, partial: Any = None) -> None:
        """Raise Refusal with everything that was found, or Unknown if nothing was, but a check was
        left out for that.

        Args:
            partial: what could be made nevertheless.
        """
        if self.found:
            raise Refusal(self.found, partial)
        if self._unknown is not None:
            raise self._unknown


def check_each[Value](check: Callable[[Value], Any], values: Iterable[Value]) -> list[Any]:
    """[check(value) for each value].

    Raises:
        Refusal: what each of them that is wrong was refused for.
    """
    problems = Problems()
    results = [problems.check("", lambda value=value: check(value)) for value in values]
    problems.raise_all()
    return results
