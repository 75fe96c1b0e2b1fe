"""What /collective_rpc can call in a worker of vLLM: begin and end of an update, a folder to load, checksums, state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm.config import set_current_vllm_config

from megatron_rl_corr.engines.vllm import checks
from megatron_rl_corr.engines.vllm.worker.loading import checksums_of
from megatron_rl_corr.engines.vllm.worker.transfer import BACKEND, WeightTransfer


class Extension:
    """Mixed into vLLM's worker by --worker-extension-cls. Buckets come through vLLM's own /update_weights."""

    def rl_corr_begin(self, tensors: Mapping[str, Sequence[int]] | None = None, checksums: bool = True) -> None:
        """Begin an update, whatever became of the one before.

        Args:
            tensors: all that it will bring, Hugging Face name -> shape; None: checked bucket by bucket.
            checksums: hash the parameters while they are loaded.

        Raises:
            ValueError: this server can't take it; its weights have not been touched.
        """
        transfer = self._rl_corr_transfer()
        with set_current_vllm_config(self.vllm_config):
            transfer.plan(tensors, with_checksums=checksums)
        self._weight_update_active = False  # True after a trainer's death in mid-update
        self.start_weight_update()

    def rl_corr_end(self) -> None:
        """End it. Raises ValueError for one that is not complete."""
        try:
            self.finish_weight_update()
        except BaseException:
            self._weight_update_active = False
            raise

    def rl_corr_load_folder(self, path: str, checksums: bool = True) -> None:
        """A whole update from a Hugging Face folder, checked before anything is loaded."""
        from safetensors import safe_open

        transfer = self._rl_corr_transfer()
        folder = Path(path)
        if not folder.is_dir():
            raise ValueError(f"there is no folder {path} on this server's host, or it may not be read")
        self.rl_corr_begin(checks.shapes_of_folder(folder), checksums)
        try:
            with set_current_vllm_config(self.vllm_config):
                for file in sorted(folder.glob("*.safetensors")):
                    with safe_open(file, framework="pt") as opened:
                        names = opened.keys()
                        transfer.load((name, opened.get_tensor(name).to(self.device)) for name in names)
        except BaseException:
            with set_current_vllm_config(self.vllm_config):
                transfer.break_off()
            self._weight_update_active = False
            raise
        self.rl_corr_end()

    def rl_corr_leave(self, name: str) -> None:
        """Leave the group for broadcasts of this name."""
        self._rl_corr_transfer().leave(name)

    def rl_corr_checksums(self) -> dict[str, Any]:
        """Checksums of all parameters, and what they depend on."""
        transfer, parallel = self._rl_corr_transfer(), self.vllm_config.parallel_config
        return {
            "checksums": checksums_of(transfer.model, self.device, transfer.checksums),
            "device": self.device.type,
            "tp_rank": self.rank % parallel.tensor_parallel_size,
            "tp_size": parallel.tensor_parallel_size,
            "expert_parallel": bool(parallel.enable_expert_parallel),
            "dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            "quantization": self.vllm_config.model_config.quantization,
            "version": vllm.__version__,
        }

    def rl_corr_state(self) -> dict[str, bool]:
        """Whether an update is open, and whether one was broken off, so that weights of two versions are mixed."""
        transfer = self._rl_corr_transfer()
        return {"open": transfer.is_open, "mixed": transfer.is_mixed}

    def _rl_corr_transfer(self) -> WeightTransfer:
        transfer = self.weight_transfer_engine
        if not isinstance(transfer, WeightTransfer):
            raise ValueError(f"start the server with --weight-transfer-config '{{\"backend\": \"{BACKEND}\"}}'")
        return transfer
