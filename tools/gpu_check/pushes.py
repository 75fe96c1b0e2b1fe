"""Weights reach a real SGLang server on this machine, proven by its checksums and by the log-probs
that it computes.

This process is the trainer's one rank; its weights lie on the device. `tensor` sends CUDA IPC handles from
a GPU, and bytes without one; `distributed` broadcasts by NCCL between two ranks on one GPU, and by gloo
without one. N ids of the probe's text, of which the last R = N - 1 are scored.
"""

import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tools.cpu import environment, sglang_arguments
from tools.gpu_check.outcome import Finding, NotRun, Outcome, at_most, require
from tools.local_server import LocalServer

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Without it NCCL refuses two ranks on one GPU; both sides need it."""
REFUSAL = "Duplicate GPU detected"
"""What an NCCL says that has no such variable."""
GPU_ARGUMENTS = (
    # The tiny model's heads of 32 are not for every attention kernel.
    "--attention-backend",
    "triton",
    "--sampling-backend",
    "pytorch",
    "--grammar-backend",
    "none",
    "--mem-fraction-static",
    "0.2",
    "--max-total-tokens",
    "16384",
    "--max-running-requests",
    "32",
    "--disable-cuda-graph",
    "--skip-server-warmup",
)
GPU_VARIABLES = {
    # Else the first request to an FP8 server waits until DeepGEMM has kernels for all numbers of tokens up to
    # 16384, by SGLang's own words (0.5.23) typically 10 to 20 minutes. So it compiles those that it needs.
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
}
ANSWER_S = {"cpu": 60, "cuda": 120}
"""Longest time to wait for the probe's log-probs: on a GPU the server compiles kernels for that
request, its first.
"""
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
PROBE_IDS = 128
FLOAT32_LOG_RATIO = 1e-4
"""Largest |D| that float32's rounding explains on both sides."""
QUARTILES = {"bfloat16": 0.015, "fp8": 0.15}
"""Third quartile of |D|, of a server that computes so and Hugging Face in float32 on the same weights.

Measured on a CPU in bfloat16: 0.004, and 0.036 where two experts are exchanged. A few tokens may be far
off, whose router chose near a tie. FP8's, whose activations keep 4 bits, is not measured.
"""
BUCKET_BYTES = 300_000  # several buckets


def check_tensor(device: str) -> Outcome:
    return check("tensor", device)


def check_distributed(device: str) -> Outcome:
    """Raises NotRun where NCCL allows one rank a GPU."""
    os.environ[MULTI_RANK] = "1"  # the server's process inherits it
    try:
        return check("distributed", device)
    except (RuntimeError, OSError) as error:
        if device == "cuda" and REFUSAL in "".join(traceback.format_exception(error)):
            raise NotRun(f"this NCCL refuses two ranks on one GPU in spite of {MULTI_RANK}=1") from error
        raise


def check(transport: str, device: str) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        model = make_model(Path(folder) / "model")
        with server(model, DTYPES[device], device) as running:
            return prove(running.url, transport, model, changed(model, DTYPES[device]), device)


def make_model(folder: Path) -> Path:
    """The quickstart's tiny Qwen3-MoE, seed 0."""
    from examples.quickstart.make_model import make_model as make

    make(folder, seed=0)
    return folder


def server(model: Path, dtype: str, device: str, *arguments: str) -> LocalServer:
    """Of the model; its log goes where this process's goes, at its end."""
    own = GPU_ARGUMENTS if device == "cuda" else sglang_arguments()
    variables = environment("sglang") | (GPU_VARIABLES if device == "cuda" else {})
    return LocalServer(
        model,
        dtype=dtype,
        log_path=Path(os.environ.get("GPU_CHECK_LOGS", model.parent)) / f"server-{os.getpid()}.log",
        environment=variables,
        extra_arguments=[*own, "--random-seed", "0", *arguments],
    )


def changed(model: Path, dtype: str) -> dict[str, Tensor]:
    """Weights unlike those that the server loads, and large enough that a wrong one shows
    in the log-probs.
    """
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(1)
    weights = load_file(model / "model.safetensors")
    return {
        name: (w + 0.02 * torch.randn(w.shape, generator=generator)).to(getattr(torch, dtype))
        for name, w in weights.items()
    }


