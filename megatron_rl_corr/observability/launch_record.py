"""How a run was started, for run.json: its command line without secrets, ranks, versions; by which a step
can be done again.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_rl_corr.engines.secrets import without_lookalikes, without_secret_words
from megatron_rl_corr.files import sha256_of

LAUNCHES = "launches"
"""Key of run.json: a record of each start whose steps are in metrics.jsonl."""
PACKAGES = (
    "megatron_rl_corr",
    "megatron-core",
    "torch",
    "transformer-engine",
    "triton",
    "numpy",
    "transformers",
    "safetensors",
    "pyarrow",
)
_VARIABLES = re.compile(
    "CUDA_DEVICE_MAX_CONNECTIONS|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE|NCCL_(ALGO|PROTO|NVLS_ENABLE)"
    "|NVTE_[A-Z0-9_]+|(OMP|MKL)_NUM_THREADS|MKL_CBWR|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|MEGATRON_RL_CORR"
)
"""Environment variables that decide how numbers are rounded, or whether the plugin is there."""
_HASHED = (".py", ".yaml", ".yml")
"""Ends of the names of files that are hashed: scripts and settings, which are small and stay as they are."""


def launch_record(
    script: str,
    arguments: Sequence[str],
    *,
    folder: str,
    environment: Mapping[str, str],
    launcher: bool,
    megatron: str,
    transformer_engine: str,
) -> dict[str, Any]:
    """The record of a start that run.json keeps.

    Example: {"time": 1763978405.25, "script": "pretrain_gpt.py", "arguments": ["--lr", "1e-6"], "launcher":
    true, "folder": "/work", "processes": 8, "processes_of_host": 8, "environment": {"OMP_NUM_THREADS": "1"},
    "files": {"loss.py": "9f86..."}, "versions": {"torch": "2.10.0"}}.

    Args:
        script: that trains.
        arguments: of it, Megatron's flags and ours.
        folder: that paths of the command line are relative to.
        environment: `variables_of_numbers`, as they were before Megatron sets its own.
        launcher: `megatron_rl_corr.launch` runs it; else Megatron has loaded the plugin.
        megatron, transformer_engine: versions, as they were imported.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return {
        "time": time.time(),
        "script": without_lookalikes(script, os.environ),
        "arguments": without_secret_words(arguments, os.environ),
        "launcher": launcher,
        "folder": folder,
        "processes": processes,
        "processes_of_host": int(os.environ.get("LOCAL_WORLD_SIZE", processes)),
        "environment": dict(environment),
        "files": hashes_of_files([script, *arguments], folder),
        "versions": _versions(megatron, transformer_engine),
    }


def variables_of_numbers() -> dict[str, str]:
    """The environment variables of this process that decide how numbers are rounded."""
    names = sorted(name for name in os.environ if _VARIABLES.fullmatch(name))
    return {name: without_lookalikes(os.environ[name], os.environ) for name in names}


def hashes_of_files(words: Sequence[str], folder: str) -> dict[str, str]:
    """SHA-256 of each script and settings file that a command line names, FILE.py of FILE.py:NAME too.

    Args:
        words: of the command line.
        folder: that paths are relative to.
    """
    found = {}
    for word in words:
        value = word.partition("=")[2] if word.startswith("--") else word
        for named in dict.fromkeys((value, value.partition(":")[0])):
            path = Path(folder, named)
            shown = named == without_lookalikes(named, os.environ)
            if shown and path.suffix in _HASHED and path.is_file():
                found[named] = sha256_of(path)
    return found


def earlier_launches(path: Path, first_step: int) -> list[dict[str, Any]]:
    """The records of a run.json whose steps before `first_step` stay; none of one that can't be read."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8")).get(LAUNCHES, [])
        return [one for one in kept if one["first_step"] < first_step]
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return []


def _versions(megatron: str, transformer_engine: str) -> Mapping[str, str]:
    import torch

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    # a checkout that is first on the path is another release than the one that is installed
    found |= {"megatron-core": megatron, "transformer-engine": transformer_engine}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return found | {"device": device, "cuda": str(torch.version.cuda), "platform": sys.platform}
