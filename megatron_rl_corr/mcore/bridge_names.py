"""Names and layouts from Megatron-Bridge, NVIDIA's mappings of weights from Megatron-core to Hugging Face.

A mapping of Bridge converts one parameter and talks to other ranks meanwhile. Here it talks to none: it is
told that it is rank 0 of R, and what it would scatter or gather it gets from this process. So it is a layout
as those of models/layouts.py; loading, pushes, exports, coverage and checksums are the same code for both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rl_corr.models.bridge import FLAG, check_family, installed_version
from megatron_rl_corr.models.layouts import Vocabulary
from megatron_rl_corr.models.names import NameTable, ParameterNames, ParameterRule
from megatron_rl_corr.models.providers import takes_bridge

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
"""Parameters with a row per token id, which Megatron pads; Bridge's mappings do not."""


def parameter_names(hf_config: Mapping[str, Any], choice: str, *, padded_vocab_size: int) -> ParameterNames:
    """The rules of a model's parameters.

    Args:
        hf_config, choice: as `takes_bridge`.
        padded_vocab_size: rows of Megatron's embedding.

    Raises:
        ValueError: as `takes_bridge`, `NameTable` and `BridgeNames`.
    """
    kind = BridgeNames if takes_bridge(hf_config, choice) else NameTable
    return kind(hf_config, padded_vocab_size=padded_vocab_size)


@cache
def _architectures() -> type:
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise ValueError(
            f"{FLAG}: Megatron-Bridge {installed_version()} can't be imported ({error}); install what it "
            "needs, Transformer Engine among it, or use a model of the table"
        ) from error
    return AutoBridge


def auto_bridge(hf_config: Mapping[str, Any]) -> Any:
    """Bridge's AutoBridge of a model; this imports Megatron-Bridge, which takes about 10 s.

    Args:
        hf_config: the model's config.json.

    Raises:
        ValueError: Bridge can't be imported, or it, or transformers, does not know the model.
    """
    check_family(hf_config)
    found = _architectures()
    from transformers import AutoConfig

    try:
        return found.from_hf_config(AutoConfig.for_model(**hf_config))
    except (ValueError, AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"config.json: Megatron-Bridge {installed_version()} can't take model_type "
            f"{hf_config.get('model_type')!r}: {str(error).strip().splitlines()[0]}; use another model, or "
            "a newer Megatron-Bridge"
        ) from error


class BridgeNames(ParameterNames):
    """As `NameTable`, from Megatron-Bridge's mappings.

    Args:
        hf_config: the model's config.json.
        padded_vocab_size: rows of Megatron's embedding.

    Raises:
        ValueError: as `auto_bridge`; or the checkpoint is quantised, or the vocabulary does not fit.
    """

    def __init__(self, hf_config: Mapping[str, Any], *, padded_vocab_size: int):
        super().__init__(hf_config, padded_vocab_size=padded_vocab_size)
        self._bridge = auto_bridge(hf_config)._model_bridge
        self._registry = self._bridge.mapping_registry()
        self._vocabulary = Vocabulary(hf_config["vocab_size"], padded_vocab_size)
        self._rules: dict[str, ParameterRule] = {}

    def check_model(self, *, num_layers: int, tied: bool, mtp_layers: int = 0) -> None:
        if mtp_layers:
            raise ValueError(
                f"--mtp-num-layers {mtp_layers}: layers that predict further tokens are not trained through "
                "Megatron-Bridge; leave it out"
            )
        super().check_model(num_layers=num_layers, tied=tied)

    def find(self, name: str, module: nn.Module | None = None) -> ParameterRule:
        if name not in self._rules:
            self._rules[name] = self._rule(name, module)
        return self._rules[name]

    def _rule(self, name: str, module: nn.Module | None) -> ParameterRule:
        if module is None:
            raise ValueError(
                f"{name}: Megatron-Bridge's mappings need Megatron's model, which is not here; export from "
                "a run, by --rollout-save-hf"
            )
        if name == OUTPUT and self.tied:
            return ParameterRule(self._vocabulary, self._names(EMBEDDING), False, is_copy=True)
        names = self._names(name)
        if name in (EMBEDDING, OUTPUT):
            return ParameterRule(self._vocabulary, names, False)
        mapping = self._registry.megatron_to_hf_lookup(name)
        return ParameterRule(BridgeLayout(mapping, self._bridge, module), names, mapping.is_expert)

    def _names(self, name: str) -> tuple[str, ...]:
        mapping = self._registry.megatron_to_hf_lookup(name)
        if mapping is None:
            raise ValueError(
                f"Megatron's parameter {name} has no mapping in Megatron-Bridge's "
                f"{type(self._bridge).__name__}; does the pretrain script build the model as Bridge does "
                "(mcore/bridge_model.py), and do the model flags describe it?"
            )
        if vars(mapping).get("is_grouped_export", False) or getattr(
            type(mapping), "is_grouped_export", False
        ):
            raise ValueError(
                f"{name}: one Hugging Face tensor stacks all experts of a layer in Megatron-Bridge's "
                f"{type(mapping).__name__}, of which loads and pushes are not proven; use another model"
            )
        return hf_names(mapping)


def hf_names(mapping: Any) -> tuple[str, ...]:
    """The Hugging Face tensors of one of Bridge's mappings, in their order."""
    names = mapping.hf_param
    return (names,) if isinstance(names, str) else tuple(names.values())


