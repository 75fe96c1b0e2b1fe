"""Writes a Hugging Face model folder, file by file, beside its place, which it takes when it is whole."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl_corr.files import refuse_link
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint, read_config
from megatron_rl_corr.models.mtp import hf_prefixes, num_mtp_layers
from megatron_rl_corr.models.names import CheckpointNames

logger = logging.getLogger(__name__)

MARKER = "megatron_rl_corr.json"
"""A file in every folder that is made here; a folder without it is never removed."""
FILE_BYTES = 2**30
"""Size of a file of weights, about: a tensor is never cut."""
_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_TEMPLATES = "additional_chat_templates"
"""Where transformers keeps a tokenizer's chat templates beside the first one."""


class UnfinishedFolder:
    """A Hugging Face folder that is being written beside the place that it gets.

    Args:
        final: its place; parents are made. Of a link it is where that leads.
        made_by: what goes into its marker, for people.
    """

    def __init__(self, final: Path, made_by: dict[str, str]):
        self.final = final.resolve()
        self.path, self._old = (
            self.final.with_name(f".{self.final.name}.{part}") for part in ("unfinished", "old")
        )
        self._made_by = made_by

    def begin(self) -> None:
        """Make it, empty; what an attempt left that was broken off is removed.

        Raises:
            FileExistsError: its place is taken by a folder that was not made here, which is never removed.
            OSError: a file system is mounted at its place, which no folder beside it can take.
        """
        if self.final.is_mount():
            raise OSError(
                f"a file system is mounted at {self.final}, so it can't be replaced; name a folder in it"
            )
        if self.final.exists():
            check_ours(self.final)
        remove(self.path)
        remove(self._old)
        self.path.mkdir(parents=True)
        (self.path / MARKER).write_text(json.dumps(self._made_by))

    def write(self, file: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write a file of weights. Raises OSError if the disk doesn't take it."""
        write_weights(self.path / f"{file}.safetensors", tensors)

    def finish(self, source: HFCheckpoint) -> None:
        """Add what `source` has beside trained weights, check that nothing lacks, and give the
        folder its place.

        config.json gets the dtype of the weights, and promises no layers that they lack.

        Args:
            source: the model that training began with.

        Raises:
            ValueError: a tensor of `source` was not written, or one that it does not have.
            OSError: the disk doesn't take it.
        """
        copy_model_files(source.path, self.path)
        self._keep_untrained(source)
        self._promise_no_missing_layers(source)
        write_index(self.path)
        _set_dtype(self.path)
        if self.final.exists():
            # Removed where it is, it would be there in part if this process died meanwhile.
            self.final.rename(self._old)
        self.path.rename(self.final)
        remove(self._old)

    def _promise_no_missing_layers(self, source: HFCheckpoint) -> None:
        """config.json names no MTP layers that the weights lack, as `source` does that
        transformers has saved.
        """
        promised, prefixes = num_mtp_layers(source.config), tuple(hf_prefixes(source.config))
        if promised and not any(name.startswith(prefixes) for name in source.names):
            logger.warning(
                "%s: num_nextn_predict_layers is 0 in its config.json, as %s says %d and has no weights of "
                "such layers",
                self.final,
                source.path,
                promised,
            )
            config = read_config(self.path) | {"num_nextn_predict_layers": 0}
            (self.path / "config.json").write_text(json.dumps(config, indent=2))

    def _keep_untrained(self, source: HFCheckpoint) -> None:
        file_of = _file_of(self.path)
        written = set(file_of)
        table = CheckpointNames(source.config)
        left = [name for name in source.names if name not in written]
        missing = [name for name in left if table.why_kept(name) is None]
        if missing or (foreign := sorted(written - set(source.names))):
            what, names = ("lacks", missing) if missing else ("has, beside those of the source,", foreign)
            raise ValueError(
                f"{self.path} {what} {len(names)} tensors, {names[0]} for one, of {source.path}: did "
                "training begin with that model, and did all ranks write to one folder that they share?"
            )
        # A tied output layer would be that of the start.
        kept = [name for name in left if name != "lm_head.weight"]
        # MTP layers are trained all or none; where they are, so are the tensors that they
        # share with the model.
        half = [name for name in kept if table.is_of_mtp(name)]
        trained = any(map(table.is_of_mtp, written))
        if trained and half:
            raise ValueError(
                f"{self.path} has only a part of the layers that predict further tokens, and lacks {half[0]} "
                f"(one of {len(half)}); did all ranks write to one folder that they share?"
            )
        shared = table.shared_by_mtp if trained else {}

        def tensor(name: str) -> Tensor:
            if name not in shared:
                return source.tensor(name)
            with safe_open(self.path / file_of[shared[name]], framework="pt") as file:
                return file.get_tensor(shared[name])

        if kept:
            self.write("model-untrained", ((name, tensor(name)) for name in kept))


def write_weights(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a safetensors file that whoever may read the folder may read. Raises OSError if that fails."""
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors}
    try:
        save_file(whole, path, metadata={"format": "pt"})
        # safetensors makes files for their owner alone; what loads them may run as another user.
        path.chmod(path.parent.stat().st_mode & 0o666)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def copy_model_files(source: Path, target: Path) -> None:
    """Copy the config, tokenizer and code of a Hugging Face folder, without its weights."""
    for path in sorted(source.iterdir()):
        if (
            path.is_file()
            and path.suffix in _COPIED
            and path.name != MARKER
            and not path.name.endswith(".index.json")
        ):
            shutil.copyfile(path, target / path.name)
    templates = source / _TEMPLATES
    if templates.is_dir():
        (target / _TEMPLATES).mkdir(exist_ok=True)
        for path in templates.glob("*.jinja"):
            shutil.copyfile(path, target / _TEMPLATES / path.name)


def set_quantization(folder: Path, quantization: Mapping[str, Any]) -> None:
    """Let config.json say how the weights are quantised.

    Args:
        folder: with a config.json.
        quantization: its `quantization_config`.
    """
    config = read_config(folder) | {"quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors of a safetensors file: all of it but the length of its header (8
    bytes) and the header.
    """
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


def write_index(folder: Path) -> None:
    """Write model.safetensors.index.json for all safetensors files in a folder; total_size is
    the tensors' bytes.

    Raises:
        OSError: two files have a tensor of the same name.
    """
    weight_map = _file_of(folder)
    size = sum(map(tensor_bytes, folder.glob("*.safetensors")))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def check_ours(folder: Path) -> None:
    """FileExistsError for a folder with files in it that was not made here."""
    if any(folder.iterdir()) and not (folder / MARKER).is_file():
        raise FileExistsError(
            f"{folder} has no {MARKER}, so it was not made by this program; name another folder"
        )


def remove(folder: Path) -> None:
    """Remove a folder that was made here, or an empty one, because a run may be killed before it
    writes the marker.

    The marker is removed last, so that a folder half removed by a killed run can still be recognised.

    Raises:
        FileExistsError: the folder was not made here.
        OSError: it is a link, which may lead to anything.
    """
    refuse_link(folder)
    if not folder.exists():
        return
    check_ours(folder)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == MARKER):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.rmdir()


def _file_of(folder: Path) -> dict[str, str]:
    """Name of each tensor in a folder -> its file. Raises OSError for one that two files have."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
        if twice := found.keys() & names:
            raise OSError(f"{sorted(twice)} of {path.name} in {folder} are in another file too")
        found |= dict.fromkeys(names, path.name)
    return found


def _set_dtype(folder: Path) -> None:
    """Let config.json say what the weights are: those who load them go by it."""
    config, checkpoint = read_config(folder), HFCheckpoint(folder)
    embedding = next(name for name in checkpoint.names if name.endswith("embed_tokens.weight"))
    dtype = str(checkpoint.tensor(embedding).dtype).removeprefix("torch.")
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    said = config | dict.fromkeys(keys, dtype)
    if isinstance(text := config.get("text_config"), dict):  # where servers look for it
        said["text_config"] = text | {key: dtype for key in ("dtype", "torch_dtype") if key in text}
    if said != config:
        (folder / "config.json").write_text(json.dumps(said, indent=2))
