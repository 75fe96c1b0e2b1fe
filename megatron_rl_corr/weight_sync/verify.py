"""Verifies after a push that the servers have what was sent, by checksums of their weights.

The checksums of all servers must agree. Each sender also keeps a part of what it sends, chosen anew for
every version, arranges it as the servers do, hashes it as they do (`Engine.possible_layouts`,
`Engine.checksum`), and compares: all of a model of up to KEPT_BYTES a stage, a sample of a larger one.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.checksums import cpu_checksum
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.types import NamedTensor, Part, ServerChecksums
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import communication_device

KEPT_BYTES = 256 * 2**20
_SHOWN = 5

logger = logging.getLogger(__name__)


def make_verifiers(kind: str, checkpoint: Path, engines: Mapping[str, Engine]) -> dict[str, PushVerifier]:
    """One rank's verifiers for `verify_push`, by the name of their engine; none for "off".

    Args:
        kind: "off" or "checksum".
        checkpoint: the Hugging Face folder of the model.
        engines: what the servers run, by name.
    """
    if kind == "off":
        return {}
    elements = count_elements(checkpoint)
    return {name: PushVerifier(engine, elements) for name, engine in engines.items()}


def count_elements(checkpoint: Path) -> int:
    """Numbers in all tensors of a Hugging Face folder, from the headers of its files."""
    count = 0
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


class PushVerifier:
    """One rank's part of the verification: `clear`, `keep` before each bucket is sent, `compare` at the end.

    Args:
        engine: what the servers run.
        elements: numbers in the whole model; decides which share of it is kept.
        kept_bytes: most bytes that are kept.
    """

    def __init__(self, engine: Engine, elements: int, *, kept_bytes: int = KEPT_BYTES):
        self._engine = engine
        self._elements = max(1, elements)
        self._is_shared = False
        self._limit = kept_bytes
        self._matched: set[tuple[tuple, str]] = set()
        """(a server's layout, parameter) whose checksum was once as expected."""
        self._warned_missing = False
        self._have_checksums: set[str] = set()
        self._warned_layouts: set[tuple] = set()
        self._drafts: tuple[list[str], dict[str, tuple]] = ([], {})
        """Checksums of the draft layers that were last sent, and what each server then had
        of a draft model.
        """
        self.clear()

    def clear(self) -> None:
        """Forget what was kept: an update begins."""
        self._kept: dict[str, dict[Part, Tensor]] = {}
        self._chosen: dict[str, bool] = {}
        self._sent_drafts: list[str] = []
        self._bytes = 0

    def keep(self, bucket: Sequence[NamedTensor], version: str) -> None:
        """Copy the part of a bucket that will be compared.

        Args:
            bucket: about to be sent.
            version: of the weights; decides which parameters are kept.
        """
        for name, tensor in self._engine.hashed(bucket):
            parameter, part = self._engine.server_parameter(name)
            if parameter not in self._chosen:
                self._chosen[parameter] = self._choose(parameter, version, tensor.element_size())
            if not self._chosen[parameter]:
                continue
            self._bytes += tensor.nbytes
            if self._bytes > self._limit:
                self._bytes -= tensor.nbytes + sum(t.nbytes for t in self._kept.pop(parameter, {}).values())
                self._chosen[parameter] = False
            else:
                self._kept.setdefault(parameter, {})[part] = tensor.detach().clone()

    def note_drafts(self, bucket: Sequence[NamedTensor]) -> None:
        """Remember which layers of a draft model are sent."""
        self._sent_drafts += [cpu_checksum(tensor) for _, tensor in bucket]

    @collective
    def share_elements(self) -> None:
        """Take the largest number that a rank has counted, as hosts may have other files; once."""
        if not self._is_shared:
            shared = torch.tensor(self._elements, device=communication_device())
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
            self._elements, self._is_shared = int(shared), True

    def chooses(self, name: str, version: str) -> bool:
        """True if `keep` keeps this tensor of 16 bits of that version, as far as it fits."""
        parameter, _ = self._engine.server_parameter(name)
        return self._choose(parameter, version, 2)

    def _choose(self, parameter: str, version: str, element_bytes: int) -> bool:
        """True if a parameter is verified in this push.

        The share depends on the bytes that are sent: a checkpoint in bfloat16 may be trained in float32.
        """
        share = self._limit / (self._elements * element_bytes)
        return share >= 1 or zlib.crc32(f"{version} {parameter}".encode()) < share * 2**32

    async def read(self, servers: ServerControl) -> list[ServerChecksums]:
        """The servers' checksums of their weights; [] if one is too old to have any, which no later read is.

        Raises:
            RolloutProtocolError: servers of one layout disagree.
            RolloutServerError: no answer, or HTTP 404 of a server that had checksums before, as of its proxy.
        """
        try:
            answers = await servers.weights_checker()
        except RolloutServerError as error:
            if error.status != 404 or error.url in self._have_checksums:
                raise
            if not self._warned_missing:
                logger.warning("the servers' weights can't be verified: %s", error)
            self._warned_missing = True
            return []
        self._have_checksums.update(servers.base_urls)
        infos = await servers.server_info()
        servers_checksums = [
            self._engine.checksums(*one) for one in zip(servers.base_urls, infos, answers, strict=True)
        ]
        check_agreement(servers_checksums, self._endpoint)
        return servers_checksums

    @property
    def _endpoint(self) -> str:
        return self._engine.weights_checker().endpoint

    def compare(self, servers: Sequence[ServerChecksums]) -> int:
        """Compare what was kept with what the servers have.

        If a server's layout is not known (on a GPU, with several ranks, in 16 bits, quantised), a parameter
        must match only after it has matched once at a server of that layout.

        Returns:
            The number of parameters that match at every server.

        Raises:
            RolloutProtocolError: a parameter that must match does not; or a draft model is the one of the
                push before, while its layers have changed.
        """
        self._compare_drafts(servers)
        verified = set(self._kept) if servers else set()
        matching: set[tuple[tuple, str]] = set()
        for server in servers:
            wrong, unknown = [], []
            for parameter, parts in self._kept.items():
                held = ((rank, sums, self._engine.held_as(parameter, sums)) for rank, sums in server.ranks)
                ranks = [(rank, sums[name]) for rank, sums, name in held if name in sums]
                if ranks and all(self._matches(parts, checksum, server, rank) for rank, checksum in ranks):
                    matching.add((server.layout, parameter))
                    continue
                verified.discard(parameter)
                must_match = server.layout_is_known or (server.layout, parameter) in self._matched
                (wrong if ranks and must_match else unknown).append(parameter)
            if wrong:
                raise RolloutProtocolError(
                    server.url,
                    self._endpoint,
                    f"{len(wrong)} of {len(self._kept)} weights that were compared are not those that were "
                    f"sent: {shortened(wrong)}; do other programs push to this server? If it holds them in a "
                    "layout of its own, use `verify_push` off",
                )
            if unknown and server.layout not in self._warned_layouts:
                self._warned_layouts.add(server.layout)
                logger.warning(
                    "%s: %d of %d weights are not verified, because the server's layout of them is not "
                    "known: %s",
                    server.url,
                    len(unknown),
                    len(self._kept),
                    shortened(unknown),
                )
        self._matched |= matching
        self.clear()
        return len(verified)

    def _compare_drafts(self, servers: Sequence[ServerChecksums]) -> None:
        """A draft model of which other layers were sent than in the push before must have changed."""
        sent, before = self._drafts
        self._drafts = (
            self._sent_drafts,
            {server.url: server.drafts for server in servers if any(server.drafts)},
        )
        for url, drafts in self._drafts[1].items() if sent and self._sent_drafts not in ([], sent) else ():
            if before.get(url) == drafts:
                raise RolloutProtocolError(
                    url,
                    self._endpoint,
                    "its draft model has the weights of the push before, while other ones were sent to it: "
                    "it would draft tokens that are rejected more and more often. Its engine does not "
                    "update draft models on this way: use another `weight_transport`, or start it without "
                    "speculative decoding",
                )

    def _matches(self, parts: dict[Part, Tensor], checksum: str, server: ServerChecksums, rank: int) -> bool:
        """True if the checksum is of these parts, in a layout and a dtype that the server
        may hold them in.
        """
        sent = next(iter(parts.values())).dtype
        others = [d for d in (torch.float32, torch.bfloat16, torch.float16) if d != sent]
        return any(
            self._engine.checksum(layout.to(dtype), server.device) == checksum
            for layout in self._engine.possible_layouts(parts, rank=rank, size=server.tp_size)
            for dtype in (sent, *others)
        )


def check_agreement(servers: Sequence[ServerChecksums], endpoint: str) -> None:
    """Check that servers of one layout have the same weights.

    Args:
        servers: what each server has.
        endpoint: of the request for the checksums, for the message.

    Raises:
        RolloutProtocolError: for the first server whose weights differ from those of another server.
    """
    for i, server in enumerate(servers):
        alike = next((other for other in servers[:i] if other.layout == server.layout), None)
        if alike is None:
            continue
        wrong = []
        for (_, mine), (_, theirs) in zip(server.ranks, alike.ranks, strict=True):
            wrong += [name for name in mine if name in theirs and mine[name] != theirs[name]]
        if wrong:
            raise RolloutProtocolError(
                server.url,
                endpoint,
                f"{len(wrong)} of its weights differ from those of {alike.url} after the same push: "
                f"{shortened(wrong)}; is one of them being updated by another program? Restart both; if each "
                "holds them in a layout of its own, use `verify_push` off",
            )


def shortened(names: Sequence[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