class _Group:
    """In the place of a process group of `ranks`: nothing can be exchanged in it."""

    def __init__(self, ranks: int, rank: int = 0):
        self._ranks, self._rank = ranks, rank

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return self._rank


@dataclass
class _Groups:
    """Bridge's collection of process groups: tensor-parallel ranks, dense and of experts, pipeline, experts.

    Whatever else a mapping would do with one of them fails, as none is a process group.
    """

    tp: _Group
    expt_tp: _Group
    pp: _Group
    ep: _Group


def _nothing(given: Any) -> Any:
    raise AssertionError("a mapping of Megatron-Bridge exchanges what it was not known to")


@dataclass(frozen=True)
class _Exchange:
    """What tensor-parallel ranks would exchange, by this process alone."""

    gather: Callable[[Tensor], list[Tensor]] = _nothing
    scatter: Callable[[list[Tensor]], Tensor] = _nothing
    broadcast: Callable[[Tensor], Tensor] = _nothing


class _GathersError(Exception):
    """Ends a conversion that would gather."""


class BridgeLayout:
    """One of Bridge's mappings as a layout (see models/layouts.py).

    Args:
        mapping: of one parameter, without wildcards.
        bridge: of the model; it may change a tensor before it is converted.
        module: Megatron's, which has the parameter.
    """

    def __init__(self, mapping: Any, bridge: Any, module: nn.Module):
        self._mapping, self._bridge, self._module = mapping, bridge, module
        self.replicated = not self._gathers()

    def _gathers(self) -> bool:
        """True if ranks have parts of the parameter: Bridge gathers those, and nothing else.

        Raises:
            ValueError: it gathers anything but the shard.
        """
        # under the name of the first expert, whose number the module has on every rank
        name = re.sub(r"\d+$", "0", self._mapping.megatron_param.rpartition(".")[2])
        shard = torch.empty_like(getattr(self._module, name), device="meta")

        def gather(piece: Tensor) -> list[Tensor]:
            if piece is not shard:
                raise ValueError(
                    f"{self._mapping.megatron_param}: Megatron-Bridge's {type(self._mapping).__name__} "
                    "gathers pieces of it, of which loads and pushes are not proven; use another model"
                )
            raise _GathersError

        try:
            self._converted(shard, 2, gather)
        except _GathersError:
            return True
        return False

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """As `TensorLayout.merge`."""
        converted = self._converted(
            shards[0], 1 if self.replicated else len(shards), lambda piece: list(shards)
        )
        return [converted[name] for name in hf_names(self._mapping)]

    def _converted(
        self, shard: Tensor, size: int, gather: Callable[[Tensor], list[Tensor]]
    ) -> dict[str, Tensor]:
        return self._alone(size, _Exchange(gather=gather)).megatron_to_hf(shard, self._module)

    def split(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """As `TensorLayout.split`."""
        rank, size = (0, 1) if self.replicated else (rank, size)
        given = dict(zip(hf_names(self._mapping), tensors, strict=True))
        weights = self._bridge.maybe_modify_loaded_hf_weight(self._mapping.hf_param, given)
        sent: list[Tensor] = []
        exchange = _Exchange(
            scatter=lambda splits: splits[rank], broadcast=lambda one: sent.append(one) or one
        )
        found = self._alone(size, exchange).hf_to_megatron(weights, self._module)
        if not sent:
            return found
        # A mapping that broadcasts cuts by itself: on this rank, from what the first one has sent.
        received = iter(sent)
        exchange = _Exchange(broadcast=lambda one: next(received))
        return self._alone(size, exchange, rank).hf_to_megatron(weights, self._module)

    def _alone(self, size: int, exchange: _Exchange, rank: int = 0) -> Any:
        """The mapping as of one of `size` ranks, which gets from `exchange` what it would exchange."""
        group, alone = _Group(size, rank), _Group(1)
        return _copied(self._mapping, _Groups(group, group, alone, alone), exchange)


def _copied(mapping: Any, groups: _Groups, exchange: _Exchange) -> Any:
    """A copy of a mapping, and of those in it, that exchanges nothing."""
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    found = copy(mapping)
    for name, child in vars(mapping).items():
        if isinstance(child, MegatronParamMapping):
            setattr(found, name, _copied(child, groups, exchange))
    found.__class__ = _alone_class(type(mapping))
    found.groups_alone, found.exchange = groups, exchange
    found.set_process_groups_from_pg_collection(groups)
    return found


@cache
def _alone_class(kind: type) -> type:
    """A subclass of a class of Bridge's mappings, with Bridge's names for what they exchange."""

    class Alone(kind):
        def gather_from_tp_ranks(self, tensor):
            return [tensor] if self.tp_size == 1 else self.exchange.gather(tensor)

        def scatter_to_tp_ranks(self, splits, output_shape, dtype, device, src_rank=0):
            return splits[0] if self.tp_size == 1 else self.exchange.scatter(splits)

        def broadcast_tensor_to_tp_ranks(self, tensor, src_rank=0):
            return tensor if self.tp_size == 1 else self.exchange.broadcast(tensor)

        def _get_or_create_mapping(self, parallelism_type):  # AutoMapping's, once it knows the module
            made = super()._get_or_create_mapping(parallelism_type)
            return _copied(made, self.groups_alone, self.exchange)

    Alone.__name__ = kind.__name__
    return Alone
