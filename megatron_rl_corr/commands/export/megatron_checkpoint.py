"""Reads the weights of a Megatron checkpoint without Megatron, and exports them as a Hugging Face folder.

A checkpoint of --ckpt-format torch_dist (Megatron's default) is one of torch.distributed.checkpoint:
a tensor for each kind of parameter, stacked over layers and experts, whatever the layout of ranks
was that saved it.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.hf_folder import FILE_BYTES, UnfinishedFolder
from megatron_rl_corr.models.hybrid import gpt_name
from megatron_rl_corr.models.layouts import RowsOrWhole
from megatron_rl_corr.models.names import NameTable, ParameterRule
from megatron_rl_corr.weight_sync.export import buckets, whole_stacks

TRACKER = "latest_checkpointed_iteration.txt"
_STACKED = re.compile(r"decoder\.layers\.(?!\d)")
_EXPERT = re.compile(r"\.mlp\.experts\.experts\.(linear_fc[12]\.(?:weight|bias))$")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_SECTION = re.compile(r"(?P<name>.*\.(in_proj|conv1d)\.weight)\.(?P<section>query|key|value|z|beta|alpha)")
_SECTIONS = ("query", "key", "value", "z", "beta", "alpha")
"""A gated delta net's parameters are saved in sections, which stand in this order."""
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")


