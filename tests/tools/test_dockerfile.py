"""The Dockerfile: instructions that Docker knows, `make setup` on this checkout, and only
files that exist.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTIONS = {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}


def instructions():
    """[(instruction, the rest)], continued lines joined and comments left out."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text()).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def of(name):
    return [rest for instruction, rest in instructions() if instruction == name]


def test_dockerfile_when_read_then_every_line_is_an_instruction_that_parses():
    assert {name for name, _ in instructions()} == INSTRUCTIONS
    [base] = of("FROM")
    # Ubuntu 24.04 has Python 3.12 and a C library that is new enough.
    assert re.fullmatch(r"nvidia/cuda:13\.\d+\.\d+-base-ubuntu24\.04", base)
    for command in of("RUN"):
        subprocess.run(["bash", "-n", "-c", command], check=True)
    for line in of("ENV"):
        assert all(re.fullmatch(r"[A-Z_]+=\S+", part) for part in shlex.split(line))
    assert all(isinstance(json.loads(command), list) for command in of("CMD"))


def test_dockerfile_when_it_sets_up_then_by_make_setup_with_the_gpus_lock():
    steps = instructions()
    assert ("RUN", "make setup") in steps
    before = steps[: steps.index(("RUN", "make setup"))]
    variables = dict(
        part.split("=", 1) for name, rest in before if name == "ENV" for part in shlex.split(rest)
    )
    # No GPU is seen while an image is built.
    assert variables["DEVICE_FOR_SETUP"] == "gpu"
    assert re.search(r"\bg\+\+ .*python3\.12-dev python3\.12-venv", of("RUN")[0])
    # Everything is copied before it, into the folder whose programs are put on PATH after it.
    assert before[-2:] == [("WORKDIR", of("WORKDIR")[0]), ("COPY", ". .")]
    after = dict(part.split("=", 1) for part in shlex.split(of("ENV")[-1]))
    assert after == {
        "PATH": f"{of('WORKDIR')[0]}/.venv/bin:$PATH",
        "CUDA_HOME": f"{of('WORKDIR')[0]}/.venv/cuda",
    }


def test_dockerfile_when_it_names_files_then_they_exist_and_are_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    named = re.findall(r"\b[\w.-]+/[\w./-]*\w\.(?:lock|sh|py|md)\b", (ROOT / "Dockerfile").read_text())
    assert named == ["requirements/gpu.lock"]
    for path in [*named, "Makefile", "setup.py", "pyproject.toml", "scripts/setup", "LICENSE", "README.md"]:
        assert (ROOT / path).is_file()
        assert not {path, path.split("/")[0]} & set(ignored)
    # A .venv of the host would be taken for the image's.
    assert ".venv" in ignored


def test_folders_of_the_first_run_then_neither_git_nor_docker_takes_them():
    page = (ROOT / "docs/get_started/first_gpu_run.md").read_text()
    folders = {*re.findall(r"--local-dir (\w+)/", page), *re.findall(r"\bin `(runs)/", page)}
    assert folders == {"models", "data", "runs"}
    by_git, by_docker = ((ROOT / name).read_text().splitlines() for name in (".gitignore", ".dockerignore"))
    # Only those at the top: the package has folders of these names.
    assert {f"/{folder}/" for folder in folders} <= set(by_git) and folders <= set(by_docker)
    mounts = {f"{folder}:{of('WORKDIR')[0]}/{folder}" for folder in folders}
    for path in ("Dockerfile", "docs/get_started/install.md"):
        assert set(re.findall(r'-v "\$PWD/(\S+)"', (ROOT / path).read_text())) == mounts
