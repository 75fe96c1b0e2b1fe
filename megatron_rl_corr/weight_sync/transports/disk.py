"""Weights through a folder that trainer and servers share: a complete Hugging Face model
for every version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.models.hf_folder import (
    MARKER,
    copy_model_files,
    remove,
    set_quantization,
    write_index,
    write_weights,
)
from megatron_rl_corr.models.quantization import BlockFP8
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.transports.base import WeightTransport

KEPT_VERSIONS = 2


class DiskTransport(WeightTransport):
    """Writes each bucket to a safetensors file; the folder gets its final name when it is complete.

    Args:
        folder: `weight_dir`, under the same path on every sender and server; nothing is written outside it.
        checkpoint: the folder that config and tokenizer files are copied from.
        loop: the event loop of the client.
        stage: this rank's pipeline stage.
        quantization: of the servers, for config.json.
    """

    in_session = False

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        loop: LoopThread,
        *,
        stage: int,
        quantization: BlockFP8 | None = None,
    ):
        super().__init__()
        self._quantization = quantization
        self._folder, self._checkpoint, self._loop, self._stage = folder.resolve(), checkpoint, loop, stage
        self._unfinished = self._folder / ".unfinished"
        self._files = 0
        self._written: list[Path] = []
        """Folders of whole versions, in the order in which they were made here."""

    def aim(self, servers, *, rejoined=None):
        super().aim(servers)
        self._files = 0

    def start(self, version: str) -> None:
        with _naming_option():
            remove(self._unfinished)
            self._unfinished.mkdir(parents=True)
            (self._unfinished / MARKER).write_text(json.dumps({"weight_version": version}))

    def send(self, bucket: list[NamedTensor]) -> None:
        file = f"model-stage{self._stage:03d}-{self._files:05d}.safetensors"
        self._files += 1
        with _naming_option():
            write_weights(self._unfinished / file, bucket)

    def deliver(self, version: str) -> None:
        with _naming_option():
            copy_model_files(self._checkpoint, self._unfinished)
            if self._quantization is not None:
                set_quantization(self._unfinished, self._quantization.config)
            write_index(self._unfinished)
            final = self._folder / f"version-{version}"
            remove(final)  # left by an attempt that failed
            self._unfinished.rename(final)
        self._written.append(final)
        self._loop.call(self.servers.update_weights_from_disk(str(final)))
        # A server reports the folder that it has loaded, and may load it again after a restart:
        # keep the last two.
        for old in sorted(_ours(self._folder), key=self._age)[:-KEPT_VERSIONS]:
            remove(old)
        self._written = self._written[-KEPT_VERSIONS:]

    def _age(self, folder: Path) -> tuple[int, int]:
        """Sorts the newest version last. Clocks are set back, and a file server has its own: own
        versions need none.
        """
        made = max((place for place, own in enumerate(self._written) if own == folder), default=-1)
        return made, folder.stat().st_mtime_ns

    def close(self):
        remove(self._unfinished)


@contextmanager
def _naming_option() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise type(error)(f"`weight_dir`: {error}") from error


def _ours(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("version-*") if not path.is_symlink()]
    return [path for path in found if (path / MARKER).is_file()]
