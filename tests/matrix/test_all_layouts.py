"""The corrected step of four processes in the ways that tests/mcore/test_gradients.py leaves out."""

import pytest

from tests.matrix.releases import OVERLAID, chosen
from tests.mcore.test_gradients import (
    EXTRA,
    check,
    dense_layouts,
    moe_layouts,
    reference_of,  # noqa: F401
    results,
    some,
    specs,
    tiny_dense_dir,  # noqa: F401
)

pytestmark = pytest.mark.skipif(chosen() != OVERLAID, reason="make test-matrix runs it; test_gradients.py has the rest")
WIDE = {"moe": [*moe_layouts(4), *EXTRA[4]], "dense": list(dense_layouts(4))}
PARAMETERS = {"moe": 135, "dense": 47}


@pytest.mark.parametrize("kind", WIDE)
def test_corrected_step_in_the_other_way_of_each_layout_then_equal_hf_autograd(kind, request, reference_of):  # noqa: F811
    folder = request.getfixturevalue("tiny_moe_dir" if kind == "moe" else "tiny_dense_dir")
    path, reference = reference_of(folder)
    known = some(specs(WIDE[kind]), 4)
    found = results(4, folder, path, [spec for spec in specs(WIDE[kind]) if spec not in known])
    assert len(found) > 4 * len(WIDE[kind]) - 4
    check(found, reference, parameters=PARAMETERS[kind])
