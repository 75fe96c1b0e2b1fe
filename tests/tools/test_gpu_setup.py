"""`make setup` on a machine with a GPU, made of stand-ins: what it lacks is named, and how the
source is compiled.
"""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "awk bash cat cut df dirname env flock getconf grep head mkdir rm sed sh sha256sum sort tail uname"
OLD_DRIVER = "| NVIDIA-SMI 550.54.15      Driver Version: 550.54.15      CUDA Version: 12.4     |"
DRIVER = "| NVIDIA-SMI 610.43.02       KMD Version: 610.43.02      CUDA UMD Version: 13.3     |"


def program(text):
    return f"#!/bin/sh\n{text}\n"


def nvidia_smi(header):
    """Answers -L with a GPU, and prints the table's head without an option."""
    return program(
        f'if [ "$1" = -L ]; then echo "GPU 0: NVIDIA H100 (UUID: GPU-1)"; else echo "{header}"; fi'
    )


def python(include):
    """This Python, whose headers lie in the folder `include`."""
    return program(f'case "$*" in *get_path*) echo {include} ;; *) exec {sys._base_executable} "$@" ;; esac')


@pytest.fixture
def set_up(tmp_path):
    """set_up(programs, **variables): status and output of scripts/setup with these programs;
    None takes one away.
    """
    checkout, path, include = (tmp_path / name for name in ("my code", "path", "include"))
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    shutil.copytree(ROOT / "requirements", checkout / "requirements")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout / name)
    path.mkdir()
    include.mkdir()
    (include / "Python.h").touch()
    for name in TOOLS.split():
        (path / name).symlink_to(shutil.which(name))
    complete = {"nvidia-smi": nvidia_smi(DRIVER), "g++": program("exit 0"), "python3.12": python(include)}

    def run(programs, **variables):
        for name, text in (complete | programs).items():
            if text is not None:
                (path / name).unlink(missing_ok=True)
                (path / name).write_text(text)
                (path / name).chmod(0o755)
        variables |= {
            "PATH": str(path),
            "HOME": str(tmp_path),
            "MEGATRON_RL_CORR_ENVS": str(tmp_path / "envs"),
            "PYTHON_FOR_SETUP": str(path / "python3.12"),
        }
        done = subprocess.run(
            ["scripts/setup"], cwd=checkout, env=variables, capture_output=True, text=True, timeout=60
        )
        assert not list((tmp_path / "envs").glob("env-*"))
        return done.returncode, done.stdout + done.stderr

    return run


FULL_DISK = program("printf 'Avail\\n5120\\n'")
LACKING = {
    "a driver as new as the lock's CUDA": (
        {"nvidia-smi": nvidia_smi(OLD_DRIVER)},
        "the NVIDIA driver 550.54.15 knows CUDA up to 12.4, and the torch of requirements/gpu.lock needs "
        "CUDA 13",
        "install a newer driver: for CUDA 13 it is 580 or newer",
    ),
    "a driver that works": (
        {
            "nvidia-smi": program(
                '[ "$1" = -L ] && echo "GPU 0: x" && exit; echo "Failed to initialize NVML"; exit 18'
            )
        },
        "nvidia-smi finds no working driver: Failed to initialize NVML",
        "restart the machine",
    ),
    "a compiler": ({"g++": None}, "there is no g++,", "apt install g++"),
    "a compiler of C++20": (
        {"g++": program('[ "$1" = --version ] && echo "g++ (GCC) 7.5.0" && exit; exit 1')},
        "g++ compiles no C++20: g++ (GCC) 7.5.0",
        "install g++ 11 or newer",
    ),
    "Python's headers": (
        {"python3.12": python("/nowhere")},
        "there is no /nowhere/Python.h",
        "apt install python3.12-dev",
    ),
    "room on the disk": ({"df": FULL_DISK}, "has 5 GB free", "MEGATRON_RL_CORR_ENVS=/path make setup"),
    "a new C library": (
        {"getconf": program("echo glibc 2.31")},
        "this system has glibc 2.31, and the locks need glibc 2.34 or newer",
        "Ubuntu 22.04",
    ),
    "glibc": ({"getconf": program("exit 1")}, "this system has another C library", "Ubuntu 22.04"),
    "an x86-64 processor": (
        {"uname": program("echo Linux aarch64")},
        "this is Linux aarch64",
        "Linux x86_64",
    ),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_setup_when_the_gpu_machine_lacks_something_then_it_is_named_with_a_remedy(set_up, lacking):
    programs, named, remedy = LACKING[lacking]
    status, output = set_up(programs)
    assert status == 1 and "set-up failed: " in output and named in output and remedy in output, output


def test_setup_when_nvidia_smi_does_not_tell_then_it_says_so_and_goes_on(set_up):
    status, output = set_up({"nvidia-smi": None, "df": FULL_DISK}, DEVICE_FOR_SETUP="gpu")
    assert "the driver is not checked; requirements/gpu.lock needs one that knows CUDA 13" in output
    assert status == 1 and "has 5 GB free" in output


def test_setup_when_told_the_device_then_a_gpu_is_not_looked_for(set_up):
    programs = {"g++": None, "df": FULL_DISK}
    status, output = set_up(programs, DEVICE_FOR_SETUP="cpu")
    # The lock of the CPU needs no compiler and less room: 8 GB.
    assert status == 1 and "has 5 GB free" in output and "takes 8 GB" in output
    assert "there is no GPU here" not in output
    assert "DEVICE_FOR_SETUP is tpu" in set_up(programs, DEVICE_FOR_SETUP="tpu")[1]


def test_setup_when_it_finds_no_gpu_then_it_says_so_and_names_the_command_for_a_login_node(set_up):
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU here")
    status, output = set_up({"nvidia-smi": None, "df": FULL_DISK})
    assert status == 1 and "takes 8 GB" in output
    assert "there is no GPU here, so this is the CPU's environment" in output
    assert "make setup DEVICE_FOR_SETUP=gpu" in output


def test_compile_when_run_then_it_shows_files_and_finds_only_the_locks_headers(tmp_path):
    # Stands for pip: ninja's line of the third of 31 files, a pause in which it is shown, and
    # what it was given.
    said = "CUDA_HOME NVTE_BUILD_USE_NVIDIA_WHEELS NVTE_PYTORCH_FORCE_BUILD CXX MAX_JOBS"
    pip = tmp_path / "python"
    pip.write_text(
        program(f'echo "  [3/31] g++ a.cpp"; sleep 1.5; for n in {said}; do printenv $n; done; echo "$*"')
    )
    pip.chmod(0o755)
    script = f"""
        source scripts/shared_packages.sh; source scripts/gpu_setup.sh; SHOW_EVERY_S=0
        compile_transformer_engine {pip} requirements/gpu.lock {tmp_path}/log "{tmp_path}/my packages"
    """
    variables = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "CUDA_HOME": "/usr/local/cuda-12.4",
        "MAX_JOBS": "2",
    }
    done = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "compiling transformer_engine_torch==2.20.2, 2 files at once" in done.stdout
    assert "compiling: 3 of 31 files" in done.stdout
    *given, arguments = (tmp_path / "log").read_text().splitlines()[1:]
    assert given == [f"{tmp_path}/my packages/nvidia/cu13", "1", "TRUE", "g++", "2"]
    # A wheel in pip's cache may have been compiled against another torch.
    assert "--no-build-isolation --no-cache-dir" in arguments and arguments.endswith(
        "transformer_engine_torch==2.20.2"
    )


