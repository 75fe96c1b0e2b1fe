# Sourced by scripts/setup: what only the lock of a GPU needs. The checks run before anything is fetched.
TRANSFORMER_ENGINE='^transformer_engine_torch=='
GB_A_COMPILER=3

# check_gpu_machine LOCK PYTHON: fails by name at the first thing that is missing.
check_gpu_machine() {
    check_driver "$1"
    check_compiler "$2"
}

# check_driver LOCK: fails where the driver knows no CUDA as new as that of the lock's torch.
check_driver() {
    local need table found driver
    need=$(cuda_of "$1")
    if ! command -v nvidia-smi > /dev/null; then
        say "there is no nvidia-smi, so the driver is not checked; $1 needs one that knows CUDA $need"
        return
    fi
    table=$(nvidia-smi 2>&1) || fail "nvidia-smi finds no working driver: $(head -n 1 <<< "$table")" \
        "restart the machine if the driver was just updated, else install the driver again" \
        "or set up without the GPU:  make setup DEVICE_FOR_SETUP=cpu"
    # From 610 on nvidia-smi writes KMD Version and CUDA UMD Version.
    found=$(sed -nE 's/.*CUDA (UMD )?Version: *([0-9]+\.[0-9]+).*/\2/p' <<< "$table")
    driver=$(sed -nE 's/.*(Driver|KMD) Version: *([0-9.]+).*/\2/p' <<< "$table")
    if [ -z "$found" ]; then
        say "nvidia-smi names no version of CUDA, so the driver is not checked; $1 needs one that knows CUDA $need"
    elif [ "${found%.*}" -lt "$need" ]; then
        fail "the NVIDIA driver $driver knows CUDA up to $found, and the torch of $1 needs CUDA $need" \
            "install a newer driver: for CUDA 13 it is 580 or newer" \
            "or set up without the GPU:  make setup DEVICE_FOR_SETUP=cpu"
    fi
}

# toolkit_in PACKAGES LOCK: the folder of the wheels' CUDA.
toolkit_in() { echo "$1/nvidia/cu$(cuda_of "$2")"; }

# cuda_of LOCK: the major version of CUDA that the lock's torch runs on.
cuda_of() { sed -n 's/^nvidia-cuda-runtime==\([0-9]*\)\..*/\1/p' "$1"; }

# check_compiler PYTHON: fails by name where something is missing that compiles an extension in C++20 for that Python.
check_compiler() {
    local compiler=${CXX:-g++} header
    command -v "$compiler" > /dev/null || fail "there is no $compiler, which compiles Transformer Engine's part for PyTorch" \
        "install it, by any of:  apt install g++   dnf install gcc-c++" \
        "or name one:            make setup CXX=/path/to/g++"
    "$compiler" -std=c++20 -fsyntax-only -x c++ - <<< "int main() {}" 2> /dev/null \
        || fail "$compiler compiles no C++20: $("$compiler" --version 2>&1 | head -n 1)" \
            "install g++ 11 or newer, or name one:  make setup CXX=/path/to/g++-11"
    header=$("$1" -c "import sysconfig; print(sysconfig.get_path('include'))")/Python.h
    [ -f "$header" ] || fail "there is no $header, which an extension for $1 includes" \
        "install it, by any of:  apt install python3.12-dev   dnf install python3.12-devel" \
        "or take a Python that has it (pyenv, uv, conda):  make setup PYTHON_FOR_SETUP=/path/to/python3.12"
}

# make_toolkit FOLDER: makes a CUDA toolkit of the wheels' folder. SGLang, FlashInfer and others compile kernels on first use,
# and link them with names that a toolkit has and wheels have not.
make_toolkit() {
    local library name
    ln -s lib "$1/lib64"
    for library in "$1"/lib/lib*.so.*; do
        name=${library%%.so.*}.so
        [ -e "$name" ] || ln -s "$(basename "$library")" "$name"
    done
    # Stands for the driver's library while a kernel is linked; a process then loads the driver's.
    mkdir "$1/lib/stubs"
    "${CXX:-g++}" -shared -Wl,-soname,libcuda.so.1 -x c++ /dev/null -o "$1/lib/stubs/libcuda.so" \
        || fail "${CXX:-g++} links no shared library" "see its message above"
}

# compilers: how many can run at once; each takes about $GB_A_COMPILER GB.
compilers() {
    local cores memory
    cores=$(nproc)
    memory=$(awk -v each=$GB_A_COMPILER '/^MemAvailable/ {print int($2 / 1048576 / each)}' /proc/meminfo)
    echo $((memory < 1 ? 1 : memory < cores ? memory : cores))
}

# compiled LOG: how many files of the extension are done.
compiled() {
    local done
    done=$(grep -oE '^ *\[[0-9]+/[0-9]+\]' "$1" | tail -n 1 | tr -d ' []')
    echo "compiling: ${done/\// of } files"
}

# compile_transformer_engine PYTHON LOCK LOG PACKAGES: builds and installs the part that is published as source only. Headers
# of CUDA, cuDNN and NCCL are those of the wheels in PACKAGES, whatever the machine has.
compile_transformer_engine() {
    local python=$1 lock=$2 log=$3 packages=$4 started=$SECONDS line jobs
    line=$(grep "$TRANSFORMER_ENGINE" "$lock")
    jobs=${MAX_JOBS:-$(compilers)}
    say "compiling $line, $jobs files at once (MAX_JOBS= changes that)"
    # Forced, since its build takes a wheel from the network otherwise. pip's cache would give one that was made for another torch.
    PATH="$(dirname "$python"):$PATH" CXX=${CXX:-g++} MAX_JOBS=$jobs CUDA_HOME=$(toolkit_in "$packages" "$lock") \
        NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
        run_pip "$python" "$log" compiled --no-build-isolation --no-cache-dir --verbose "$line" \
        || fail "$line could not be compiled; its log $log says:" "$(grep -m 5 'error:' "$log")" "and ends with:" \
            "$(tail -n 15 "$log")" "run make $MAKE_TARGET again once the cause is gone; nothing half-made is ever used"
    say "compiled in $((SECONDS - started)) s"
}

# load_transformer_engine PYTHON LOG: fails where the extension does not load; not asked on a machine without a driver.
load_transformer_engine() {
    command -v nvidia-smi > /dev/null || { say "there is no nvidia-smi, so Transformer Engine is not tried"; return; }
    env -u PYTHONPATH -u PYTHONHOME "$1" -c "import torch, transformer_engine.pytorch" >> "$2" 2>&1 \
        || fail "Transformer Engine was compiled, but does not load:" "$(tail -n 5 "$2")" \
            "please report it, with the log $2" "or set up without the GPU:  make setup DEVICE_FOR_SETUP=cpu"
    say "Transformer Engine loads"
}
