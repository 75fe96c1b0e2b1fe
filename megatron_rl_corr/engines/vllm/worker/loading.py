"""Puts new weights into a running vLLM model, layer after layer, and hashes each parameter
before it is packed.

vLLM's layerwise reload: at the start every layer's parameters are put aside and replaced by ones
without memory; a
layer that is complete is loaded, packed for its kernels, and copied into the memory of the old one. What
is added here: a checksum between loading and packing, the packing of experts and of tied output layers on
the CPU, and a way back for layers that are not complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import vllm
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

from megatron_rl_corr.engines.checksums import checksum
from megatron_rl_corr.engines.vllm.memory_checksums import shows_order

Kept = dict[str, Tensor | None]
"""Name of each parameter that an update has loaded -> as it was loaded, in the host's memory; None: so it
lies in the model.
"""

PREPACKED_EXPERTS = ("0.32.", "0.33.")
"""Starts of the versions whose experts on the CPU are packed at the first load only, and are
packed here at others.
"""


def experts_problem(model: nn.Module, device: torch.device) -> str | None:
    """Why this model's experts can't be updated in this version; None: they can, or it has none."""
    if device.type != "cpu" or not any(_has_experts(module) for module in model.modules()):
        return None
    if vllm.__version__.startswith(PREPACKED_EXPERTS):
        return None
    return (
        f"on the CPU vLLM packs experts in a way of each version, and updates of them are proven with "
        f"{', '.join(start + 'x' for start in PREPACKED_EXPERTS)} only, not with {vllm.__version__}"
    )


class LayerwiseUpdate:
    """One update of a model's weights, from its first tensor on.

    Args:
        model: vLLM's.
        model_config: vLLM's.
        device: of the model.
        with_checksums: hash each parameter.
        kept: is told how each parameter was loaded; None: nothing is kept.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: object,
        device: torch.device,
        *,
        with_checksums: bool,
        kept: Kept | None = None,
    ):
        self._model, self._config, self._device, self._hashes = model, model_config, device, with_checksums
        self._kept = kept
        self._names = {module: name for name, module in model.named_modules()}
        self._checksums: dict[str, str] = {}
        self._processed: set[nn.Module] = set()
        self.touched = False
        """A layer has new weights."""
        layerwise.initialize_layerwise_reload(model)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors; a layer may come in several calls."""
        with self._watched():
            self._model.load_weights(weights)

    def finish(self) -> dict[str, str]:
        """Process what is left. Returns the checksum of each parameter that was loaded."""
        with self._watched():
            self._finalize()
        for name in [name for name in self._checksums if name.rpartition(".")[2] in SKIP_LOAD_TENSORS]:
            # loaded by itself, maybe after its layer was complete
            parameter = self._model.get_parameter(name)
            self._checksums[name] = checksum(parameter.data, self._device.type) or ""
        return self._checksums

    def roll_back(self) -> None:
        """Give every layer that is not complete its old parameters back; the complete ones
        keep the new ones.
        """
        for module in self._model.modules():
            info = layerwise.get_layerwise_info(module)
            info.load_numel = 0
            info.loaded_weights.clear()
        self._finalize()

    def _finalize(self) -> None:
        layerwise.finalize_layerwise_reload(self._model, self._config)
        if self._device.type != "cpu":
            return
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        # An output layer that is tied to the embedding shares its memory, but on the CPU computes
        # with a packed copy.
        for module in self._model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod) and module not in self._processed:
                method.process_weights_after_loading(module)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        original = layerwise._layerwise_process
        layerwise._layerwise_process = lambda layer, info: self._process(original, layer, info)
        try:
            yield
        finally:
            layerwise._layerwise_process = original

    def _process(self, original, layer: nn.Module, info: object) -> None:
        """vLLM's processing of a complete layer; its packing also hashes, and packs experts on the CPU."""
        self.touched = True
        self._processed.add(layer)
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, layerwise.QuantizeMethodBase):
            original(layer, info)
            self._hash(layer)
            self._keep(layer, {})
            return
        pack, loaded = method.process_weights_after_loading, {}

        def hash_and_pack(packed: nn.Module) -> None:
            self._hash(packed)
            loaded.update(self._as_loaded(packed))
            pack(packed)
            if self._device.type == "cpu" and _has_experts(packed):
                packed.quant_method.moe_kernel.fused_experts.process_weights_after_loading(packed)

        # of this object alone, until it is deleted below
        method.process_weights_after_loading = hash_and_pack
        try:
            original(layer, info)
        finally:
            del method.process_weights_after_loading
        self._keep(layer, loaded)

    def _hash(self, layer: nn.Module) -> None:
        if not self._hashes:
            return
        for full, parameter in self._parameters(layer):
            self._checksums[full] = checksum(parameter.data, self._device.type) or ""

    def _as_loaded(self, layer: nn.Module) -> dict[str, Tensor]:
        """A layer's parameters in the host's memory, but for those that are known not to be packed."""
        if self._kept is None:
            return {}
        return {
            full: torch.empty_like(one.data, device="cpu").copy_(one.data)
            for full, one in self._parameters(layer)
            if self._kept.get(full, one) is not None
        }

    def _keep(self, layer: nn.Module, loaded: dict[str, Tensor]) -> None:
        """Keep those of `_as_loaded` that lie otherwise in memory now."""
        if self._kept is None:
            return
        for full, one in self._parameters(layer):
            copy = loaded.get(full)
            self._kept[full] = None if copy is None or _lies_so(one.data, copy) else copy

    def _parameters(self, layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                yield f"{self._names[layer]}.{name}", parameter


def _lies_so(memory: Tensor, loaded: Tensor) -> bool:
    """A parameter has been packed into itself, as far as its numbers show that."""
    same = (memory.shape, memory.dtype) == (loaded.shape, loaded.dtype) and torch.equal(memory.cpu(), loaded)
    return same and shows_order(loaded)


def _has_experts(layer: nn.Module) -> bool:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    return isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)