def prove(
    url: str,
    transport: str,
    model: Path,
    weights: Mapping[str, Tensor],
    device: str,
    trained: Mapping[str, Tensor] | None = None,
    activations: str | None = None,
    before: Callable[[Any], None] | None = None,
) -> Outcome:
    """Push the weights, and compare checksums and log-probs.

    Args:
        url: of a server that was started with the model.
        transport: "tensor" or "distributed".
        model: the Hugging Face folder.
        weights: all of its tensors, in the server's dtype.
        device: where they are sent from.
        trained: the weights that the log-probs are held to; None: those that are sent.
        activations: "fp8" where a GPU's server quantises them; None: they have the server's dtype.
        before: called with the `ColocatedServers` before the push, which gives them back the memory that it
            lets them release; None: they keep all of it.

    Raises:
        DoesNotHold: no checksum was compared, or the log-probs are not those of the weights.
        RolloutError: the push failed, or a checksum is not that of what was sent.
    """
    import torch.distributed as dist

    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        pushed = _push(
            url, transport, model, {name: w.to(device) for name, w in weights.items()}, device, before
        )
    finally:
        dist.destroy_process_group()
    served, verified, parameters = pushed
    known = parameters if device == "cpu" else 1  # in 16 bits and on a GPU a server's layout is its own
    require(
        verified >= known, f"checksums of {verified} of {parameters} parameters were those of what was sent"
    )
    difference = logprobs(model, trained or weights) - torch.from_numpy(served)
    findings = [
        Finding("parameters whose checksums are those of what was sent", f"{verified} of {parameters}")
    ]
    computed = activations if activations and device == "cuda" else DTYPES[device]
    return Outcome([*findings, held_to_bound(difference.abs(), computed)])


def held_to_bound(distance: Tensor, dtype: str) -> Finding:
    """|D| [R], held to what the rounding of the server's dtype explains: float32, bfloat16 or fp8."""
    if dtype == "float32":
        return at_most("largest log-ratio of the probe's text", distance.max().item(), FLOAT32_LOG_RATIO)
    quartile = distance.quantile(0.75).item()
    return at_most("third quartile of the log-ratios of the probe's text", quartile, QUARTILES[dtype])


def _push(
    url: str,
    transport: str,
    model: Path,
    weights: Mapping[str, Tensor],
    device: str,
    before: Callable[[Any], None] | None,
):
    """(the server's log-probs of the probe's text [R], parameters verified, all parameters)."""
    from megatron_rl_corr.features.push_probe.answers import Question, ask_servers
    from megatron_rl_corr.rollout import LoopThread, RolloutClient
    from megatron_rl_corr.weight_sync.colocated import ColocatedServers
    from megatron_rl_corr.weight_sync.coverage import make_coverage
    from megatron_rl_corr.weight_sync.memory import ServerMemory
    from megatron_rl_corr.weight_sync.quantization import find_quantization
    from megatron_rl_corr.weight_sync.servers import WeightServers
    from megatron_rl_corr.weight_sync.transports import make_transport
    from megatron_rl_corr.weight_sync.update import push_weights
    from megatron_rl_corr.weight_sync.verify import make_verifiers

    loop = LoopThread()
    client = RolloutClient([url], vocab_size=vocab_size(model), timeout_s=ANSWER_S[device])
    verifiers = make_verifiers("checksum", model, client.fleet.engines)
    [verifier] = verifiers.values()
    counts, compare = [], verifier.compare

    def counting(checksums):
        counts.append((compare(checksums), len(checksums[0].ranks[0][1]) if checksums else 0))

    verifier.compare = counting
    backend, quantization = (
        "nccl" if device == "cuda" else "gloo",
        loop.call(find_quantization(client.control([url]))),
    )
    sending = make_transport(
        transport,
        client,
        loop,
        backend=backend,
        checkpoint=model,
        folder=None,
        stage=0,
        sends=True,
        quantization=quantization,
    )
    make_servers = WeightServers if before is None else partial(ColocatedServers, memory=ServerMemory())
    servers = make_servers(
        client,
        loop,
        sending,
        verifiers=verifiers,
        coverage=make_coverage(model, quantization),
        quantization=quantization,
    )
    exporter = SimpleNamespace(
        leads=True,
        sends=True,
        stage=0,
        num_stages=1,
        units=lambda meet: ([one] for one in weights.items()),
        planned=lambda: {name: list(tensor.shape) for name, tensor in weights.items()},
    )
    try:
        if before is not None:
            before(servers)
        push_weights(exporter, servers, version="checked", bucket_bytes=BUCKET_BYTES)
        asked = ask_servers(
            client.control([url]),
            Question((tuple(probe_ids(model)),)),
            version="checked",
            vocab_size=vocab_size(model),
            cache_key=None,
        )
        answers = loop.call(asked, timeout=ANSWER_S[device])
        require(url in answers, "the server did not score the probe's text; see its log")
        return answers[url].scores[0], *counts[-1]
    finally:
        servers.close()
        loop.call(client.close())
        loop.close()


def vocab_size(model: Path) -> int:
    from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint

    return HFCheckpoint(model).config["vocab_size"]


def probe_ids(model: Path) -> list[int]:
    """N random ids, special ones left out."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, vocab_size(model) - 2, (PROBE_IDS,), generator=generator).tolist()


def logprobs(model: Path, weights: Mapping[str, Tensor]) -> Tensor:
    """[R] float64 of the probe's text, by Hugging Face in float32 on the CPU."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from megatron_rl_corr.models.hf_folder import copy_model_files

    # transformers stacks experts as it reads them
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        copy_model_files(model, Path(folder))
        save_file(dict(weights), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(probe_ids(model))
    with torch.no_grad():
        logits = reference.eval()(ids[None]).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
