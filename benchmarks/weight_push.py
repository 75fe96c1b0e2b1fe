"""Seconds and MB/s of a push of a synthetic dense model to one real SGLang server, over each transport, in one run.

python benchmarks/weight_push.py [--hidden 512] [--layers 8] [--bucket-mib 64] [--repeats 3]

The server runs in float32 on this machine, without a GPU as the quickstart does. One trainer rank sends whole tensors:
gathering over tensor and expert ranks is not measured. Every push sends other weights than the last, and all of them
are verified; the last column is the verification alone. The least of the repeats.
"""

import argparse
import datetime
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.correction import machine_name
from benchmarks.quiet import only_tables
from megatron_rl_corr.rollout import LoopThread, RolloutClient
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.transports import make_transport
from megatron_rl_corr.weight_sync.update import push_weights
from megatron_rl_corr.weight_sync.verify import PushVerifier
from tools.cpu import environment, sglang_arguments
from tools.local_server import LocalServer

VOCAB_SIZE = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        weights = make_model(folder / "model", options)
        size = sum(tensor.nbytes for tensor in weights.values())
        with LocalServer(
            folder / "model", dtype="float32", log_path=folder / "server.log", environment=environment("sglang"),
            extra_arguments=sglang_arguments(),
        ) as server:  # fmt: skip
            print(f"{datetime.date.today()}, {machine_name('cpu')}, {size / 1e6:.0f} MB in {len(weights)} tensors\n")
            print("| transport | push (s) | MB/s | verify (s) |\n|---|---|---|---|")
            for kind in ("distributed", "tensor", "disk"):
                push_s, verify_s = measured(kind, server.url, weights, folder, options)
                print(f"| {kind} | {push_s:.2f} | {size / push_s / 1e6:.0f} | {verify_s:.2f} |", flush=True)
    dist.destroy_process_group()


def make_model(out: Path, options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """A Qwen3 of random weights, saved in `out`; its tensors by name."""
    from safetensors.torch import load_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(out, max_shard_size="100GB")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples/quickstart"))
    from make_model import make_tokenizer

    make_tokenizer().save_pretrained(out)
    return load_file(out / "model.safetensors")


def measured(kind, url, weights, folder, options) -> tuple[float, float]:
    """The least time of a push, and of the verification within one."""
    loop = LoopThread()
    client = RolloutClient([url], vocab_size=VOCAB_SIZE)
    transport = make_transport(
        kind, client, loop, backend="gloo", checkpoint=folder / "model", stage=0, sends=True,
        folder=str(folder / "weights") if kind == "disk" else None,
    )  # fmt: skip
    verifier = PushVerifier(client.fleet.engines["sglang"], 1, kept_bytes=2**40)
    servers = WeightServers(client, loop, transport, verifiers={"sglang": verifier})
    verify_s = []
    servers.checksums = timed(servers.checksums, verify_s)
    verifier.compare = timed(verifier.compare, verify_s)
    pushes = []
    for repeat in range(options.repeats + 1):  # the first one makes the group
        weights = {name: tensor + 0.001 for name, tensor in weights.items()}
        units = [[named] for named in weights.items()]
        exporter = SimpleNamespace(
            leads=True, sends=True, stage=0, num_stages=1, units=lambda _, units=units: iter(units)
        )
        push = timed(push_weights, pushes)
        push(exporter, servers, version=f"{kind}-{repeat}", bucket_bytes=int(options.bucket_mib * 2**20))
    servers.close()
    loop.call(client.close())
    loop.close()
    return min(pushes[1:]), min(a + b for a, b in zip(verify_s[::2], verify_s[1::2], strict=True))


def timed(call, seconds: list[float]):
    """The same function; each call's time goes into `seconds`."""

    def timing(*arguments, **options):
        started = time.perf_counter()
        answer = call(*arguments, **options)
        seconds.append(time.perf_counter() - started)
        return answer

    return timing


if __name__ == "__main__":
    with only_tables():
        main()
