"""Names and layouts from Megatron-Bridge, NVIDIA's package of mappings between Megatron-core and Hugging Face.

Bridge converts one parameter at a time, and talks to the other ranks meanwhile. Here its mappings convert
without a collective: each believes that it is rank 0 of R, and what it would scatter or gather is handed over
by this process. So they are layouts as those of models/layouts.py, and loading, pushes, exports, coverage and
checksums are the same code for both.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl_corr.models.layouts import Vocabulary
from megatron_rl_corr.models.names import ParameterNames, ParameterRule

if TYPE_CHECKING:
    from torch import Tensor, nn

DISTRIBUTION = "megatron-bridge"
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters of a row per token id, which Megatron pads and Bridge's mappings do not."""


def installed_version() -> str | None:
    """Megatron-Bridge's version, or None where it is not installed; nothing of it is imported."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


class BridgeNames(ParameterNames):
    """As NameTable, from Megatron-Bridge's mappings of one model.

    Args:
        hf_config: the model's config.json.
        padded_vocab_size: rows of Megatron's embedding.

    Raises:
        ValueError: Bridge is not installed, can't be imported or does not know the architecture; or the
            checkpoint is quantised, or the vocabulary does not fit.
    """

    def __init__(self, hf_config: Mapping[str, Any], *, padded_vocab_size: int):
        super().__init__(hf_config, padded_vocab_size=padded_vocab_size)
        self._bridge = model_bridge(hf_config)
        self._registry = self._bridge.mapping_registry()
        self._vocabulary = Vocabulary(hf_config["vocab_size"], padded_vocab_size)
        self._rules: dict[str, ParameterRule] = {}

    def find(self, name: str, module: nn.Module | None = None) -> ParameterRule:
        """As `NameTable.find`; module: the one that has the parameter, which a mapping asks for its kind."""
        if name not in self._rules:
            self._rules[name] = self._rule(name, module)
        return self._rules[name]

    def _rule(self, name: str, module: nn.Module) -> ParameterRule:
        mapping = self._registry.megatron_to_hf_lookup(name)
        if mapping is None:
            raise ValueError(
                f"Megatron's parameter {name} does not exist in Megatron-Bridge's mappings of this model "
                f"({type(self._bridge).__name__}); do the model flags describe that model, and does its "
                "pretrain script build it as Megatron-Bridge does?"
            )
        names = mapping.hf_param if isinstance(mapping.hf_param, str) else tuple(mapping.hf_param.values())
        names = (names,) if isinstance(names, str) else names
        if name in VOCABULARY:
            tied = name == VOCABULARY[1] and self.tied
            if tied:
                embedding = self._registry.megatron_to_hf_lookup(VOCABULARY[0])
                names = (embedding.hf_param,)
            return ParameterRule(self._vocabulary, names, False, is_copy=tied)
        if getattr(mapping, "is_grouped_export", False):
            raise ValueError("grouped")
        layout = BridgeLayout(mapping, self._bridge, module)
        return ParameterRule(layout, names, mapping.is_expert)


class _Group:
    """Stands for a process group of which this process is rank 0; nothing can be exchanged in it."""

    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@dataclass
class _Groups:
    """Bridge's collection of process groups, for R tensor-parallel ranks and no others."""

    tp: _Group
    expt_tp: _Group
    pp: _Group
    ep: _Group


class _GathersError(Exception):
    """Ends a conversion that would gather."""


class BridgeLayout:
    """One of Bridge's mappings as a layout (see models/layouts.py).

    Args:
        mapping: for one parameter, without wildcards.
        bridge: of the model; it may change tensors before they are converted.
        module: the one that has the parameter.
    """

    def __init__(self, mapping: Any, bridge: Any, module: nn.Module):
        self._mapping, self._bridge, self._module = mapping, bridge, module
        self._names = (
            {"": mapping.hf_param} if isinstance(mapping.hf_param, str) else dict(mapping.hf_param)
        )
        self.replicated = not self._gathers()

    def _gathers(self) -> bool:
        """Whether ranks have parts of the parameter: Bridge gathers those, and nothing else."""
        import torch

        name = re.sub(r"\d+$", "0", self._mapping.megatron_param.rpartition(".")[2])
        shard = torch.empty_like(getattr(self._module, name), device="meta")

        def gather(piece: Tensor) -> list[Tensor]:
            raise _GathersError

        try:
            self._converted(shard, 2, gather)
        except _GathersError:
            return True
        return False

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        size = 1 if self.replicated else len(shards)
        calls = iter(range(1_000))
        pieces: dict[int, list[Tensor]] = {}

        def gather(piece):
            number = next(calls)
            if piece.data_ptr() == shards[0].data_ptr() and piece.shape == shards[0].shape:
                return list(shards)
            # Of a part of the shard each rank has its own, which its own conversion shows.
            for rank in range(1, size):
                if rank not in pieces:
                    pieces[rank] = []
                    self._converted(shards[rank], size, lambda p, r=rank: pieces[r].append(p) or [p] * size)
            return [piece, *(pieces[rank][number] for rank in range(1, size))]

        converted = self._converted(shards[0], size, gather)
        return [converted[name] for name in self._names.values()]

    def _converted(self, shard: Tensor, size: int, gather: Callable) -> dict[str, Tensor]:
        mapping = self._alone(size, gather=gather)
        return mapping.megatron_to_hf(shard, self._module)

    def split(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        size = 1 if self.replicated else size
        rank = 0 if self.replicated else rank
        by_name = dict(zip(self._names.values(), tensors, strict=True))
        weights = self._bridge.maybe_modify_loaded_hf_weight(self._mapping.hf_param, by_name)
        mapping = self._alone(size, scatter=lambda splits: splits[rank])
        return mapping.hf_to_megatron(weights, self._module)

    def _alone(self, size: int, *, gather: Callable | None = None, scatter: Callable | None = None) -> Any:
        """The mapping as of rank 0 of `size`, which exchanges nothing."""
        group, alone = _Group(size), _Group(1)
        return _handing_over(self._mapping, _Groups(group, group, alone, alone), gather, scatter)


def _handing_over(mapping: Any, groups: _Groups, gather: Callable | None, scatter: Callable | None) -> Any:
    """A copy of a mapping, and of those in it, that hands over what it would exchange."""
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    found = copy(mapping)
    for name, child in vars(mapping).items():
        if isinstance(child, MegatronParamMapping):
            setattr(found, name, _handing_over(child, groups, gather, scatter))
    found.__class__ = _alone(type(mapping))
    found.tp_groups, found.gather, found.scatter = groups, gather, scatter
    found.set_process_groups_from_pg_collection(groups)
    return found


@cache
def _alone(kind: type) -> type:
    """A subclass of a class of mappings that exchanges nothing."""

    class Alone(kind):
        def gather_from_tp_ranks(self, tensor):
            return [tensor] if self.tp_size == 1 else self.gather(tensor)

        def scatter_to_tp_ranks(self, splits, output_shape, dtype, device, src_rank=0):
            return splits[0] if self.tp_size == 1 else self.scatter(splits)

        def _get_or_create_mapping(self, parallelism_type):  # AutoMapping's, once it knows the module
            made = super()._get_or_create_mapping(parallelism_type)
            return _handing_over(made, self.tp_groups, self.gather, self.scatter)

    Alone.__name__ = kind.__name__
    return Alone


def auto_bridge(config: Mapping[str, Any]):
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    hf = AutoConfig.for_model(**{k: v for k, v in config.items()})
    return AutoBridge.from_hf_config(hf)


def model_bridge(config):
    return auto_bridge(config)._model_bridge
