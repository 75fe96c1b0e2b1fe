"""After a push: do the servers have what was sent? Their checksums, compared with each other and the trainer's.

All servers' checksums must agree. A part of what is sent, chosen anew for every version, is kept by its sender until
the end, put together as SGLang does, hashed as SGLang does, and compared: all of a model of up to KEPT_BYTES a stage,
a sample of a larger one.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.buckets import NamedTensor
from megatron_rl_corr.weight_sync.checksums import checksum
from megatron_rl_corr.weight_sync.fused import Part, possible_layouts, server_parameter

KEPT_BYTES = 256 * 2**20
ENDPOINT = "/weights_checker"
_SHOWN = 5
_LAYOUT = (
    "tp_size", "pp_size", "ep_size", "dtype", "device", "quantization", "moe_runner_backend", "moe_a2a_backend",
    "enable_dp_attention", "enable_dp_lm_head", "moe_dense_tp_size", "enable_eplb", "ep_num_redundant_experts",
    "init_expert_location", "enable_fp32_lm_head", "disable_shared_experts_fusion",
)  # fmt: skip
"""Names in /server_info that decide what a rank holds, and how; the first six are in every version's."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerWeights:
    """What one server says of its weights. `ranks`: for each of its ranks (tensor rank, {parameter: checksum}).

    Without those of a draft model, which only guesses tokens.
    """

    url: str
    device: str
    tp_size: int
    layout: tuple
    """Servers whose layouts are equal hold the same tensors."""
    quantization: str | None
    """--quantization, or that of the folder it has loaded, where this process sees it too."""
    ranks: tuple[tuple[int, dict[str, str]], ...]
    load_format: str | None = None

    @property
    def shows_all(self) -> bool:
        """Whether these are all of its ranks: of several pipeline stages SGLang shows the first one's (0.5.23)."""
        return self.layout[1] == 1

    @property
    def layout_is_known(self) -> bool:
        """Whether every parameter must be as fused.py has it, and not only those that once were.

        In 16 bits a CPU with AMX holds its matrices packed, and /server_info does not tell; float32 is never packed.
        """
        return self.device == "cpu" and self.layout[:4] == (1, 1, 1, "float32") and self.quantization is None


class PushProof:
    """One rank's. elements: numbers in the whole model, to choose the share that is kept."""

    def __init__(self, elements: int, *, kept_bytes: int = KEPT_BYTES):
        self._elements = max(1, elements)
        self._limit = kept_bytes
        self._matched: set[tuple[tuple, str]] = set()  # by layout
        self._warned = False
        self._unknown_told: set[tuple] = set()
        self.clear()

    def clear(self) -> None:
        """Forget what was kept: an update begins."""
        self._kept: dict[str, dict[Part, Tensor]] = {}
        self._chosen: dict[str, bool] = {}
        self._bytes = 0

    def keep(self, bucket: Sequence[NamedTensor], version: str) -> None:
        """Before the bucket is sent."""
        for name, tensor in bucket:
            parameter, part = server_parameter(name)
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

    def _choose(self, parameter: str, version: str, element_bytes: int) -> bool:
        """By the bytes that are sent: a checkpoint in bfloat16 may be trained in float32."""
        share = self._limit / (self._elements * element_bytes)
        return share >= 1 or zlib.crc32(f"{version} {parameter}".encode()) < share * 2**32

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
        GPU, with several ranks, in 16 bits, quantised), it counts only from the first push on in which it fitted at
        such a server.
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
                    f"{some(wrong)}; do other programs push to this server? If it holds them in a layout of its own, "
                    "use --rollout-verify-push off",
                )
            if unknown and server.layout not in self._unknown_told:
                self._unknown_told.add(server.layout)
                logger.warning(
                    "%s: nothing proves %d of %d weights, as its layout of them is not known: %s",
                    server.url, len(unknown), len(self._kept), some(unknown),
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
                f"{len(wrong)} of its weights differ from those of {alike.url} after the same push: {some(wrong)}; "
                "is one of them being updated by another program? Start both anew; if each holds them in a layout of "
                "its own, use --rollout-verify-push off",
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
        ranks = tuple(_read_rank(rank) for rank in answer["ranks"])
        layout = (*(info[key] for key in _LAYOUT[:6]), *(info.get(key) for key in _LAYOUT[6:]))
        quantization = info["quantization"] or _quantization_of_folder(info.get("model_path"))
        return ServerWeights(
            url, info["device"], info["tp_size"], (*layout, len(ranks)), quantization, ranks, info.get("load_format")
        )
    except (KeyError, IndexError, TypeError) as error:
        raise RolloutProtocolError(url, ENDPOINT, f"no checksum by rank ({error!r} is missing)") from None


def _quantization_of_folder(model_path: str | None) -> str | None:
    """SGLang finds it in the checkpoint itself, and does not always tell."""
    if model_path is None or not (config := Path(model_path) / "config.json").is_file():
        return None
    quantised = json.loads(config.read_text()).get("quantization_config")
    return quantised.get("quant_method", "by its config.json") if quantised else None


def _read_rank(rank: dict[str, Any]) -> tuple[int, dict[str, str]]:
    infos = rank["parallelism_info"]
    if isinstance(infos, dict):  # SGLang <= 0.5.20
        return infos["tp_rank"], rank["checksums"]
    drafts = tuple(f"{info['role']}." for info in infos if info["role"] != "target")
    sums = {name: told for name, told in rank["checksums"].items() if not name.startswith(drafts)}
    return infos[0]["tp_rank"], sums


def some(names: Sequence[str]) -> str:
    """The first few, for a message."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
