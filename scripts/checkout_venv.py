"""Makes .venv of a checkout: a virtual environment over the packages of a shared one, with
this package in it.

    ENVIRONMENT/bin/python scripts/checkout_venv.py ENVIRONMENT CHECKOUT

ENVIRONMENT is only read. .venv has a Python of its own, finds the shared packages by a .pth file, and
holds every program of ENVIRONMENT/bin and the checkout in editable form, so that `megatron-rl-corr` runs
the checkout's files.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PTH = "megatron_rl_corr_shared.pth"
# What `venv` itself puts into bin; a shared one of these would start the shared environment.
OWN_PROGRAMS = ("python", "activate", "Activate")


def make_venv(environment: Path, checkout: Path) -> None:
    """Make CHECKOUT/.venv anew; takes a few seconds and no network.

    Raises:
        subprocess.CalledProcessError: pip could not install the checkout; pip's output was printed.
    """
    target = checkout / ".venv"
    venv.EnvBuilder(symlinks=True, with_pip=False, prompt=checkout.name).create(target)
    (target / "shared").symlink_to(environment)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    own_packages = Path(sysconfig.get_path("purelib", vars={"base": str(target)}))
    # addsitedir, not the bare path: the shared packages have .pth files of their own.
    (own_packages / PTH).write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    link_nvidia(packages, own_packages, target)
    for program in sorted((environment / "bin").iterdir()):
        if not program.name.startswith(OWN_PROGRAMS):
            add_program(program, environment, target)
    install_checkout(target, checkout)


def link_nvidia(packages: Path, own_packages: Path, target: Path) -> None:
    """Link what the lock of a GPU brings: TARGET/cuda for CUDA_HOME, and NVIDIA's libraries into
    TARGET's own packages.

    Transformer Engine looks for cuDNN and others in the folder of the Python that runs, not
    on the whole path.
    """
    for compiler in packages.glob("nvidia/cu*/bin/nvcc"):
        (target / "cuda").symlink_to(compiler.parents[1])
        (own_packages / "nvidia").symlink_to(packages / "nvidia")


def add_program(program: Path, environment: Path, target: Path) -> None:
    """Put one program of the shared environment into TARGET/bin.

    A Python script starts TARGET's Python; any other program is linked. A shebang holds no blank and at
    most 127 characters, so the script is started by way of /bin/sh.
    """
    own = target / "bin" / program.name
    text = program.read_bytes()
    header, body = _split_header(text)
    if os.fsencode(environment / "bin" / "python") not in header:
        own.symlink_to(program)
        return
    python = os.fsencode(target / "bin" / "python")
    own.write_bytes(b"#!/bin/sh\n'''exec' \"" + python + b'" "$0" "$@"\n\' \'\'\'\n' + body)
    own.chmod(0o755)


def _split_header(script: bytes) -> tuple[bytes, bytes]:
    """The lines that name the interpreter, and the rest: one line, or three where pip started it
    by way of /bin/sh.
    """
    lines = script.split(b"\n", 3)
    if script.startswith(b"#!/bin/sh\n'''exec'") and len(lines) == 4:
        return b"\n".join(lines[:3]), lines[3]
    if script.startswith(b"#!"):
        return lines[0], script[len(lines[0]) + 1 :]
    return b"", script


def install_checkout(target: Path, checkout: Path) -> None:
    """Install the checkout into TARGET in editable form, with the shared environment's pip and setuptools."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    command = [
        target / "bin" / "python",
        "-m",
        "pip",
        "--isolated",
        "install",
        "--quiet",
        "--no-input",
        "--no-index",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
        "--editable",
        checkout,
    ]
    subprocess.run(command, check=True, env=variables, cwd=checkout)
    # setuptools writes it beside the sources; the installed metadata lies in .venv.
    shutil.rmtree(checkout / "megatron_rl_corr.egg-info", ignore_errors=True)


if __name__ == "__main__":
    make_venv(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
