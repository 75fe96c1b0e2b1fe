"""Is a push complete? Every tensor of the checkpoint that servers started from is held against what was sent.

SGLang drops names that it does not know, and keeps parameters that nothing came for, without a word.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_rl_corr.engines.errors import IncompletePush, RolloutProtocolError
from megatron_rl_corr.parallel.failure import all_reduce_failure, communication_device
from megatron_rl_corr.weight_sync.buckets import NamedTensor
from megatron_rl_corr.weight_sync.fused import held_in, server_parameter
from megatron_rl_corr.weight_sync.proof import ENDPOINT, ServerWeights, some

_QUANTISES_ANEW = "flash_rl"
"""The --load-format of a server that quantises what it is sent (0.5.23: Qwen2 and Qwen3). By its code any other puts
bfloat16 numbers into quantised weights as they are, beside the old scales, or has no loader left for them."""

logger = logging.getLogger(__name__)


class Coverage:
    """One rank's count of what was sent in an update.

    names: of all tensors of the checkpoint. why_kept(name): why a tensor, or a server's parameter, stays as servers
    have loaded it; None where it must be sent.
    """

    def __init__(self, names: Iterable[str], why_kept: Callable[[str], str | None]):
        self._why_kept = why_kept
        self._names = sorted(names)
        self._place = {name: i for i, name in enumerate(self._names)}
        self._kept = {name: reason for name in self._names if (reason := why_kept(name)) is not None}
        self._told: set[str] = set()
        self.clear()

    def clear(self) -> None:
        """An update begins."""
        self._counts = [0] * len(self._names)
        self._foreign: list[str] = []

    def count(self, bucket: Sequence[NamedTensor]) -> None:
        """These were sent from here."""
        for name, _ in bucket:
            if name in self._place:
                self._counts[self._place[name]] += 1
            else:
                self._foreign.append(name)

    def all_reduce_check(self) -> None:
        """Every rank calls it when all stages have sent; afterwards each knows what all have sent.

        One collective of a number for each tensor. Raises IncompletePush, on one rank, for a tensor that was not sent
        though nothing says that it stays, was sent twice, or is not the checkpoint's.
        """
        counts = torch.tensor(self._counts, dtype=torch.int32, device=communication_device())
        dist.all_reduce(counts)
        self._counts = counts.tolist()
        all_reduce_failure(self._failure())
        if dist.get_rank() == 0:
            self._tell("of the checkpoint", self._kept)

    def _failure(self) -> IncompletePush | None:
        if self._foreign:
            return IncompletePush(
                f"the checkpoint has none of {some(self._foreign)}, which would be sent, and the servers would drop "
                "without a word; name the checkpoint that they were started with in --rollout-hf-checkpoint"
            )
        sent = dict(zip(self._names, self._counts, strict=True))
        missing = [name for name, times in sent.items() if not times and name not in self._kept]
        if missing:
            return IncompletePush(
                f"nothing was sent for {len(missing)} of the checkpoint's {len(self._names)} tensors: {some(missing)}; "
                "the servers would keep those that they have loaded, beside new ones; do the model flags describe all "
                "of that model?"
            )
        twice = [name for name, times in sent.items() if times > 1]
        if twice:
            return IncompletePush(f"sent more than once, so that the last one stays: {some(twice)}")
        return None

    def check_servers(self, shown: Sequence[ServerWeights]) -> None:
        """Rank 0, after all_reduce_check: RolloutProtocolError for a server with a parameter that nothing was sent for,
        or without one that was sent.

        Of a server with several pipeline stages only the first shows what it has.
        """
        sent = zip(self._names, self._counts, strict=True)
        parameters = {server_parameter(name)[0] for name, times in sent if times}
        for server in shown:
            held = {name for _, sums in server.ranks for name in sums}
            filled = {held_in(parameter, held) for parameter in parameters}
            # An output layer of its own is never the embedding: a server that ties them has only the latter.
            unsent = held - filled - {"lm_head.weight"}
            kept = {name: reason for name in unsent if (reason := self._why_kept(name)) is not None}
            left = sorted(held - filled - kept.keys() - _made_anew(server))
            if left:
                raise RolloutProtocolError(
                    server.url, ENDPOINT,
                    f"nothing was sent for {len(left)} of its {len(held)} weights, which stay as it has loaded them: "
                    f"{some(left)}. Start it with the checkpoint that --rollout-hf-checkpoint names; if it "
                    "only holds its weights under other names, use --rollout-verify-push off",
                )
            lacking = sorted(parameter for parameter in parameters if held_in(parameter, held) not in held)
            if lacking and server.shows_all:
                raise RolloutProtocolError(
                    server.url, ENDPOINT,
                    f"{len(lacking)} of {len(parameters)} weights were sent and it has no such: {some(lacking)}. Start "
                    "it with the checkpoint that --rollout-hf-checkpoint names; if it only holds its weights under "
                    "other names, use --rollout-verify-push off",
                )
            self._tell(f"at {server.url}", kept)

    def _tell(self, where: str, kept: dict[str, str]) -> None:
        """Each reason once."""
        by_reason = defaultdict(list)
        for name, reason in kept.items():
            by_reason[reason].append(name)
        for reason, names in by_reason.items():
            if reason not in self._told:
                self._told.add(reason)
                logger.warning("stays as loaded, %d %s: %s (%s)", len(names), where, some(names), reason)


def _made_anew(server: ServerWeights) -> set[str]:
    """Scales that a quantised server makes of what it is sent; RolloutProtocolError for one that makes none."""
    if server.quantization is None:
        return set()
    if server.load_format != _QUANTISES_ANEW:
        raise RolloutProtocolError(
            server.url, ENDPOINT,
            f"its weights are quantised ({server.quantization}), and their scales would stay those of the weights that "
            f"it has loaded; serve the model in bfloat16, or Qwen2 and Qwen3 with --load-format {_QUANTISES_ANEW}",
        )
    return {name for _, sums in server.ranks for name in sums if name.endswith(".weight_scale")}
