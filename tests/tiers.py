"""Which tests `make test` leaves to `make test-matrix`: they take long, and show in another layout, size or
engine what a test of `make test` shows.

A file that has some is marked `pytestmark = matrix`, by which `make test-matrix` finds it; it runs the whole
file. The folder tests/matrix is marked by itself.
"""

import os

import pytest

IN_MATRIX = os.environ.get("MEGATRON_RELEASES") == "all"
"""What make test-matrix sets."""
matrix = pytest.mark.matrix
long = pytest.mark.skipif(not IN_MATRIX, reason="make test-matrix runs it")
"""One test that is left to the matrix."""


def in_matrix(*cases) -> list:
    """These cases of a test, in the matrix alone."""
    return list(cases) if IN_MATRIX else []
