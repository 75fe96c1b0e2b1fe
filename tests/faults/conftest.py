import pytest

from tests.made_runs import make_steps, write_run  # noqa: F401
from tests.matrix.patched import unchanged


@pytest.fixture
def trained_server(sglang_server_fp32, tiny_moe_dir):
    """The shared float32 server, for a run that trains: later tests find its first weights."""
    with unchanged(sglang_server_fp32, tiny_moe_dir) as server:
        yield server
