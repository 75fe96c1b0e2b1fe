"""A trainer's rank that pushes whole Hugging Face tensors to real servers, without a trainer."""

import json
from types import SimpleNamespace

from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams
from megatron_rl_corr.weight_sync.coverage import make_coverage
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.transports import make_transport
from megatron_rl_corr.weight_sync.update import push_weights
from megatron_rl_corr.weight_sync.verify import make_verifiers

SAMPLING = SamplingParams(6, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5]
BUCKET_BYTES = 300_000  # several buckets


class Pushing:
    """One trainer rank of one stage, that holds whole Hugging Face tensors."""

    def __init__(self, urls, kind, model_dir, folder, engine="sglang", quantization=None):
        self.engine = engine
        vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
        self.loop = LoopThread()
        self.client = RolloutClient(urls, vocab_size=vocab_size, timeout_s=60, engine=engine)
        self.transport = make_transport(
            kind,
            self.client,
            self.loop,
            backend="gloo",
            checkpoint=model_dir,
            folder=str(folder),
            stage=0,
            sends=True,
            quantization=quantization,
        )
        verifiers = make_verifiers("checksum", model_dir, self.client.fleet.engines)
        (self.verifier,) = verifiers.values()
        self.compared = None
        self.servers = WeightServers(
            self.client,
            self.loop,
            self.transport,
            verifiers=verifiers,
            coverage=make_coverage(model_dir, quantization),
            quantization=quantization,
        )
        compare = self.verifier.compare

        def counting(checksums):
            self.compared = compare(checksums)

        self.verifier.compare = counting

    def push(self, weights, version):
        exporter = SimpleNamespace(
            leads=True,
            sends=True,
            stage=0,
            num_stages=1,
            units=lambda _: ([named] for named in weights.items()),
            planned=lambda: {name: list(tensor.shape) for name, tensor in weights.items()},
        )
        self.servers.planned = None
        push_weights(exporter, self.servers, version=version, bucket_bytes=BUCKET_BYTES)

    def sample(self):
        return self.loop.call(self.client.generate([PROMPT], SAMPLING), timeout=60)[0]

    def parameters(self):
        """Names of the first server's."""
        return set(self.checksums())

    def checksums(self):
        """Parameter -> checksum, of the first server's first rank."""
        return self.all_checksums()[0]

    def all_checksums(self):
        """The same of each of its ranks."""
        url = self.client.base_urls[0]
        (answer,) = self.loop.call(self.client.control([url]).weights_checker())
        return self.client.control([url]).engine_of(url).all_checksums(url, answer)

    def version(self):
        """What the first server calls its weights."""
        return self.loop.call(self.client.control(self.client.base_urls[:1]).reported_versions())[0]

    def paused_response(self):
        """A response, whatever the weights are called: the server is not left paused."""
        other = RolloutClient(self.client.base_urls[:1], vocab_size=83, timeout_s=60, engine=self.engine)
        try:
            return self.loop.call(other.generate([PROMPT], SAMPLING), timeout=60)[0]
        finally:
            self.loop.call(other.close())

    def close(self):
        self.servers.close()
        self.loop.call(self.client.close())
        self.loop.close()
