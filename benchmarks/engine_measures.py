"""What benchmarks/engines.py measures at a running server: its distance from a float32 model, its
speed, a weight push.

B texts of S ids, of which the last R are a response.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.features.push_probe.answers import Question, ask_servers
from megatron_rl_corr.features.push_probe.verdict import ProbeNumbers
from megatron_rl_corr.rollout import LoopThread, RolloutClient
from megatron_rl_corr.weight_sync.servers import WeightServers
from megatron_rl_corr.weight_sync.transports import make_transport
from megatron_rl_corr.weight_sync.update import push_weights
from megatron_rl_corr.weight_sync.verify import PushVerifier

PROBE_TOKENS = 256
"""Ids of the text that is scored after a push."""
FLOAT32_LOG_RATIO = 1e-4
"""Largest |D| of a token where server and model compute in float32; measured: 1e-6."""
TIE = 1e-5
"""Two engines round a router's logits, of order 1, by about 1e-7: nearer than this they may choose other
experts, and every later token of the text is apart by 1e-3 and more, both right.
"""
PROMPT_TOKENS = 16
SCORED = 16
"""Texts that are scored, from one prefill each."""


class Truth:
    """Log-probs of a folder's model by Hugging Face in float32 on this process."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, texts: Tensor, responses: int, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-probs, settled) [B, R] of the last `responses` ids of texts [B, S].

        Settled: neither at the token nor before it are the last expert chosen and the first left out
        nearer than TIE.
        """
        with torch.no_grad():
            out = self.model(texts, output_router_logits=True)
        logprobs = torch.log_softmax(out.logits[:, :-1] / temperature, -1).gather(2, texts[:, 1:, None])[
            :, :, 0
        ]
        chosen, near = self.model.config.num_experts_per_tok, torch.zeros(texts.numel(), dtype=torch.bool)
        for router in out.router_logits:  # of each layer, [B * S, experts]
            best = router.topk(chosen + 1).values
            near |= best[:, -2] - best[:, -1] <= TIE
        settled = near.view_as(texts).cumsum(1)[:, :-1] == 0
        return logprobs[:, -responses:], settled[:, -responses:]


@dataclass
class Served:
    """A server of the model, and this process's connection to it."""

    engine: str
    url: str
    vocab_size: int

    def __post_init__(self):
        self.loop = LoopThread()
        self.draws = torch.Generator().manual_seed(0)

    def prompts(self, count: int) -> list[list[int]]:
        """Other ids in every call, so that no prefix is cached."""
        return torch.randint(3, self.vocab_size - 2, (count, PROMPT_TOKENS), generator=self.draws).tolist()

    def client(self, concurrency: int = 64) -> RolloutClient:
        return RolloutClient(
            [self.url], vocab_size=self.vocab_size, engine=self.engine, max_concurrency=concurrency
        )

    def samples(self, client: RolloutClient, count: int, tokens: int, temperature: float = 1.0) -> list:
        sampling = SamplingParams(tokens, temperature=temperature, ignore_eos=True)
        return self.loop.call(client.generate(self.prompts(count), sampling))

    def close(self, client: RolloutClient) -> None:
        self.loop.call(client.close())


def distances(served: Served, truth: Truth, *, count: int, tokens: int) -> dict[str, dict[str, float]]:
    """Mean and max |D| of log-probs, sampled at temperatures 1 and 0.7, and of the first
    ones' from a prefill.
    """
    client, found = served.client(), {}
    for temperature in (1.0, 0.7):
        samples = served.samples(client, count, tokens, temperature)
        texts = torch.stack([torch.cat([one.prompt_ids, one.output_ids]) for one in samples])
        true, settled = truth.logprobs(texts, tokens, temperature)
        told = torch.stack([one.rollout_logprobs for one in samples])
        found[f"sampled at temperature {temperature:g}"] = _distance(told, true, settled)
        if temperature == 1:
            engine = client.engine_of(served.url)
            scores = []
            for one in samples[:SCORED]:
                prompt, output = one.prompt_ids.tolist(), one.output_ids.tolist()
                answer = served.loop.call(client.ask(served.url, engine.score(prompt, output, likeliest=1)))
                parsed = engine.parse_scores(
                    answer, server=served.url, output_ids=output, vocab_size=served.vocab_size
                )
                scores.append(torch.tensor(parsed.logprobs))
            found["scored"] = _distance(torch.stack(scores), true[:SCORED], settled[:SCORED])
    served.close(client)
    return found


