"""Checks that a push is complete: every tensor of the checkpoint that servers started from was
sent, or may stay.

Servers may silently drop names that they do not know, and silently keep parameters that were not sent.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.errors import IncompletePush, RolloutProtocolError
from megatron_rl_corr.engines.types import NamedTensor, ServerChecksums
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.names import CheckpointNames
from megatron_rl_corr.models.quantization import SCALE, BlockFP8
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import all_reduce_failure, communication_device
from megatron_rl_corr.weight_sync.verify import shortened

logger = logging.getLogger(__name__)


def make_coverage(checkpoint: Path, quantization: BlockFP8 | None = None) -> Coverage:
    """One rank's check.

    Args:
        checkpoint: the Hugging Face folder of the model that is trained.
        quantization: of the servers.
    """
    folder = HFCheckpoint(checkpoint)
    table = CheckpointNames(folder.config)
    quantised = [name for name in folder.names if quantization is not None and quantization.quantises(name)]
    scales = [name + SCALE for name in quantised if table.why_kept(name) is None]
    return Coverage([*folder.names, *scales], table.why_kept)


class Coverage:
    """Counts what one rank sends in an update.

    Args:
        names: of all tensors of the checkpoint.
        why_kept: the reason why servers keep a tensor, or a parameter, as loaded; None if it must be sent.
    """

    def __init__(self, names: Iterable[str], why_kept: Callable[[str], str | None]):
        self.why_kept = why_kept
        self._names = sorted(names)
        self._place = {name: i for i, name in enumerate(self._names)}
        self._kept = {name: reason for name in self._names if (reason := why_kept(name)) is not None}
        self._logged: set[str] = set()
        self.clear()

    def clear(self) -> None:
        """Forget all counts: an update begins."""
        self._counts = [0] * len(self._names)
        self._foreign: list[str] = []

    def count(self, bucket: Sequence[NamedTensor]) -> None:
        """Count the tensors of a bucket that this rank has sent."""
        self.count_names(name for name, _ in bucket)

    def count_names(self, names: Iterable[str]) -> None:
        """Count tensors that this rank has sent, or that have not changed."""
        for name in names:
            if name in self._place:
                self._counts[self._place[name]] += 1
            else:
                self._foreign.append(name)

    @collective
    def check_all_sent(self) -> None:
        """Add up the counts of all ranks and check them; every rank calls it once all stages have sent.

        One collective of 4 bytes for each tensor of the checkpoint.

        Raises:
            IncompletePush: on one rank, if a tensor that must be sent was not, if one was sent twice, or
                if one is not in the checkpoint.
        """
        counts = torch.tensor(self._counts, dtype=torch.int32, device=communication_device())
        dist.all_reduce(counts)
        self._counts = counts.tolist()
        all_reduce_failure(self._problem())
        if dist.get_rank() == 0:
            self._log("of the checkpoint", self._kept)

    def _problem(self) -> IncompletePush | None:
        if self._foreign:
            return IncompletePush(
                f"the checkpoint has none of {shortened(self._foreign)}, which would be sent, and the "
                "servers would silently drop them; name the checkpoint that they were started with in "
                "`hf_checkpoint`"
            )
        sent = dict(zip(self._names, self._counts, strict=True))
        missing = [name for name, times in sent.items() if not times and name not in self._kept]
        if missing:
            return IncompletePush(
                f"nothing was sent for {len(missing)} of the checkpoint's {len(self._names)} tensors: "
                f"{shortened(missing)}; the servers would use their old values beside new ones; do the model "
                "flags describe all of that model?"
            )
        twice = [name for name, times in sent.items() if times > 1]
        if twice:
            return IncompletePush(
                f"sent more than once, so that only the last one counts: {shortened(twice)}"
            )
        return None

    def check_servers(self, servers: Sequence[ServerChecksums], engine: Engine) -> None:
        """Compare the servers' parameters with what was sent; rank 0 calls it after check_all_sent.

        Args:
            servers: what each server has.
            engine: what they run.

        Raises:
            RolloutProtocolError: a server has a parameter that must be sent and was not, lacks one that
                was sent, or is quantised and keeps its old scales.
        """
        endpoint = engine.weights_checker().endpoint
        sent = zip(self._names, self._counts, strict=True)
        # What may stay as loaded may have no parameter to show, as a draft model's.
        must = (name for name, times in sent if times and name not in self._kept)
        all_parameters = {engine.server_parameter(name)[0] for name in must}
        scales = {parameter for parameter in all_parameters if parameter.endswith(SCALE)}
        for server in servers:
            held = {name for _, sums in server.ranks for name in sums}
            # Where no scale is shown, each is hashed as one with its weight.
            parameters = (
                all_parameters if any(name.endswith(SCALE) for name in held) else all_parameters - scales
            )
            filled = {engine.held_in(parameter, held) for parameter in parameters}
            # A separate output layer never stands for the embedding: a server that ties them has
            # only the embedding.
            unsent = held - filled - {"lm_head.weight"}
            kept = {name: reason for name in unsent if (reason := self.why_kept(name)) is not None}
            left = sorted(held - filled - kept.keys() - (set() if scales else _new_scales(server, engine)))
            if left:
                raise RolloutProtocolError(
                    server.url,
                    endpoint,
                    f"nothing was sent for {len(left)} of its {len(held)} weights, which keep the values "
                    f"that it loaded: {shortened(left)}. Start it with the checkpoint that `hf_checkpoint` "
                    "names; if it only holds its weights under other names, use `verify_push` off",
                )
            lacking = sorted(name for name in parameters if engine.held_in(name, held) not in held)
            if lacking and server.shows_all:
                raise RolloutProtocolError(
                    server.url,
                    endpoint,
                    f"{len(lacking)} of {len(parameters)} weights were sent that it does not have: "
                    f"{shortened(lacking)}. Start it with the checkpoint that `hf_checkpoint` names; if it "
                    "only holds its weights under other names, use `verify_push` off",
                )
            self._log(f"at {server.url}", kept)

    def _log(self, where: str, kept: dict[str, str]) -> None:
        """Log the tensors that stay, once for each reason."""
        by_reason = defaultdict(list)
        for name, reason in kept.items():
            by_reason[reason].append(name)
        for reason, names in by_reason.items():
            if reason not in self._logged:
                self._logged.add(reason)
                logger.warning("stays as loaded, %d %s: %s (%s)", len(names), where, shortened(names), reason)


def _new_scales(server: ServerChecksums, engine: Engine) -> set[str]:
    """Scales that a quantised server makes of what it is sent. Raises RolloutProtocolError
    if it makes none.
    """
    if server.quantization is None:
        return set()
    if not server.quantises_updates:
        raise RolloutProtocolError(
            server.url,
            engine.weights_checker().endpoint,
            f"its weights are quantised ({server.quantization}), and their scales would stay those of the "
            f"weights that it loaded; serve the model in 16 bits, or {engine.quantises_updates_with}",
        )
    return {name for _, sums in server.ranks for name in sums if name.endswith(".weight_scale")}
