"""A vLLM worker extension with faults that a test plants: what a server does wrong in an update
and tells nobody.
"""

from vllm.v1.core.block_pool import BlockPool

from megatron_rl_corr.engines.vllm.worker import Extension, extension
from megatron_rl_corr.engines.vllm.worker.loading import LayerwiseUpdate

EXPERTS = "model.layers.1.mlp.experts."
FAULTS = (
    "drops",
    "exchanges experts",
    "keeps old weights",
    "keeps cached prefixes",
    "other code",
    "older code",
)


class Planted(Extension):
    """`rl_test_plant` plants one fault and takes the one before away."""

    def rl_test_plant(self, fault=None, names=()):
        """Args: fault: of FAULTS; None: none. names: of the tensors that are dropped; (): all of them."""
        assert fault is None or fault in FAULTS
        transfer, self._names = self._rl_corr_transfer(), set(names)
        for planted, name in (
            (transfer, "load"),
            (transfer, "finish_weight_update"),
            (self, "rl_corr_begin"),
        ):
            planted.__dict__.pop(name, None)
        extension.CODE = extension.worker_code()
        if hasattr(BlockPool, "kept"):
            BlockPool.reset_prefix_cache = BlockPool.kept
        if fault == "drops":
            transfer.load = self._load_some
        elif fault in ("exchanges experts", "keeps old weights"):
            self._sent, self._old = {}, dict(getattr(self, "_sent", {}))
            transfer.load = self._load_and_keep
            transfer.finish_weight_update = lambda: self._finish_and_load_again(fault)
        elif fault == "keeps cached prefixes":
            BlockPool.kept = BlockPool.reset_prefix_cache
            BlockPool.reset_prefix_cache = lambda pool: True
        elif fault == "other code":
            extension.CODE = "0.0.9-deadbeef"
        elif fault == "older code":
            self.rl_corr_begin = _older_begin

    def _load_some(self, weights):
        """As `WeightTransfer.load`, but what is dropped counts as received."""
        transfer, kept = self._rl_corr_transfer(), []
        for name, tensor in weights:
            transfer._received.add(name)
            if self._names and name not in self._names:
                kept.append((name, tensor))
        type(transfer).load(transfer, kept)

    def _load_and_keep(self, weights):
        transfer, copies = self._rl_corr_transfer(), [(name, tensor.clone()) for name, tensor in weights]
        self._sent |= dict(copies)
        type(transfer).load(transfer, copies)

    def _finish_and_load_again(self, fault):
        """After a right update whose checksums are told: other weights, of which no checksum is told."""
        transfer = self._rl_corr_transfer()
        type(transfer).finish_weight_update(transfer)
        wrong = self._old
        if fault == "exchanges experts":
            wrong = {name: tensor for name, tensor in self._sent.items() if name.startswith(EXPERTS)}
            for part in ("gate", "up", "down"):
                first, second = (f"{EXPERTS}{expert}.{part}_proj.weight" for expert in (0, 1))
                wrong[first], wrong[second] = wrong[second], wrong[first]
        again = LayerwiseUpdate(transfer.model, transfer.model_config, transfer.device, with_checksums=False)
        again.load(wrong.items())
        again.finish()


def _older_begin(tensors=None, checksums=True):
    """As before servers were asked for their code."""


_older_begin.__name__ = _older_begin.__qualname__ = "rl_corr_begin"
