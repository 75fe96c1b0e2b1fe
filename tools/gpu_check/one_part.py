"""The process of one part, whose failure is an exception: python -m tools.gpu_check.one_part
NAME DEVICE FILE
"""

import sys
from importlib import import_module
from pathlib import Path

import torch

from tools.gpu_check.outcome import NotRun, Outcome, require
from tools.gpu_check.parts import PARTS


def main(name: str, device: str, path: str) -> None:
    """Run the part, and save what it found."""
    require(
        device == "cpu" or torch.cuda.is_available(),
        f"torch {torch.__version__} finds no GPU, and there is one",
    )
    part = next(part for part in PARTS if part.name == name)
    module, function = part.function.split(".")
    try:
        outcome = getattr(import_module(f"tools.gpu_check.{module}"), function)(device)
    except NotRun as reason:
        outcome = Outcome(not_run=str(reason))
    outcome.machine = (
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}"
    )
    outcome.save(Path(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