class MegatronCheckpoint:
    """The weights in one iteration's folder, by Megatron's names of a model on one rank; each is
    read when asked for.

    Args:
        folder: such as checkpoints/iter_0000040.

    Raises:
        ValueError: it is no checkpoint of --ckpt-format torch_dist, or a damaged one.
    """

    def __init__(self, folder: Path):
        if not (folder / ".metadata").is_file():
            raise ValueError(
                f"{folder} is no Megatron checkpoint of --ckpt-format torch_dist, as it has no file "
                ".metadata; name a folder like checkpoints/iter_0000040, or save the model in that format"
            )
        self.folder, self._reader = folder, FileSystemReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except (pickle.UnpicklingError, EOFError) as error:
            raise ValueError(f"{folder} is damaged: .metadata cannot be read: {error}") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and not key.startswith(("optimizer.", "chained_"))
        }
        self._places: dict[str, list[Place]] = {}
        for key in sorted(self._stored, key=_order):
            for name, place in _names(key, self._stored[key]):
                self._places.setdefault(name, []).append(place)

    @property
    def names(self) -> list[str]:
        """The names of all parameters, with the numbers that layer and expert have in the whole model."""
        return list(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(stored.size.numel() * stored.properties.dtype.itemsize for stored in self._stored.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """The parameter's, as one rank would hold it."""
        shapes = [self._stored[key].size[len(index) :] for key, index in self._places[name]]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def tensor(self, name: str) -> Tensor:
        """One parameter, as one rank would hold it. Reads that alone."""
        sections = [self._section(name, *place) for place in self._places[name]]
        return sections[0] if len(sections) == 1 else torch.cat(sections)

    def _section(self, name: str, key: str, index: tuple[int, ...]) -> Tensor:
        stored = self._stored[key]
        shape = tuple(stored.size[len(index) :])
        found = torch.empty((1,) * len(index) + shape, dtype=stored.properties.dtype)
        chunk = ChunkStorageMetadata(torch.Size([*index, *[0] * len(shape)]), found.shape)
        items = create_read_items_for_chunk_list(key, stored, [chunk])
        if sum(item.lengths.numel() for item in items) != found.numel():
            raise ValueError(f"{self.folder} is damaged: it has not all of {name}")
        try:
            self._reader.read_data(LoadPlan(items), _Into(found)).wait()
        except (RuntimeError, EOFError, AssertionError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.folder} is damaged: {name} cannot be read: {error}") from error
        return found.view(shape)


class _Into(LoadPlanner):
    """Reads into one tensor."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    def resolve_tensor(self, read_item):
        found = self._tensor
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(dim, start, length)
        return found

    def commit_tensor(self, read_item, tensor):
        pass

    def _unused(self, *args, **kwargs):
        raise NotImplementedError

    set_up_planner = create_local_plan = create_global_plan = finish_plan = load_bytes = _unused


Place = tuple[str, tuple[int, ...]]
"""A key of the checkpoint, and a place in its stacked tensor."""


def _order(key: str) -> int:
    match = _SECTION.fullmatch(key)
    return _SECTIONS.index(match["section"]) if match else 0


def _names(key: str, stored: TensorStorageMetadata) -> Iterator[tuple[str, Place]]:
    """(the parameter's name, its place) of each parameter that a key holds, or holds a section of."""
    stacks = 1 if _STACKED.match(key) else 0
    expert = _EXPERT.search(key)
    section = _SECTION.fullmatch(key)
    name = _EXPERT.sub(r".mlp.experts.\1", section["name"] if section else key)
    for layer in range(stored.size[0]) if stacks else [None]:
        of_layer = name if layer is None else name.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)
        before = () if layer is None else (layer,)
        if expert is None:
            yield of_layer, (key, before)
        else:
            for number in range(stored.size[stacks]):
                yield f"{of_layer}{number}", (key, (*before, number))


def newest(folder: Path) -> Path:
    """The folder of the newest checkpoint in what --save named; any other folder itself.

    Raises:
        ValueError: that checkpoint is not there.
    """
    tracker = folder / TRACKER
    if not tracker.is_file():
        return folder
    named = tracker.read_text().strip()
    found = folder / (f"iter_{int(named):07d}" if named.isdigit() else named)
    if not found.is_dir():
        there = ", ".join(sorted(path.name for path in folder.glob("iter_*"))) or "none"
        raise ValueError(
            f"{tracker} names {named}, which is not there; there are {there}: name one of these folders"
        )
    return found


def export_checkpoint(
    checkpoint: MegatronCheckpoint, source: HFCheckpoint, out: Path, progress: Callable[[int, int], None]
) -> None:
    """Write a Hugging Face folder with a checkpoint's weights.

    Args:
        checkpoint: of Megatron.
        source: the model that training began with: its config, tokenizer and what is not trained.
        out: a new folder, or one that was made here, which is replaced.
        progress: progress(bytes written, bytes of all weights), after each file.

    Raises:
        ValueError: the two are not of one model, the checkpoint is damaged, or `out` holds one of the two.
        OSError: `out` can't be written, or is a folder that was not made here.
    """
    for read in (checkpoint.folder, source.path):
        if read.resolve().is_relative_to(out.resolve()):
            raise ValueError(f"{out} would replace {read}, which is read; name another folder")
    parameters = _parameters(checkpoint, source)
    folder = UnfinishedFolder(out, {"exported_from": str(checkpoint.folder)})
    folder.begin()
    written = 0
    units = ([named] for _, named in whole_stacks(_tensors(checkpoint, source, parameters)))
    for number, bucket in enumerate(buckets(units, FILE_BYTES)):
        folder.write(f"model-{number:05d}", bucket)
        written += sum(tensor.nbytes for _, tensor in bucket)
        progress(written, checkpoint.nbytes)
    folder.finish(source)


def _parameters(checkpoint: MegatronCheckpoint, source: HFCheckpoint) -> dict[str, ParameterRule]:
    """The rule of each of the checkpoint's parameters. Raises ValueError if the two are not of one model."""
    names = checkpoint.names
    if "embedding.word_embeddings.weight" not in names:
        raise ValueError(
            f"{checkpoint.folder} has no embedding.word_embeddings.weight: it is not of a GPTModel"
        )
    table = NameTable(
        source.config, padded_vocab_size=checkpoint.shape("embedding.word_embeddings.weight")[0]
    )
    # HybridModel has two layers for each of GPTModel's.
    is_hybrid = "decoder.final_norm.weight" in names
    known = {name: gpt_name(name) if is_hybrid else name for name in names}
    layers = 1 + max(int(match[1]) for name in known.values() if (match := _LAYER.match(name)))
    mtp_layers = len({match[1] for name in names if (match := _MTP_LAYER.match(name))})
    table.check_model(num_layers=layers, tied="output_layer.weight" not in names, mtp_layers=mtp_layers)
    return {name: table.find(gpt) for name, gpt in known.items()}


def _tensors(
    checkpoint: MegatronCheckpoint, source: HFCheckpoint, parameters: dict[str, ParameterRule]
) -> Iterator[tuple[ParameterRule, NamedTensor]]:
    for name, rule in parameters.items():
        if rule.is_copy:
            continue
        tensor = checkpoint.tensor(name)
        layout = rule.layout.resolve(tensor) if isinstance(rule.layout, RowsOrWhole) else rule.layout
        try:
            unit = list(zip(rule.hf_names, layout.merge([tensor]), strict=True))
        except RuntimeError as error:
            raise ValueError(
                f"{name} of {checkpoint.folder} is not of the model {source.path}: {error}"
            ) from error
        stack = () if rule.row is None else (rule.rows,)
        for hf_name, merged in unit:
            # Models of one family may differ in their sizes alone.
            if (shape := source.shape(hf_name)) != (*stack, *merged.shape):
                raise ValueError(
                    f"{checkpoint.folder} has {hf_name} of shape {(*stack, *merged.shape)} and {source.path} "
                    f"of {shape}: did training begin with that model?"
                )
            yield rule, (hf_name, merged)
