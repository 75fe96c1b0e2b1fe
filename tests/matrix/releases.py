"""Releases of megatron-core that are laid over the environment: where they are, and fetching them once.

A wheel is unpacked beside the environments that scripts/setup makes, and put first on PYTHONPATH; the rest
of the environment, torch above all, stays as it is. A checkout of Megatron-LM is put there as it is.
"""

import contextlib
import fcntl
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tools.cpu import environment

OVERLAID = ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
WITH_TRAINING = ("0.17.1", "0.18.2", "0.19.2")
"""Whose wheels hold megatron.training too."""
PATCHED = ("0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2")
"""All wheels that hold it, so that a patched tree can be tried."""
VARIABLE = "MEGATRON_RELEASES"
"""`all`, as `make test-matrix` sets it: every release; without it the oldest, beside what is installed."""
CHECKOUT = "MEGATRON_CHECKOUT"
"""Folder of a checkout of Megatron-LM that the whole matrix runs as one more release."""


def chosen():
    """The releases of this test run, the newest last."""
    value = os.environ.get(VARIABLE, "ends")
    assert value in ("all", "ends"), f"{VARIABLE} must be all or ends, got {value!r}"
    assert version("megatron-core") == OVERLAID[-1], (
        "the environment's own release is the newest of the matrix"
    )
    return OVERLAID if value == "all" else (OVERLAID[0], OVERLAID[-1])


def checkout():
    """What the checkout that is given says its version is, in a tuple; () without one, or
    outside of the matrix.
    """
    folder = os.environ.get(CHECKOUT)
    if folder is None or chosen() != OVERLAID:
        return ()
    said = runpy.run_path(str(Path(folder) / "megatron/core/package_info.py"))["__version__"].split("+")[0]
    assert said not in PATCHED + OVERLAID, (
        f"{CHECKOUT} {folder} is {said}, whose wheel the matrix runs; unset it"
    )
    return (said,)


def cache():
    """As scripts/setup has it."""
    named = os.environ.get("MEGATRON_RL_CORR_ENVS")
    return (
        Path(named)
        if named
        else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron_rl_corr"
    )


def release_folder(release):
    """The folder for PYTHONPATH, fetched where it is not there yet; None for the release
    that is installed.
    """
    if release == OVERLAID[-1]:
        return None
    if release in checkout():
        return compiled(Path(os.environ[CHECKOUT]).resolve())
    return wheel_folder(f"megatron-core=={release}")


def compiled(folder):
    """`folder`, once what Megatron compiles at its first start is there; torch brings the
    headers of pybind11.
    """
    includes = [Path(find_spec("torch").origin).parent / "include", sysconfig.get_path("include")]
    with locked(cache() / "checkout.lock"):
        subprocess.run(
            [
                "make",
                "-C",
                folder / "megatron/core/datasets",
                f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}",
                f"CPPFLAGS={' '.join(f'-I{include}' for include in includes)}",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return folder


@contextlib.contextmanager
def locked(path):
    """Held by one process at a time; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wheel_folder(requirement):
    """The folder for PYTHONPATH with the wheel of "NAME==VERSION" alone, fetched where it
    is not there yet.
    """
    folder = cache() / f"{requirement.replace('==', '-')}-py{sys.version_info.major}.{sys.version_info.minor}"
    with locked(Path(f"{folder}.lock")):
        if not folder.is_dir():
            fetch(requirement, folder)
    return folder


def fetch(requirement, folder):
    """Unpack the wheel next to `folder`, and rename it once it is whole."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pip = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--target",
            partial,
            requirement,
        ],
        env={
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PIP_USER", "PIP_TARGET")
        },
        capture_output=True,
        text=True,
    )
    if pip.returncode:
        raise RuntimeError(
            f"{requirement} could not be fetched into {folder}; this test needs pip's package index once, "
            f"and the folder afterwards. pip said:\n{pip.stderr[-1500:]}"
        )
    partial.rename(folder)


def release_environment(release, *paths):
    """Variables of a process with that release; `paths` come behind it on PYTHONPATH."""
    folder = release_folder(release)
    first = [str(path) for path in (folder, *paths) if path is not None]
    # A checkout under git would add its commit to its version.
    return environment(
        "megatron", {**os.environ, "PYTHONPATH": os.pathsep.join(first), "NO_VCS_VERSION": "1"}
    )
