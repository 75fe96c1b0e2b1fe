"""Weights through a folder that trainer and servers share: a complete Hugging Face model for every version."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.transports.base import WeightTransport

MARKER = "megatron_rl_corr.json"
"""A file in every folder that is made here; a folder without it is never removed."""
KEPT_VERSIONS = 2
_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")


class DiskTransport(WeightTransport):
    """Writes each bucket to a safetensors file; the folder gets its final name when it is complete.

    Args:
        folder: `weight_dir`, under the same path on every sender and server; nothing is written outside it.
        checkpoint: the folder that config and tokenizer files are copied from.
        loop: the event loop of the client.
        stage: this rank's pipeline stage.
    """

    in_session = False

    def __init__(self, folder: Path, checkpoint: Path, loop: LoopThread, *, stage: int):
        super().__init__()
        self._folder, self._checkpoint, self._loop, self._stage = folder.resolve(), checkpoint, loop, stage
        self._unfinished = self._folder / ".unfinished"
        self._files = 0

    def aim(self, servers, *, rejoined=None):
        super().aim(servers)
        self._files = 0

    def start(self, version: str) -> None:
        _remove(self._unfinished)
        self._unfinished.mkdir(parents=True)
        (self._unfinished / MARKER).write_text(json.dumps({"weight_version": version}))

    def send(self, bucket: list[NamedTensor]) -> None:
        file = f"model-stage{self._stage:03d}-{self._files:05d}.safetensors"
        self._files += 1
        tensors = {name: tensor.detach().contiguous() for name, tensor in bucket}
        try:
            save_file(tensors, self._unfinished / file, metadata={"format": "pt"})
            # safetensors makes files for their owner alone; a server may run as another user.
            (self._unfinished / file).chmod((self._unfinished / MARKER).stat().st_mode & 0o777)
        except SafetensorError as error:
            raise OSError(f"`weight_dir`: {self._unfinished / file} could not be written: {error}") from error

    def deliver(self, version: str) -> None:
        copy_model_files(self._checkpoint, self._unfinished)
        write_index(self._unfinished)
        final = self._folder / f"version-{version}"
        _remove(final)  # left by an attempt that failed
        self._unfinished.rename(final)
        self._loop.call(self.servers.update_weights_from_disk(str(final)))
        # A server reports the folder that it has loaded, and may load it again after a restart: keep the last two.
        for old in sorted(_ours(self._folder), key=lambda path: path.stat().st_mtime_ns)[:-KEPT_VERSIONS]:
            _remove(old)

    def close(self):
        _remove(self._unfinished)


def write_index(folder: Path) -> None:
    """Write model.safetensors.index.json for all safetensors files in a folder.

    Raises:
        OSError: two files have a tensor of the same name.
    """
    weight_map: dict[str, str] = {}
    size = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
        if twice := weight_map.keys() & names:
            raise OSError(f"{sorted(twice)} of {path.name} in {folder} are in another file too")
        weight_map |= dict.fromkeys(names, path.name)
        size += path.stat().st_size
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def copy_model_files(source: Path, target: Path) -> None:
    """Copy the config, tokenizer and code of a Hugging Face folder, without its weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _COPIED and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)


def check_folder(folder: Path) -> None:
    """Make the folder.

    Raises:
        ValueError: it can't be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`weight_dir` {folder} can't be made: {error.strerror}; name another") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"`weight_dir` {folder} can't be written; name another folder")


def _ours(folder: Path) -> list[Path]:
    return [path for path in folder.glob("version-*") if (path / MARKER).is_file()]


def _remove(folder: Path) -> None:
    """Remove a folder that was made here, or an empty one, because a run may be killed before it writes the marker.

    The marker is removed last, so that a folder half removed by a killed run can still be recognised.

    Raises:
        FileExistsError: the folder was not made here.
    """
    if not folder.exists():
        return
    inside = list(folder.iterdir())
    if inside and not (folder / MARKER).is_file():
        raise FileExistsError(
            f"{folder} has no {MARKER}, so it was not made by this program; name another `weight_dir`"
        )
    for path in sorted(inside, key=lambda path: path.name == MARKER):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.rmdir()
