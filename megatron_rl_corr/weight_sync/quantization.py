"""How servers have their weights quantised, and sending them so: what each expects, or why it can't
be sent weights.

SGLang puts whatever it is sent into the numbers that it holds, whatever they mean, so both sides must
agree beforehand.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl_corr.engines.addresses import is_loopback
from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import IncompletePush, RolloutProtocolError
from megatron_rl_corr.engines.inspection import ServedModel
from megatron_rl_corr.engines.types import NamedTensor, UnsupportedByEngine
from megatron_rl_corr.models.architectures import kept_as_loaded
from megatron_rl_corr.models.block_fp8 import quantise_blockwise
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint, read_config
from megatron_rl_corr.models.quantization import SCALE, BlockFP8

logger = logging.getLogger(__name__)

_OTHER_CONFIG = "hf_quant_config.json"
"""Where NVIDIA's ModelOpt writes what others write into config.json."""


def served_quantization(
    engine: Engine,
    info: Mapping[str, Any],
    model: ServedModel,
    checkpoint: str | None = None,
    *,
    same_host: bool = True,
) -> BlockFP8 | None:
    """What a server expects; None: weights in 16 bits or float32, or it quantises what it is sent.

    Servers do not tell how a checkpoint is quantised that they were started with (SGLang 0.5.23), so its
    config.json is read. Of a folder that can't be read here, only what the launch options quantise is known.

    Args:
        engine: what the server runs.
        info: its answer to `Engine.server_info`.
        model: that it names.
        checkpoint: `quantized_checkpoint`; None: the folder that the server names.
        same_host: the server is on this host; else its path may mean another folder here, which does not
            contradict a checkpoint that is given.

    Raises:
        ValueError: no push can send weights as this server has them; says what to serve instead.
    """
    if engine.quantises_updates(info):
        return None
    option = engine.quantization(info)
    served, kind = Path(model.path or ""), model.type
    expected = (
        _of_folder(Path(checkpoint)) if checkpoint else _of_folder(served) if _is_readable(served) else None
    )
    if option is not None and not (expected and option == "fp8"):
        raise ValueError(
            f"its weights are quantised ({option}) otherwise than by a checkpoint in FP8, and a push would "
            "put new numbers beside the old scales; serve the model in 16 bits, or a checkpoint in FP8 with "
            "blocks of 128 x 128"
            + (f", or {engine.quantises_updates_with}" if engine.quantises_updates_with else "")
        )
    if expected and not (kind in engine.limits.fp8_models or (kind is None and engine.limits.fp8_models)):
        raise ValueError(
            f"its weights are in FP8, and {engine.name} is not known to load new ones of a {kind or 'model'}"
            f"{_proven(engine)}; serve the model in 16 bits"
        )
    if checkpoint:
        _check_given(checkpoint, expected, served if same_host else None)
    return expected


def _proven(engine: Engine) -> str:
    models = engine.limits.fp8_models
    return f" (proven: {', '.join(models)})" if models else ""


def _is_readable(folder: Path) -> bool:
    """True if a server's folder can be read here: it may be the name of a repository, or on another host."""
    return (folder / "config.json").is_file()


def _of_folder(folder: Path) -> BlockFP8 | None:
    try:
        expected = BlockFP8.from_config(read_config(folder))
        if expected is None and (folder / _OTHER_CONFIG).is_file():
            raise ValueError(
                f"{_OTHER_CONFIG} quantises the weights as a push can't; serve the model in 16 bits"
            )
        if expected is not None:
            _check_scales(folder, expected)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return expected


def _check_scales(folder: Path, expected: BlockFP8) -> None:
    """ValueError where a checkpoint has scales of other weights than its configuration quantises.

    A folder of config.json alone is not looked into.
    """
    for file in ("model.safetensors.index.json", "model.safetensors"):
        if (folder / file).is_file():
            found = _other_scales(str(folder), (folder / file).stat().st_mtime_ns, expected)
            if found:
                raise ValueError(found)
            return


@lru_cache(maxsize=64)
def _other_scales(folder: str, changed: int, expected: BlockFP8) -> str:
    """What `_check_scales` says of a folder whose list of tensors was last changed then; "" where all fit."""
    checkpoint = HFCheckpoint(folder)
    # a family that is not known, whose servers are sent nothing
    if "num_hidden_layers" not in checkpoint.config:
        return ""
    names = set(checkpoint.names)
    kept = [re.compile(one.pattern) for one in kept_as_loaded(checkpoint.config)]
    sent = [
        name for name in names if not name.endswith(SCALE) and not any(one.fullmatch(name) for one in kept)
    ]
    wrong = sorted(name for name in sent if expected.quantises(name) != (name + SCALE in names))
    if not wrong:
        return ""
    there, said = ("no", "in FP8") if expected.quantises(wrong[0]) else ("a", "in 16 bits")
    return (
        f"its config.json has {wrong[0]} {said} (one of {len(wrong)}), and there is {there} "
        f"{wrong[0]}{SCALE} beside it; correct quantization_config, with modules_to_not_convert, or serve "
        "the model in 16 bits"
    )


