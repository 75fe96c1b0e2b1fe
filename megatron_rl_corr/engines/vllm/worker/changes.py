"""Puts changes of weights into a running vLLM model.

A kernel may want its weights packed, and what is packed can't be changed in places. So for the time of such
an update each layer has its parameters as they were loaded, with the loaders that they had then: its own
memory where they lie there so, else the copy that updates have kept. Changes go into these. Then each layer
of which something came is processed for its kernels as in an update of everything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import layerwise

from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.engines.vllm.worker.loading import Kept, LayerwiseUpdate
from megatron_rl_corr.engines.weight_changes import ChangesReceiver


class ChangesUpdate(LayerwiseUpdate):
    """One update of what changed alone, from its first bucket on.

    Args:
        model, model_config, device, with_checksums: as of `LayerwiseUpdate`.
        kept: of the updates before; the changes go into its tensors too.
        receiver: of this model's changes.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: object,
        device: torch.device,
        *,
        with_checksums: bool,
        kept: Kept,
        receiver: ChangesReceiver,
    ):
        super().__init__(model, model_config, device, with_checksums=with_checksums)
        self._receiver = receiver
        self._changed: dict[nn.Module, None] = {}
        """In the order in which they came."""
        self._unloaded: dict[nn.Module, dict[str, Tensor]] = {}
        """Name of each of a layer's tensors that was replaced -> the one without memory, for a new one."""
        self._loaders: list[tuple[Tensor, Callable[..., object]]] = []
        for layer, path in self._names.items():
            self._unpack(layer, path, kept)

    def load(self, weights: Sequence[NamedTensor]) -> None:
        """Put a bucket of changes in. Raises as `ChangesReceiver.load`, and ValueError for a layer that
        was not kept.
        """
        self._receiver.load(weights, self._model.load_weights)

    def finish(self) -> dict[str, str]:
        """Process what was changed. Returns the checksum of each of its parameters."""
        self._give_loaders_back()
        with self._watched():
            for layer in self._changed:
                self._rebuild(layer)
        for module in self._model.modules():
            info = layerwise.get_layerwise_info(module)
            if info.can_load():
                info.load_numel_total = 0  # nothing was expected of it, so that nothing is missing
        return super().finish()

    def roll_back(self) -> None:
        self._give_loaders_back()
        super().roll_back()

    def _unpack(self, layer: nn.Module, path: str, kept: Kept) -> None:
        parameters, buffers = layerwise.get_layerwise_info(layer).kernel_tensors
        replaced, unknown = {}, []
        for name, tensor in layerwise.get_layer_tensors(layer).items():
            full = f"{path}.{name}"
            if tensor.is_meta and (name in buffers or full in kept):  # others are loaded where they lie
                copy = kept.get(full)
                loaded = ((parameters | buffers)[name] if copy is None else copy).data.detach()
                loaded.__class__, loaded.__dict__ = tensor.__class__, tensor.__dict__.copy()
                setattr(layer, name, loaded)
                replaced[name], tensor = tensor, loaded
            elif tensor.is_meta:
                unknown.append(full)
            self._note_changes(layer, tensor, unknown)
        self._unloaded[layer] = replaced

    def _note_changes(self, layer: nn.Module, tensor: Tensor, unknown: list[str]) -> None:
        """Have the tensor's loader tell that its layer changes, or refuse it for what is `unknown` then."""
        loader = layerwise._get_original_loader(tensor)
        self._loaders.append((tensor, loader))

        @functools.wraps(loader)
        def noted(*args: object, **kwargs: object) -> object:
            if unknown:
                raise ValueError(f"{unknown[0]} was not kept as it was loaded; send everything first")
            self.touched = True
            self._changed[layer] = None
            return loader(*args, **kwargs)

        tensor.weight_loader = noted

    def _give_loaders_back(self) -> None:
        for tensor, loader in reversed(self._loaders):  # two layers may have the same tensor
            tensor.weight_loader = loader
        self._loaders.clear()

    def _rebuild(self, layer: nn.Module) -> None:
        """Process a layer for its kernels, in new memory, from a copy of what was loaded."""
        info = layerwise.get_layerwise_info(layer)
        loaded = {name: getattr(layer, name) for name in self._unloaded[layer]}
        for name, tensor in self._unloaded[layer].items():
            setattr(layer, name, tensor)
        layerwise.materialize_layer(layer, info)
        for name, whole in loaded.items():
            getattr(layer, name).data.copy_(whole.data)
        layerwise._layerwise_process(layer, info)
