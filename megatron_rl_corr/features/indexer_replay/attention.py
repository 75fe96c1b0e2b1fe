"""Makes Megatron's sparse attention (DSA) take given keys.

T tokens of this replica's batch; a microbatch has [C, b] of them, b sequences of C tokens, and a rank chooses
the keys of all, or of C / tp under sequence parallelism. L layers of this rank, K keys of a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_rl_corr.engines.routes import has_routes


@dataclass(eq=False)
class ReplayedLayer:
    """One layer's attention and what it replays."""

    number: int
    """In the whole model, from 0."""
    given: Tensor | None = None
    """[C, b, K], of the next pass."""
    now: Tensor | None = None
    """The same, of the pass that runs."""
    compares: bool = False
    """The pass that runs is one whose choices are compared."""
    to_recompute: deque[Tensor] = field(default_factory=deque)
    """Those of passes whose activations are computed again, in their order."""


class ReplayedAttention:
    """The sparse attention of all layers of this rank."""

    def __init__(self, model: list[nn.Module], tp_group: ProcessGroup):
        """Take over the attention of the model's chunks. tp_group: the tensor-parallel ranks."""
        from megatron.core.transformer.experimental_attention_variant import dsa

        self._dsa, self._tp = dsa, tp_group
        self._layers: dict[nn.Module, list[ReplayedLayer]] = {}
        self._phase, self._given = "", None
        self._running: ReplayedLayer | None = None
        self.compared_phase = "score"
        """The phase whose choices are compared: score or train."""
        self.shared = torch.zeros(2, dtype=torch.float64)
        """Keys that both chose, and keys given, since they were last set to 0."""
        for chunk in model:
            self._layers[chunk] = []
            for module in (one for one in chunk.modules() if isinstance(one, dsa.DSAttention)):
                layer = ReplayedLayer(module.layer_number - 1)
                self._layers[chunk].append(layer)
                module.register_forward_pre_hook(lambda *_, layer=layer: self._begin(layer))
                module.register_forward_hook(lambda *_: self._end())
        self.layers = tuple(layer.number for layers in self._layers.values() for layer in layers)
        """This rank's layers, by their number in the whole model, in the order of its chunks."""

    @contextmanager
    def passes(self, phase: str, given: Tensor | None) -> Iterator[None]:
        """Context of passes that take the given keys.

        Args:
            phase: score, train or measure; in train a pass for which nothing was set recomputes an earlier
                one.
            given: [T + 1, L, K]; rows without keys, as the last one, take Megatron's own.
        """
        own_choice = self._dsa.fused_qk_topk_naive

        def choose(q: Tensor, k: Tensor, *args, **settings) -> tuple[Tensor, Tensor]:
            scores, own = own_choice(q, k, *args, **settings)
            return scores, self._keys(own, k.size(0))

        self._phase, self._given, self._dsa.fused_qk_topk_naive = phase, given, choose
        try:
            yield
        finally:
            self._phase, self._given, self._running = "", None, None
            self._dsa.fused_qk_topk_naive = own_choice
            for layer in (one for layers in self._layers.values() for one in layers):
                layer.given = layer.now = None
                layer.to_recompute.clear()

    def before_forward(self, chunk: nn.Module, places: Tensor) -> None:
        """Set the keys of a chunk's pass over one microbatch.

        Args:
            chunk: of the model.
            places: [C, b] int64, where its tokens stand in the batch; T for one that is no token.
        """
        if self._given is not None:
            for layer in self._layers[chunk]:
                layer.given = self._given[:, self.layers.index(layer.number)][places]

    def _begin(self, layer: ReplayedLayer) -> None:
        self._running, layer.now, layer.given = layer, layer.given, None
        layer.compares = layer.now is not None and self._phase == self.compared_phase
        if self._phase != "train":
            return
        if layer.now is None and not layer.to_recompute:
            raise RuntimeError(
                f"the attention of layer {layer.number + 1} ran without keys to replay: a recomputation that "
                "megatron_rl_corr does not know; train without it, or without --rollout-indexer-replay"
            )
        if layer.now is None:
            # A microbatch's backward passes come in the order of its forward's.
            layer.now = layer.to_recompute.popleft()
        elif not torch.is_grad_enabled():
            layer.to_recompute.append(layer.now)

    def _end(self) -> None:
        if self._running is not None:
            self._running.now = self._running = None

    def _keys(self, own: Tensor, keys: int) -> Tensor:
        """[b, rows, K] int64: the given keys where there are some, else Megatron's own choice."""
        layer = self._running
        if layer is None or layer.now is None or own.shape[-1] < layer.now.shape[-1]:
            return own  # the last: a sequence of fewer than K tokens
        given = layer.now.transpose(0, 1)
        if own.shape[1] < given.shape[1]:
            given = given.chunk(self._tp.size(), dim=1)[self._tp.rank()]
        known = has_routes(given, keys)[..., None]
        given = given.long().where(known, 0)
        if layer.compares:
            taken = torch.zeros(*own.shape[:2], keys, dtype=torch.bool, device=own.device)
            shared = taken.scatter_(2, given, True).gather(2, own.clamp(min=0)) & (own >= 0) & known
            counted = torch.stack([shared.sum(), known.sum() * given.shape[-1]])
            self.shared = self.shared.to(own.device) + counted
        return torch.where(known, given, own)