def _check_given(checkpoint: str, expected: BlockFP8 | None, served: Path | None) -> None:
    if expected is None:
        raise ValueError(
            f"`quantized_checkpoint` {checkpoint} has no quantization_config in its config.json; drop it"
        )
    if served is not None and _is_readable(served) and _of_folder(served) != expected:
        raise ValueError(
            f"`quantized_checkpoint` {checkpoint} is quantised otherwise than {served}, which the server was "
            "started with; name that folder, or drop it"
        )


async def find_quantization(control: ServerControl, checkpoint: str | None = None) -> BlockFP8 | None:
    """What all servers expect, as `served_quantization`.

    Raises:
        RolloutProtocolError: a server can't be sent weights as it has them, or expects others
            than the first one.
        RolloutError: a server could not be asked.
    """
    found: list[BlockFP8 | None] = []
    infos, answers = await control.server_info(), await control.model_info()
    for url, info, answer in zip(control.base_urls, infos, answers, strict=True):
        engine = control.engine_of(url)
        try:
            model = engine.served_model(answer, info)
        except UnsupportedByEngine:
            model = ServedModel(None, None, None, None, is_initial=False)
        try:
            found.append(served_quantization(engine, info, model, checkpoint, same_host=is_loopback(url)))
        except ValueError as error:
            raise RolloutProtocolError(url, engine.server_info().endpoint, str(error)) from None
        if checkpoint is None:
            _tell_doubt(url, model, found[-1])
        if found[-1] != found[0]:
            raise RolloutProtocolError(
                url,
                engine.server_info().endpoint,
                f"its weights are {described(found[-1])}, and those of {control.base_urls[0]} "
                f"{described(found[0])}; all are sent the same: start all with one checkpoint",
            )
    return found[0]


def _tell_doubt(url: str, model: ServedModel, found: BlockFP8 | None) -> None:
    """Warn where a folder does not show for certain what a server holds."""
    if model.path is None or not model.path.startswith("/"):
        return
    if not _is_readable(Path(model.path)):
        logger.warning(
            "%s was started with %s, which can't be read here: its weights are taken for not quantised. If "
            "they are in FP8, give its config.json by --rollout-quantized-checkpoint",
            url,
            model.path,
        )
    elif not is_loopback(url):
        logger.warning(
            "%s was started with %s: by the folder of this name on this host its weights are %s. If it is "
            "another one there, give its config.json by --rollout-quantized-checkpoint",
            url,
            model.path,
            described(found),
        )


async def check_quantization(
    control: ServerControl, expected: BlockFP8 | None, checkpoint: str | None
) -> None:
    """RolloutProtocolError for a server that expects other weights than `expected`, as one may
    after a restart.
    """
    found = await find_quantization(control, checkpoint)
    if found != expected:
        raise RolloutProtocolError(
            control.base_urls[0],
            control.engine_of(control.base_urls[0]).server_info().endpoint,
            f"its weights are {described(found)}, and {described(expected)} when the run began; start it as "
            "it was",
        )


def described(quantization: BlockFP8 | None) -> str:
    """In a few words, for messages."""
    if quantization is None:
        return "not quantised"
    spared = f", {len(quantization.spared)} modules spared" if quantization.spared else ""
    return f"in FP8 with {quantization.scale_format} scales{spared}"


def quantised_units(
    units: Iterable[list[NamedTensor]], quantization: BlockFP8 | None
) -> Iterator[list[NamedTensor]]:
    """The units of an exporter with each tensor that is quantised as its values, and its scales behind them.

    What is quantised is what would be sent otherwise: of a bfloat16 model its bfloat16 weights. Tensors are
    whole, so that borders of blocks do not depend on how the trainer's ranks share a weight. One is
    quantised at a time.

    Args:
        units: of `StageExporter.units`.
        quantization: of the servers; None: nothing is changed.
    """
    for unit in units:
        yield (
            unit
            if quantization is None
            else [named for one in unit for named in _quantised(*one, quantization)]
        )


def _quantised(name: str, tensor: Tensor, quantization: BlockFP8) -> list[NamedTensor]:
    if tensor.ndim < 2 or not quantization.quantises(name):
        return [(name, tensor)]
    values, scales = quantise_blockwise(tensor, quantization.scale_format)
    return [(name, values), (name + SCALE, scales)]


def check_finite(bucket: Sequence[NamedTensor]) -> None:
    """IncompletePush for a weight with a number that is not finite: FP8 has no code for infinity.

    Args:
        bucket: of `quantised_units`.
    """
    wrong = [name for name, tensor in bucket if name.endswith(SCALE) and not tensor.isfinite().all()]
    if wrong:
        raise IncompletePush(
            f"{wrong[0].removesuffix(SCALE)} has numbers that are not finite (one of {len(wrong)} such "
            "weights of this bucket), which FP8 can't hold; the training has diverged: look at its loss and "
            "gradient norm"
        )
