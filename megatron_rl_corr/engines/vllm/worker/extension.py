"""What /collective_rpc can call in a worker of vLLM: a group, an update's steps, a folder to load,
checksums, state.

A method that fails returns {"error": text} and raises nothing: where vLLM (0.32) has several ranks it
stops reading their answers at the first exception, and from then on every call gets other ranks' answers
to the call before it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm.config import set_current_vllm_config

from megatron_rl_corr.engines.vllm import checks
from megatron_rl_corr.engines.vllm.memory_checksums import checksums_of
from megatron_rl_corr.engines.vllm.worker.transfer import BACKEND, WeightTransfer
from megatron_rl_corr.engines.vllm.worker_code import check_code, worker_code

CODE = worker_code()
"""As this process began: files may be replaced under it."""

logger = logging.getLogger(__name__)


def _answers_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make an exception of the method its answer, and let it run with the worker's configuration."""

    @functools.wraps(method)
    def answered(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with set_current_vllm_config(self.vllm_config):
                return method(self, *args, **kwargs)
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            return {
                "error": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            }

    return answered


class Extension:
    """Mixed into vLLM's worker by --worker-extension-cls."""

    @_answers_errors
    def rl_corr_join(self, **init_info: Any) -> None:
        """Join the trainer's group for broadcasts; arguments as the fields of `InitInfo`."""
        transfer = self._rl_corr_transfer()
        transfer.init_transfer_engine(transfer.parse_init_info(init_info))

    @_answers_errors
    def rl_corr_leave(self, name: str) -> None:
        """Leave the group for broadcasts of this name."""
        self._rl_corr_transfer().leave(name)

    @_answers_errors
    def rl_corr_begin(
        self,
        tensors: Mapping[str, Sequence[int]] | None = None,
        checksums: bool = True,
        keep: bool = False,
        code: str | None = None,
    ) -> None:
        """Begin an update, whatever became of the one before.

        Args:
            tensors: all that it will bring, Hugging Face name -> shape; None: checked bucket by bucket.
            checksums: hash the parameters while they are loaded.
            keep: updates of what changes alone may follow.
            code: the trainer's `worker_code`.

        Refused, before its weights are touched, where this server can't take it.
        """
        transfer = self._rl_corr_transfer()
        check_code(CODE, code)
        transfer.begin(tensors, with_checksums=checksums, keep=keep)

    @_answers_errors
    def rl_corr_begin_changes(self, push: str, base: str, stages: int) -> None:
        """Expect in the open update what has changed alone, from version `base` to `push`, from so many
        pipeline stages. Refused where this server can't take it.
        """
        self._rl_corr_transfer().begin_changes(push, base, stages)

    @_answers_errors
    def rl_corr_bucket(self, buckets: Sequence[Mapping[str, Any]]) -> None:
        """Receive and load one bucket.

        Args:
            buckets: the fields of an `UpdateInfo`: of one for all ranks, or of one for each.
        """
        self._rl_corr_transfer().update_weights(buckets[self.rank if len(buckets) > 1 else 0])

    @_answers_errors
    def rl_corr_end(self) -> None:
        """End it. Refused where it is not complete."""
        self._rl_corr_transfer().finish_weight_update()

    @_answers_errors
    def rl_corr_load_folder(self, path: str, checksums: bool = True, code: str | None = None) -> None:
        """A whole update from a Hugging Face folder, checked before anything is loaded."""
        from safetensors import safe_open

        transfer = self._rl_corr_transfer()
        check_code(CODE, code)
        folder = Path(path)
        if not folder.is_dir():
            raise ValueError(f"there is no folder {path} on this server's host, or it may not be read")
        transfer.begin(checks.shapes_of_folder(folder), with_checksums=checksums)
        try:
            for file in sorted(folder.glob("*.safetensors")):
                with safe_open(file, framework="pt") as opened:
                    names = opened.keys()
                    transfer.load((name, opened.get_tensor(name).to(self.device)) for name in names)
        except BaseException:
            transfer.break_off()
            raise
        transfer.finish_weight_update()

    @_answers_errors
    def rl_corr_checksums(self) -> dict[str, Any]:
        """Checksums of all parameters, and what they depend on. Refused while weights are loaded."""
        transfer, parallel = self._rl_corr_transfer(), self.vllm_config.parallel_config
        transfer.check_is_whole()
        return {
            "checksums": checksums_of(transfer.model, self.device, transfer.checksums, transfer.unpacked),
            "device": self.device.type,
            "tp_rank": self.rank % parallel.tensor_parallel_size,
            "tp_size": parallel.tensor_parallel_size,
            "expert_parallel": bool(parallel.enable_expert_parallel),
            "dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            "quantization": self.vllm_config.model_config.quantization,
            "version": vllm.__version__,
        }

    @_answers_errors
    def rl_corr_state(self) -> dict[str, bool]:
        """Whether an update is open, and whether one was broken off, so that weights of two
        versions are mixed.
        """
        transfer = self._rl_corr_transfer()
        return {"open": transfer.is_open, "mixed": transfer.is_mixed}

    def _rl_corr_transfer(self) -> WeightTransfer:
        transfer = self.weight_transfer_engine
        if not isinstance(transfer, WeightTransfer):
            raise ValueError(f'start the server with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'')
        return transfer
