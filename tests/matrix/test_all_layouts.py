"""The corrected step of two and four processes in what tests/mcore/test_gradients.py leaves out."""

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

pytestmark = pytest.mark.skipif(
    chosen() != OVERLAID, reason="make test-matrix runs it; test_gradients.py has the rest"
)
PARAMETERS = {"moe": 135, "dense": 47}


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_corrected_step_in_the_other_ways_and_layouts_then_equal_hf_autograd(
    kind,
    processes,
    request,
    reference_of,  # noqa: F811
):
    folder = request.getfixturevalue("tiny_moe_dir" if kind == "moe" else "tiny_dense_dir")
    layouts = (
        [*moe_layouts(processes), *EXTRA[processes]] if kind == "moe" else list(dense_layouts(processes))
    )
    path, reference = reference_of(folder)
    known = some(specs(layouts), processes)
    found = results(processes, folder, path, [spec for spec in specs(layouts) if spec not in known])
    assert len(found) > 4 * len(layouts) - 4
    found += results(processes, folder, path, [spec | {"local": True} for spec in known])
    check(found, reference, parameters=PARAMETERS[kind])
