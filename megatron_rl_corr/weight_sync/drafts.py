"""Which servers are sent the layers that predict further tokens (MTP): those that draft with
them, and no others.

A draft model guesses tokens, which the model itself judges: with old layers a server is slower, and
samples no other tokens. So these layers may stay as loaded. Servers hold them under names of their own, so
their checksums are not compared with what was sent, but with those after the push before:
`PushVerifier.compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.models.quantization import BlockFP8


@dataclass(frozen=True)
class DraftLayers:
    """What of the exported weights is a draft model's, and whether it is sent."""

    is_draft: Callable[[str], bool] = lambda name: False
    """By the Hugging Face name; `NameTable.is_of_mtp`."""
    sent: bool = False

    def without_unsent(self, units: Iterable[list[NamedTensor]]) -> Iterator[list[NamedTensor]]:
        """The units that are sent."""
        for unit in units:
            if left := [named for named in unit if self.sent or not self.is_draft(named[0])]:
                yield left

    def planned(self, shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """The names and shapes of what is sent."""
        return {name: shape for name, shape in shapes.items() if self.sent or not self.is_draft(name)}

    def verified(self, bucket: Sequence[NamedTensor]) -> list[NamedTensor]:
        """What of a bucket is compared with the servers' checksums."""
        return [named for named in bucket if not self.is_draft(named[0])]

    def drafting(self, bucket: Sequence[NamedTensor]) -> list[NamedTensor]:
        """What of a bucket is the draft model's."""
        return [named for named in bucket if self.is_draft(named[0])]


NO_DRAFTS = DraftLayers()
"""All weights are the model's own."""


async def find_drafting(control: ServerControl, quantization: BlockFP8 | None) -> bool:
    """True if the servers draft tokens with the checkpoint's own layers.

    Args:
        control: of all servers.
        quantization: of their weights.

    Raises:
        RolloutProtocolError: some do and others do not, or they hold them in FP8, which was
            not shown to work.
        RolloutError: a server could not be asked.
    """
    infos, urls = await control.server_info(), control.base_urls
    drafts = {url: control.engine_of(url).drafts_itself(info) for url, info in zip(urls, infos, strict=True)}
    if not any(drafts.values()):
        return False
    url, other = (
        next(url for url in urls if drafts[url]),
        next((url for url in urls if not drafts[url]), None),
    )
    endpoint = control.engine_of(url).server_info().endpoint
    if other is not None:
        raise RolloutProtocolError(
            url,
            endpoint,
            f"it drafts tokens with the layers of --mtp-num-layers, and {other} does not; all are sent the "
            "same: start all with, or all without speculative decoding",
        )
    if quantization is not None:
        raise RolloutProtocolError(
            url,
            endpoint,
            "it drafts tokens with the layers of --mtp-num-layers in FP8, and updates of such a draft model "
            "were not shown to work; start it without speculative decoding, or from the model in 16 bits",
        )
    return True
