"""Changes single weights of a running server for a while, and restores them."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_rl_corr.doctor.probe import Probe
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint

FINAL_NORM = "model.norm.weight"
"""Changes the logits but no key or value, so that cached prefixes stay right."""
FIRST_NORM = "model.layers.0.input_layernorm.weight"
"""Changes the keys and values of every layer."""


def read_tensors(directory: str | Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Some tensors of a Hugging Face folder.

    Args:
        directory: the folder.
        names: of the tensors.

    Raises:
        ValueError: the folder lacks config.json or a tensor.
        OSError: a file can't be read.
    """
    checkpoint = HFCheckpoint(directory)
    return {name: checkpoint.tensor(name) for name in names}


class TemporaryWeights:
    """A few weights of one server, with the original values that they get back.

    Args:
        probe: of the server.
        originals: Hugging Face name -> value.
        ranks: the server's tensor-parallel size.
        version: the name of its weights.
    """

    def __init__(self, probe: Probe, originals: Mapping[str, torch.Tensor], *, ranks: int, version: str):
        self._probe, self._originals, self._ranks, self._version = probe, dict(originals), ranks, version

    @asynccontextmanager
    async def scaled(
        self, name: str, factor: float, version: str, *, flush: bool = True
    ) -> AsyncIterator[None]:
        """Inside the block the weight is `factor` times its value, and the server's weights are
        called `version`.

        The caller pauses the server before and resumes it inside. At the end of the block, after a
        failure too, the weight and the version's name are restored, cached prefixes are dropped, and
        the server samples.
        """
        try:
            await self._send({name: self._originals[name] * factor}, version)
            if flush:
                await self._probe.flush_cache()
            yield
        finally:
            await uninterrupted(self._put_back(name))

    async def _put_back(self, name: str) -> None:
        try:
            await self._probe.pause_generation("retract")
            await self._send({name: self._originals[name]}, self._version)
            await self._probe.flush_cache()
        finally:
            await self._probe.continue_generation()

    async def checksum(self) -> list[dict[str, str]]:
        """{parameter: checksum} of each rank of the server.

        Raises:
            RolloutError: the server could not be asked, or its answer has no checksums.
        """
        [answer] = await self._probe.weights_checker()
        return self._probe.engine.all_checksums(self._probe.url, answer)

    async def _send(self, tensors: Mapping[str, torch.Tensor], version: str) -> None:
        engine = self._probe.engine
        payload = engine.serialized(list(tensors.items()))
        await self._probe.reopen_weight_update()
        await self._probe.control(engine.update_weights_from_tensor([payload] * self._ranks))
        await self._probe.end_weight_update()
        await self._probe.update_weight_version(version)


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end, such as restoring a server. A cancellation meanwhile is raised afterwards."""
    task, cancellation = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancellation = error
    task.result()
    if cancellation is not None:
        raise cancellation
