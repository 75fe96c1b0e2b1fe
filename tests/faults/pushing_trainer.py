"""A trainer's rank that pushes to real servers, for drills of pushes."""

import json
import time
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams
from megatron_rl_corr.weight_sync.coverage import make_coverage
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.transports import make_transport
from megatron_rl_corr.weight_sync.update import push_weights
from megatron_rl_corr.weight_sync.verify import make_verifiers

SILENCE_S = 6.0
"""A server that answers nothing for so long has failed. A well one may be slow on a busy machine."""


class Trainer:
    """One rank that pushes its weights to servers by broadcast and samples from them; it has
    a process group. limits: of RolloutClient.
    """

    def __init__(self, urls, model_dir, **limits):
        self.first_weights = self.weights = load_file(model_dir / "model.safetensors")
        vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
        self.loop = LoopThread()
        self.client = RolloutClient(
            urls,
            vocab_size=vocab_size,
            engine="auto",
            **{"timeout_s": 120, "read_timeout_s": SILENCE_S, "outage_timeout_s": 60} | limits,
        )
        self.loop.call(self.client.find_servers(60))
        transport = make_transport(
            "distributed",
            self.client,
            self.loop,
            backend="gloo",
            checkpoint=model_dir,
            folder=None,
            stage=0,
            sends=True,
        )
        self.servers = WeightServers(
            self.client,
            self.loop,
            transport,
            verifiers=make_verifiers("checksum", model_dir, self.client.fleet.engines),
            coverage=make_coverage(model_dir),
        )
        self.exporter = SimpleNamespace(
            leads=True,
            sends=True,
            stage=0,
            num_stages=1,
            units=lambda _: ([one] for one in self.weights.items()),
            planned=lambda: {name: list(tensor.shape) for name, tensor in self.weights.items()},
        )
        self.pushes = 0

    def push(self):
        """Other weights to all servers that answer; the seconds that it took."""
        self.pushes += 1
        generator = torch.Generator().manual_seed(self.pushes)
        self.weights = {
            name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self.weights.items()
        }
        begun = time.monotonic()
        push_weights(self.exporter, self.servers, version=f"v-{self.pushes}", bucket_bytes=300_000)
        return time.monotonic() - begun

    def sampled(self):
        """(server, version) of some samples."""
        samples = self.loop.call(
            self.client.generate([[3, 1, 4, 1, 5]] * 12, SamplingParams(4, ignore_eos=True)), timeout=120
        )
        return {(one.server, one.oldest_version) for one in samples}

    def check(self, *urls):
        """Samples come from these servers alone, with the weights of the last push; one that is back
        may take a moment.
        """
        end, right = time.monotonic() + 60, {(url, f"v-{self.pushes}") for url in urls}
        while (sampled := self.sampled()) != right and time.monotonic() < end:
            assert sampled < right
        assert sampled == right

    def close(self):
        """Give the servers back their first weights, and leave them."""
        self.weights = self.first_weights
        push_weights(self.exporter, self.servers, version="default", bucket_bytes=10**9)
        self.servers.close()
        self.loop.call(self.client.close())
        self.loop.close()
