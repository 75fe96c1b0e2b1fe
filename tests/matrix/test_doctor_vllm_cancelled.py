"""A doctor that is interrupted in its trial of an update, on a vLLM server: the test of tests/doctor."""

import pytest

from tests.doctor.test_real_server import (  # noqa: F401
    test_full_when_cancelled_at_any_point_then_the_server_has_its_weights_and_samples,
    vocab_size,
)
from tests.tiers import long

pytestmark = long


@pytest.fixture
def examined(vllm_server_fp32):
    return "vllm", vllm_server_fp32.url
