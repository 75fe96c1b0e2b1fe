"""An engine that samples nothing: it replays responses that were recorded in a JSON-lines file.

Its address is the file. A line is {"prompt_ids": [...], "output_ids": [...], "logprobs": [...], "version":
"..."}; each line answers one request for its prompt, in the order of the file.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.engines.types import EngineLimits, Request


class RecordedResponses:
    """A transport that reads files."""

    def __init__(self, paths: Sequence[str]):
        self._lines: dict[tuple[str, tuple[int, ...]], deque[bytes]] = defaultdict(deque)
        for path in paths:
            for line in Path(path).read_bytes().splitlines():
                self._lines[path, tuple(json.loads(line)["prompt_ids"])].append(line)

    async def send(self, url: str, request: Request, *, timeout_s: float | None = None) -> tuple[int, bytes]:
        if request.endpoint != "generate":
            return 200, b"{}"
        recorded = self._lines[url, tuple(request.json["prompt_ids"])]
        if not recorded:
            detail = f"no response to {request.json['prompt_ids']} is left in the file"
            raise RolloutServerError(url, request.endpoint, 404, detail, method=request.method)
        return 200, recorded.popleft()

    async def close(self) -> None:
        pass


class AlwaysProgresses:
    """A file is never silent."""

    async def silence(self, timeout_s: float) -> None:
        return None


class ReplayRecorded(Engine):
    name = "recorded samples"
    generate_endpoint = "generate"
    limits = EngineLimits()

    def checked_urls(self, urls):
        for url in urls:
            if not Path(url).is_file():
                raise ValueError(f"there is no file {url}")
        return tuple(urls)

    def open_transport(self, urls, **options):
        return RecordedResponses(urls)

    def progress(self, transport, url):
        return AlwaysProgresses()

    def health(self):
        return Request("GET", "health")

    def generate(
        self,
        prompt_ids,
        sampling,
        request_id=None,
        *,
        seed,
        routed_experts=False,
        routes_from=0,
        cache_key=None,
    ):
        return Request("GET", "generate", {"prompt_ids": prompt_ids})

    def parse(self, body, asked, *, server):
        line = json.loads(body)
        output = torch.tensor(line["output_ids"], dtype=torch.int64)
        if output.max() >= asked.vocab_size:
            raise RolloutProtocolError(
                server, "generate", f"id {int(output.max())} is outside the vocabulary"
            )
        return Trajectory(
            prompt_index=asked.prompt_index,
            sample_index=asked.sample_index,
            prompt_ids=asked.prompt_ids,
            output_ids=output,
            rollout_logprobs=torch.tensor(line["logprobs"], dtype=torch.float32),
            finish_reason="stop",
            weight_versions=(VersionSpan(line["version"], 0, output.numel()),),
            cached_tokens=0,
            server=server,
        )


ENGINE = ReplayRecorded()
