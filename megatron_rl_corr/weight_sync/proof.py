"""After a push: do the servers have what was sent? Their checksums, compared with each other and the trainer's.

All servers' checksums must agree. A part of what is sent, chosen anew for every version, is kept by its sender until
the end, put together as SGLang does, hashed as SGLang does, and compared: all of a model of up to KEPT_BYTES a stage,
a sample of a larger one.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.control import ServerControl
from megatron_rl_corr.rollout.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.weight_sync.buckets import NamedTensor
from megatron_rl_corr.weight_sync.checksums import checksum
from megatron_rl_corr.weight_sync.fused import Part, possible_layouts, server_parameter

KEPT_BYTES = 256 * 2**20
ENDPOINT = "/weights_checker"
_SHOWN = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerWeights:
    """What one server says of its weights. `ranks`: for each of its ranks (tensor rank, {parameter: checksum})."""

    url: str
    device: str
    tp_size: int
    layout: tuple
    """Servers whose layouts are equal hold the same tensors."""
    quantization: str | None
    ranks: tuple[tuple[int, dict[str, str]], ...]

    @property
    def layout_is_known(self) -> bool:
        """Whether every parameter must be as fused.py has it, and not only those that once were."""
        return self.device == "cpu" and self.layout[:3] == (1, 1, 1) and self.quantization is None


class PushProof:
    """One rank's. model_bytes: of the whole checkpoint, to choose the share that is kept."""

    def __init__(self, model_bytes: int, *, kept_bytes: int = KEPT_BYTES):
        self._share = min(1.0, kept_bytes / max(1, model_bytes))
        self._limit = kept_bytes
        self._matched: set[tuple[tuple, str]] = set()  # by layout
        self._warned = False
        self._unknown_told: set[tuple] = set()
        self.clear()

    def clear(self) -> None:
        """Forget what was kept: an update begins."""
        self._kept: dict[str, dict[Part, Tensor]] = {}
        self._too_large: set[str] = set()
        self._bytes = 0

    def keep(self, bucket: Sequence[NamedTensor], version: str) -> None:
        """Before the bucket is sent."""
        for name, tensor in bucket:
            parameter, part = server_parameter(name)
            if not self._chosen(parameter, version):
                continue
            self._bytes += tensor.nbytes
            if self._bytes > self._limit:
                self._bytes -= tensor.nbytes + sum(t.nbytes for t in self._kept.pop(parameter, {}).values())
                self._too_large.add(parameter)
            else:
                self._kept.setdefault(parameter, {})[part] = tensor.detach().clone()

    def _chosen(self, parameter: str, version: str) -> bool:
        if parameter in self._too_large:
            return False
        return self._share >= 1 or zlib.crc32(f"{version} {parameter}".encode()) < self._share * 2**32

    def ask(self, servers: ServerControl, loop: LoopThread) -> list[ServerWeights]:
        """Every server's checksums; none where a server is too old to have any. Checks that they agree."""
        try:
            answers = loop.call(servers.weights_checker())
        except RolloutServerError as error:
            if error.status == 404:
                if not self._warned:
                    logger.warning("nothing proves that the servers have the weights: %s", error)
                self._warned = True
                return []
            raise
        infos = loop.call(servers.server_info())
        shown = [_read(*one) for one in zip(servers.base_urls, infos, answers, strict=True)]
        check_agreement(shown)
        return shown

    def compare(self, shown: Sequence[ServerWeights]) -> int:
        """How many parameters are, at every server, what was kept.

        Raises RolloutProtocolError for a server that has another. Where the layout of a parameter is not known (on a
        GPU, with several ranks, quantised), it counts only from the first push on in which it fitted at such a server.
        """
        proven = set(self._kept) if shown else set()
        fitting: set[tuple[tuple, str]] = set()
        for server in shown:
            wrong, unknown = [], []
            for parameter, parts in self._kept.items():
                ranks = [(rank, sums[parameter]) for rank, sums in server.ranks if parameter in sums]
                if ranks and all(_fits(parts, told, server, rank) for rank, told in ranks):
                    fitting.add((server.layout, parameter))
                    continue
                proven.discard(parameter)
                must_fit = server.layout_is_known or (server.layout, parameter) in self._matched
                (wrong if ranks and must_fit else unknown).append(parameter)
            if wrong:
                raise RolloutProtocolError(
                    server.url, ENDPOINT,
                    f"{len(wrong)} of {len(self._kept)} weights that were compared are not those that were sent: "
                    f"{_some(wrong)}; do other programs push to this server? If it holds them in a layout of its own, "
                    "use --rollout-verify-push off",
                )
            if unknown and server.layout not in self._unknown_told:
                self._unknown_told.add(server.layout)
                logger.warning(
                    "%s: nothing proves %d of %d weights, as its layout of them is not known: %s",
                    server.url, len(unknown), len(self._kept), _some(unknown),
                )
        self._matched |= fitting
        self.clear()
        return len(proven)


def check_agreement(shown: Sequence[ServerWeights]) -> None:
    """RolloutProtocolError for the first server whose weights are not those of another of the same layout."""
    for i, server in enumerate(shown):
        alike = next((other for other in shown[:i] if other.layout == server.layout), None)
        if alike is None:
            continue
        wrong = []
        for (_, mine), (_, theirs) in zip(server.ranks, alike.ranks, strict=True):
            wrong += [name for name in mine if name in theirs and mine[name] != theirs[name]]
        if wrong:
            raise RolloutProtocolError(
                server.url, ENDPOINT,
                f"{len(wrong)} of its weights differ from those of {alike.url} after the same push: {_some(wrong)}; "
                "is one of them being updated by another program? Start both anew",
            )


def _fits(parts: dict[Part, Tensor], told: str, server: ServerWeights, rank: int) -> bool:
    """Whether the checksum is of these parts, in one of the layouts and dtypes that a server may hold them in."""
    sent = next(iter(parts.values())).dtype
    others = [d for d in (torch.float32, torch.bfloat16, torch.float16) if d != sent]
    return any(
        checksum(layout.to(dtype), server.device) == told
        for layout in possible_layouts(parts, rank=rank, size=server.tp_size)
        for dtype in (sent, *others)
    )


def _read(url: str, info: dict[str, Any], answer: dict[str, Any]) -> ServerWeights:
    try:
        ranks = tuple((rank["parallelism_info"][0]["tp_rank"], rank["checksums"]) for rank in answer["ranks"])
        layout = tuple(info[key] for key in ("tp_size", "pp_size", "ep_size", "dtype", "device", "quantization"))
        return ServerWeights(
            url, info["device"], info["tp_size"], (*layout, len(ranks)), info["quantization"], ranks
        )
    except (KeyError, IndexError, TypeError) as error:
        raise RolloutProtocolError(url, ENDPOINT, f"no checksum by rank ({error!r} is missing)") from None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
