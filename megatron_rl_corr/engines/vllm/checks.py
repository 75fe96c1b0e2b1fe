"""Whether a server can be updated as it was started, and whether an update fits its model, from names
and shapes alone.

A wrong name, a wrong shape or a part of a fused layer would leave a vLLM server with a layer
of random numbers.

The server's worker imports this module: standard library and torch, and safetensors, which vLLM has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl_corr.engines.stacked_parameters import server_parameter

Shapes = Mapping[str, Sequence[int]]
"""Tensors of a checkpoint: Hugging Face name -> shape. Example: {"model.norm.weight": [64]}."""

_SHOWN = 5


BACKEND = "rl_corr"
"""The name of our weight transfer in --weight-transfer-config."""


def config_problem(vllm_config: Any) -> str | None:
    """Why a server that was started so can't be updated, with the remedy; None: it can.

    Args:
        vllm_config: vLLM's own, in the server's worker, or an object of the same fields, as a
            server tells them.
    """
    transfer = vllm_config.weight_transfer_config
    if transfer is None or transfer.backend != BACKEND:
        return f'start the server with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
    quantization, parallel = vllm_config.model_config.quantization, vllm_config.parallel_config
    if quantization is not None:
        return f"updates of quantised weights ({quantization}) are not proven; serve the model in bfloat16"
    if vllm_config.kv_transfer_config is not None:
        return (
            f"its {vllm_config.kv_transfer_config.kv_connector} keeps keys and values outside the server's "
            "own cache, and may give those of old weights to requests for new ones; start it without "
            "--kv-transfer-config and --kv-offloading-size"
        )
    if vllm_config.lora_config is not None:
        return "updates with --enable-lora are not proven; start the server without"
    if parallel.data_parallel_size > 1:
        return (
            "updates of several replicas behind one address are not proven; start as many servers, each "
            "without --data-parallel-size"
        )
    if parallel.enable_eplb:
        return "updates with --enable-eplb are not proven; start the server without"
    if parallel.pipeline_parallel_size > 1:
        return "updates of several pipeline stages are not proven; use tensor-parallel ranks alone"
    return None


def shapes_of_folder(folder: Path) -> dict[str, list[int]]:
    """All tensors of a folder's safetensors files, from their headers.

    Raises:
        ValueError: it has none.
    """
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if not shapes:
        raise ValueError(
            f"{folder} has no safetensors files, so that names and shapes of new weights can't be checked; "
            "start the server from a Hugging Face folder with weights"
        )
    return shapes


def problem(sent: Shapes, held: Shapes) -> str | None:
    """Why a server can't take these tensors as one update; None: it can.

    Layers of which nothing is sent keep their weights; of a layer that is fused, all parts must be sent.

    Args:
        sent: all tensors of the update.
        held: all tensors of the server's checkpoint.
    """
    unknown = [name for name in sent if name not in held]
    if unknown:
        return (
            f"its checkpoint has none of {_shortened(unknown)}; start it with the checkpoint that is trained"
        )
    for name, shape in sent.items():
        if list(shape) != list(held[name]):
            return f"{name} has shape {list(shape)}, and {list(held[name])} in its checkpoint"
    parts: dict[str, set[str]] = defaultdict(set)
    for name in held:
        parts[_layer(name)].add(name)
    for layer in {_layer(name) for name in sent}:
        missing = sorted(parts[layer] - sent.keys())
        if missing:
            return (
                f"{layer} is one layer there, of which {_shortened(missing)} would not be sent; send all of "
                "it, or nothing"
            )
    return None if sent else "it has no tensors"


def bucket_problem(bucket: Shapes, planned: Shapes, received: set[str]) -> str | None:
    """Why a bucket is no part of the update that was planned; None: it is.

    Args:
        bucket: its tensors.
        planned: all tensors of the update.
        received: names of those that have come.
    """
    unknown = [name for name in bucket if name not in planned]
    if unknown:
        return f"{_shortened(unknown)} is not part of this update, or not in the server's checkpoint"
    again = [name for name in bucket if name in received]
    if again:
        return (
            f"{_shortened(again)} was sent before in this update; does another trainer push to this server?"
        )
    for name, shape in bucket.items():
        if list(shape) != list(planned[name]):
            return f"{name} has shape {list(shape)}, and {list(planned[name])} in the server's checkpoint"
    return None


def incomplete(planned: Shapes, received: set[str]) -> str | None:
    """What of an update has not come; None: all has."""
    missing = [name for name in planned if name not in received]
    return (
        f"{len(missing)} of {len(planned)} tensors have not come: {_shortened(missing)}" if missing else None
    )


def _layer(name: str) -> str:
    """The module of the server that a tensor goes into: it is loaded as a whole."""
    return server_parameter(name)[0].rpartition(".")[0]


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