def _distance(told: Tensor, true: Tensor, settled: Tensor) -> dict[str, float]:
    apart = (told.double() - true.double()).abs()[settled]
    return {
        "mean": apart.mean().item(),
        "max": apart.max().item(),
        "tokens": int(settled.sum()),
        "left_out": int((~settled).sum()),
    }


def tokens_a_second(served: Served, concurrency: int, *, tokens: int) -> float:
    """Response tokens by wall time, of requests that run `concurrency` at a time; at 1 of two, one
    after the other.
    """
    client = served.client(concurrency)
    count = max(2, concurrency)
    started = time.perf_counter()
    samples = served.samples(client, count, tokens)
    seconds = time.perf_counter() - started
    served.close(client)
    assert all(one.output_ids.numel() == tokens for one in samples)
    return count * tokens / seconds


@dataclass(frozen=True)
class PushCost:
    """One push to one server."""

    seconds: float
    """Of all of it, the checksums included; the probe not."""
    verify_s: float
    """Of the checksums: computed by the server, and compared."""
    probe_s: float
    """Until the server has scored PROBE_TOKENS ids; a trainer computes its own pass meanwhile."""
    probe_max: float
    """max |D| of these from the float32 model that was pushed."""


class Pusher:
    """One trainer rank with whole tensors, and one server. torch.distributed's default group must exist.

    Args:
        kind: of the transport.
        served: the server.
        checkpoint: the folder it was started with.
        folder: for `disk`.
        bucket_bytes: of a bucket.
    """

    def __init__(self, kind: str, served: Served, checkpoint: Path, folder: Path, *, bucket_bytes: int):
        self._served, self._bucket_bytes = served, bucket_bytes
        self._client = served.client()
        self._transport = make_transport(
            kind,
            self._client,
            served.loop,
            backend="gloo",
            checkpoint=checkpoint,
            stage=0,
            sends=True,
            folder=str(folder / f"{kind}-{served.engine}") if kind == "disk" else None,
        )
        verifier = PushVerifier(self._client.fleet.engines[served.engine], 1, kept_bytes=2**40)
        self._servers = WeightServers(
            self._client, served.loop, self._transport, verifiers={served.engine: verifier}
        )
        self._verifying: list[float] = []
        self._servers.checksums = timed(self._servers.checksums, self._verifying)
        verifier.compare = timed(verifier.compare, self._verifying)

    def push(self, weights: Mapping[str, Tensor], version: str, ids: Sequence[int], true: Tensor) -> PushCost:
        """Send all weights, then let the server score `ids`, whose log-probs after the first are `true`."""
        self._verifying.clear()
        exporter = SimpleNamespace(
            leads=True,
            sends=True,
            stage=0,
            num_stages=1,
            units=lambda _: ([named] for named in weights.items()),
            planned=lambda: {name: list(tensor.shape) for name, tensor in weights.items()},
        )
        pushing: list[float] = []
        timed(push_weights, pushing)(
            exporter, self._servers, version=version, bucket_bytes=self._bucket_bytes
        )
        asking: list[float] = []
        control = self._client.control([self._served.url])
        answers = timed(self._served.loop.call, asking)(
            ask_servers(
                control,
                Question((tuple(ids),)),
                version=version,
                vocab_size=self._served.vocab_size,
                cache_key=None,
            )
        )
        score = ProbeNumbers.of([true.numpy()], answers[self._served.url].scores)
        return PushCost(pushing[0], sum(self._verifying), asking[0], score.max_abs)

    def close(self) -> None:
        self._servers.close()
        self._served.close(self._client)


def probe_text(truths: Sequence[Truth], vocab_size: int) -> tuple[list[int], list[Tensor]]:
    """PROBE_TOKENS ids, and the log-probs of those after the first by each model, in which no
    router is near a tie.
    """
    for seed in range(100):
        ids = torch.randint(
            3, vocab_size - 2, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(seed)
        )
        scored = [truth.logprobs(ids, PROBE_TOKENS - 1, 1.0) for truth in truths]
        if all(settled.all() for _, settled in scored):
            return ids[0].tolist(), [logprobs[0] for logprobs, _ in scored]
    raise SystemExit("100 random texts all have a near tie of experts: compare with another model")


def timed(call, seconds: list[float]):
    """The same function; each call's time goes into `seconds`."""

    def timing(*arguments, **options):
        started = time.perf_counter()
        answer = call(*arguments, **options)
        seconds.append(time.perf_counter() - started)
        return answer

    return timing
