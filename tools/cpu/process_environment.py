"""The environment and flags that make a new process run Megatron, SGLang or vLLM without a
GPU (stdlib only).
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

VARIABLE = "MEGATRON_RL_CORR_CPU"
ENGINES = ("megatron", "sglang", "vllm", "vllm_v2")
"""vllm_v2: vLLM with its V2 model runner, whose kernels Triton's interpreter runs at about 50 tokens/s;
routed experts and sampling masks need it.
"""
SITE = Path(__file__).resolve().parent / "site"
PACKAGE_ROOT = SITE.parents[2]
TRANSFORMER_ENGINE = SITE.with_name("te")
"""Holds the stand-in for Transformer Engine."""
_TE = "transformer_engine"
VLLM_PACKAGES = Path(sys.prefix) / "vllm"
"""What `make setup-vllm` links: packages for the path of a vLLM server only, since others
need other versions.
"""

# With the flag for one process (vllm_arguments), the worker runs in the engine's: 2 processes instead of 3.
_VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
_ENGINE_VARIABLES = {
    # Megatron checks it for tensor parallelism; it has no effect on a CPU.
    "megatron": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"},
    # Compiling the seeded sampler takes longer than a test; nothing else of a server is compiled.
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"},
    "vllm": _VLLM,
    "vllm_v2": _VLLM | {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"},
}


@cache
def _nvidia_device_present() -> bool:
    if any(re.fullmatch(r"nvidia\d+", name) for name in os.listdir("/dev")):
        return True
    if shutil.which("nvidia-smi") is None:
        return False
    # WSL has a driver but no /dev/nvidia0; "nvidia-smi -L" prints one line per GPU.
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return answer.returncode == 0 and "GPU " in answer.stdout


def gpu_available(base: Mapping[str, str] = os.environ) -> bool:
    """Whether a process with environment `base` finds an NVIDIA GPU; does not import torch.

    True if /dev/nvidia<N> exists or `nvidia-smi -L` lists a GPU, unless CUDA_VISIBLE_DEVICES hides them all
    (set, and empty or -1).
    """
    if base.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    return _nvidia_device_present()


def real_transformer_engine(base: Mapping[str, str] = os.environ) -> bool:
    """Whether a process with environment `base` can import Transformer Engine itself; does not import it.

    The stand-in does not count.
    """
    return _finds_transformer_engine(base.get("PYTHONPATH", ""))


@cache
def _finds_transformer_engine(pythonpath: str) -> bool:
    path = [*filter(None, pythonpath.split(os.pathsep)), *sys.path]
    elsewhere = [folder for folder in path if Path(folder or ".").resolve() != TRANSFORMER_ENGINE]
    if PathFinder.find_spec(_TE, elsewhere) is not None:
        return True
    # An editable install has a finder of its own, which does not look at the path; the import hook's
    # looks everywhere.
    found = (finder.find_spec(_TE, None) for finder in sys.meta_path if finder is not PathFinder)
    return any(
        spec is not None and TRANSFORMER_ENGINE not in Path(spec.origin or "").parents for spec in found
    )


def transformer_engine(base: Mapping[str, str] = os.environ) -> str:
    """Which Transformer Engine a Megatron process of `environment("megatron", base)` runs, in a few words."""
    if gpu_available(base):
        return "the installed package" if real_transformer_engine(base) else "none"
    return (
        "none: the installed package needs a GPU" if real_transformer_engine(base) else "stand-in for the CPU"
    )


def environment(engine: str, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`base` with what a process of `engine` (of ENGINES) needs on the CPU.

    With a GPU it is `base` unchanged, so a caller need not ask. PYTHONPATH gets the `site` folder and the
    repository's root in front of what it held; behind it, for Megatron, a stand-in for Transformer Engine,
    and for vLLM its packages. Where Transformer Engine itself can be imported, there is no stand-in, and
    Megatron does not find the package, which needs a GPU. OMP_NUM_THREADS is 1 unless `base` sets it, since
    ranks share the cores.

    Raises:
        ValueError: `engine` is none of ENGINES.
        FileNotFoundError: vLLM's packages are not installed.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    variables = dict(base)
    if gpu_available(base):
        return variables
    first, last = [str(SITE), str(PACKAGE_ROOT)], []
    if engine == "megatron" and not real_transformer_engine(base):
        last = [str(TRANSFORMER_ENGINE)]
    elif engine in ("vllm", "vllm_v2"):
        last = [str(_installed_vllm())]
    given = variables.get("PYTHONPATH", "").split(os.pathsep)
    # Of another engine's environment nothing stays on the path.
    kept = [
        path for path in given if path and path not in (*first, str(TRANSFORMER_ENGINE), str(VLLM_PACKAGES))
    ]
    variables["PYTHONPATH"] = os.pathsep.join(first + kept + last)
    variables[VARIABLE] = engine
    variables.setdefault("OMP_NUM_THREADS", "1")
    variables.update(_ENGINE_VARIABLES[engine])
    return variables


def _installed_vllm() -> Path:
    if not (VLLM_PACKAGES / ".complete").exists():
        raise FileNotFoundError(
            f"vLLM for the CPU is not installed: {VLLM_PACKAGES} is missing; run make setup-vllm"
        )
    return VLLM_PACKAGES


def sglang_arguments(base: Mapping[str, str] = os.environ) -> list[str]:
    """The flags that `sglang.launch_server` needs on the CPU; none with a GPU.

    The caller adds model, port and dtype. A flag given again later on the command line wins.
    """
    if gpu_available(base):
        return []
    return [
        "--device",
        "cpu",
        "--attention-backend",
        "torch_native",
        "--sampling-backend",
        "pytorch",
        "--grammar-backend",
        "none",
        "--skip-server-warmup",
        # The default sizes the KV cache by the machine's memory: 14 GB for a model of a few MB.
        "--max-total-tokens",
        "16384",
        "--max-running-requests",
        "32",
        # Without it an idle server spins on a whole core.
        "--sleep-on-idle",
    ]


def vllm_arguments(base: Mapping[str, str] = os.environ) -> list[str]:
    """The flags that a vLLM server needs on the CPU; none with a GPU. A flag given again later wins."""
    if gpu_available(base):
        return []
    return [
        "--enforce-eager",
        "--distributed-executor-backend",
        "uni",
        # The default takes whole GiB; 64 MiB hold 32768 tokens of the tiny models in float32.
        "--kv-cache-memory-bytes",
        str(64 << 20),
        "--max-num-seqs",
        "32",
        # A prompt that a batch has no room for is split, and the part ends the engine: the seed of a request
        # needs a generator that can be set back, which torch has on GPUs only (vllm 0.32).
        "--no-enable-chunked-prefill",
    ]


def megatron_arguments(base: Mapping[str, str] = os.environ) -> list[str]:
    """The flags for Transformer Engine's spec over gloo, without a GPU; all fusions are Megatron's defaults.

    Where Transformer Engine itself is installed, which needs a GPU, those for Megatron's own layers
    without fusions.
    """
    layers = _OWN_LAYERS if real_transformer_engine(base) else ["--transformer-impl", "transformer_engine"]
    return [*layers, "--distributed-backend", "gloo", "--use-cpu-initialization"]


_OWN_LAYERS = [
    "--transformer-impl",
    "local",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
    "--attention-softmax-in-fp32",
]


def replacements(engine: str) -> list[tuple[str, str]]:
    """Each (replaced function, reason) in a process of `engine`: the tables that the import hook applies."""
    if engine == "megatron":
        from tools.cpu.megatron_replacements import EARLY, LATE

        return [(r.target, r.why) for r in (*EARLY, *LATE)]
    if engine == "sglang":
        from tools.cpu.sglang_replacements import EARLY, LATE, STUB, STUB_WHY

        return [(STUB, STUB_WHY), *((r.target, r.why) for r in (*EARLY, *LATE))]
    if engine in ("vllm", "vllm_v2"):
        from tools.cpu.vllm_replacements import EARLY, LATE, LATE_V2

        return [(r.target, r.why) for r in (*EARLY, *(LATE if engine == "vllm" else LATE_V2))]
    raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
