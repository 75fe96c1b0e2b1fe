"""Marks of the drills: tests that break something on purpose and say what was promised and what was seen.

    @drill("trainer killed in a push, started with --load", promised="goes on without a hand at the servers")
    def test_...(seen): ...; seen("step 4 after 3.1 s")

A drill may be anywhere under tests/. `make test` runs those that are not `long`; `make test-faults`
runs all of them.
"""

import os

import pytest

RUNS_ALL = os.environ.get("FAULTS") == "all"
"""What make test-faults sets."""
long = pytest.mark.skipif(not RUNS_ALL, reason="make test-faults runs it")
"""A drill that takes more than a few seconds beside the servers that every session has."""


def drill(what: str, *, promised: str) -> pytest.MarkDecorator:
    """A row of the table of drills: what is done, and what is promised then."""
    return pytest.mark.drill(what, promised=promised)
