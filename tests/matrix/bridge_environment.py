"""Where `make setup-bridge` has laid Megatron-Bridge, and the variables of a process that finds it."""

import os
from pathlib import Path

import pytest

from tools.cpu import environment, gpu_available

FOLDER = Path(__file__).resolve().parents[2] / ".venv-bridge"
needs_bridge = [
    pytest.mark.skipif(not (FOLDER / "megatron/bridge").is_dir(), reason="make setup-bridge has not run"),
    pytest.mark.skipif(gpu_available(), reason="without a GPU only"),
]


def with_bridge(variables=None):
    """Variables of a Megatron process, by default of one without a GPU, that finds Megatron-Bridge."""
    variables = dict(environment("megatron") if variables is None else variables)
    return variables | {
        "PYTHONPATH": f"{FOLDER}{os.pathsep}{variables['PYTHONPATH']}",
        "HF_HUB_OFFLINE": "1",
    }