def test_compile_when_it_fails_then_the_compilers_own_error_is_shown(tmp_path):
    pip = tmp_path / "python"
    noise = 'for i in $(seq 40); do echo "Traceback"; done'
    pip.write_text(
        program(f'echo "a.cpp:1:10: fatal error: nccl.h: No such file or directory"; {noise}; exit 1')
    )
    pip.chmod(0o755)
    script = f"""
        MAKE_TARGET=setup; source scripts/shared_packages.sh; source scripts/gpu_setup.sh
        compile_transformer_engine {pip} requirements/gpu.lock {tmp_path}/log {tmp_path}
    """
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "fatal error: nccl.h" in done.stderr
    assert "could not be compiled" in done.stderr and "run make setup again" in done.stderr


@pytest.mark.parametrize("lock", ["gpu", "cpu"])
def test_venv_when_made_of_the_gpus_lock_then_it_has_a_cuda_home_and_nvidias_libraries(tmp_path, lock):
    shared, own = tmp_path / "shared", tmp_path / "own"
    (shared / "nvidia/cudnn/lib").mkdir(parents=True)
    own.mkdir()
    if lock == "gpu":
        (shared / "nvidia/cu13/bin").mkdir(parents=True)
        (shared / "nvidia/cu13/bin/nvcc").touch()
    runpy.run_path(str(ROOT / "scripts/checkout_venv.py"))["link_nvidia"](shared, own, tmp_path)
    assert (own / "nvidia/cudnn/lib").is_dir() == (lock == "gpu")
    assert (tmp_path / "cuda/bin/nvcc").exists() == (lock == "gpu")


def test_toolkit_when_made_of_wheels_then_a_kernel_links_by_the_names_of_a_toolkit(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("needs g++, as a GPU machine's set-up does")
    toolkit = tmp_path / "cu 13"
    (toolkit / "lib").mkdir(parents=True)
    library = ["g++", "-shared", "-x", "c++", "-"]
    named = ["-Wl,-soname,libcudart.so.13", "-o", toolkit / "lib/libcudart.so.13"]
    subprocess.run([*library, *named], input=b'extern "C" int started() { return 13; }', check=True)
    script = 'source scripts/shared_packages.sh; source scripts/gpu_setup.sh; make_toolkit "$1"'
    subprocess.run(["bash", "-euc", script, "bash", toolkit], cwd=ROOT, check=True)
    kernel = b'extern "C" { int started(); int cuInit(int); int run() { return started() + cuInit(0); } }'
    links = [f"-L{toolkit}/lib64", f"-L{toolkit}/lib64/stubs", "-Wl,--no-as-needed", "-lcudart", "-lcuda"]
    subprocess.run([*library, *links, "-o", tmp_path / "kernel.so"], input=kernel, check=True)
    needed = (tmp_path / "kernel.so").read_bytes()
    # A process loads the driver's own library, not the stand-in.
    assert b"libcudart.so.13\0" in needed and b"libcuda.so.1\0" in needed


@pytest.mark.parametrize("loads", [True, False])
def test_transformer_engine_when_it_does_not_load_then_set_up_ends_with_pythons_message(tmp_path, loads):
    for name, text in {
        "python": f"echo undefined symbol: nvte; exit {int(not loads)}",
        "nvidia-smi": "exit 0",
    }.items():
        (tmp_path / name).write_text(program(text))
        (tmp_path / name).chmod(0o755)
    script = f"""
        source scripts/shared_packages.sh; source scripts/gpu_setup.sh
        load_transformer_engine {tmp_path}/python {tmp_path}/log
    """
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == int(not loads)
    assert ("Transformer Engine loads" in done.stdout) == loads
    assert ("does not load" in done.stderr and "undefined symbol: nvte" in done.stderr) == (not loads)
