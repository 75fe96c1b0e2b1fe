"""A copy of the package without one of its features: without the folder, and without its name in the list."""

import re
import shutil
from pathlib import Path

from megatron_rl_corr.config.features import FEATURES

ROOT = Path(__file__).resolve().parents[1]


def package_without(folder, *names):
    """The folder, for PYTHONPATH, of a copy without these features."""
    shutil.copytree(
        ROOT / "megatron_rl_corr", folder / "megatron_rl_corr", ignore=shutil.ignore_patterns("__pycache__")
    )
    listed = folder / "megatron_rl_corr/config/features.py"
    left = tuple(name for name in FEATURES if name not in names)
    text, changed = re.subn(r"(?ms)^FEATURES = \(.*?^\)$", f"FEATURES = {left!r}", listed.read_text())
    assert changed == 1
    listed.write_text(text)
    for name in names:
        shutil.rmtree(folder / "megatron_rl_corr/features" / name)
    return folder.resolve()
