"""Whether every server has the model that is trained, before the first byte of weights is
sent to any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.engines.addresses import is_loopback
from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.engines.types import ServerChecksums
from megatron_rl_corr.models.architectures import CODE_OF, unusual_weights
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint, read_model
from megatron_rl_corr.models.names import CheckpointNames
from megatron_rl_corr.models.settings import computed
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import StartupError, all_reduce_failure
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.weight_sync.updatable import is_interrupted
from megatron_rl_corr.weight_sync.verify import shortened


@collective
def check_models(options: RunConfig, client: RolloutClient, loop: LoopThread) -> None:
    """Compare what each server tells of its model with the checkpoint; from rank 0, every rank calls it.

    Compared are the type of the model; the settings that decide what it computes, where the server is on this
    host and its folder can be read; and the names of its parameters, unless `verify_push` is off: a server
    reads its weights for that, as after every push. A server that a killed trainer left in the middle of an
    update is not asked for its parameters.

    Args:
        options: the plugin's flags; with `server_check` off nothing is asked.
        client: of the servers.
        loop: the event loop of the client.

    Raises:
        StartupError: on rank 0, naming the server and what differs; on the others PeerFailure.
        RolloutError: a server could not be asked.
    """
    error = None
    if dist.get_rank() == 0 and options.server_check != "off":
        try:
            checkpoint = HFCheckpoint(options.hf_checkpoint)
            found = loop.call(difference(client, checkpoint, with_names=options.verify_push != "off"))
            if found is not None:
                url, what = found
                error = StartupError(
                    f"--rollout-url {url}: it has another model than --rollout-hf-checkpoint "
                    f"{checkpoint.path}: {what}; nothing was sent to any server yet. Start all with this "
                    "checkpoint, or train nevertheless with --rollout-server-check off"
                )
        except RolloutError as failure:
            error = failure
    all_reduce_failure(error)


async def difference(
    client: RolloutClient, checkpoint: HFCheckpoint, *, with_names: bool
) -> tuple[str, str] | None:
    """(address, what differs) of the first server that has another model; None: all may have this one."""
    infos, models = await client.server_info(), await client.model_info()
    for url, info, model in zip(client.base_urls, infos, models, strict=True):
        engine = client.engine_of(url)
        served = engine.served_model(model, info)
        own_type = checkpoint.config.get("model_type")
        if served.type is not None and CODE_OF.get(served.type, served.type) != CODE_OF.get(
            own_type, own_type
        ):
            return url, f"its model_type is {served.type}, the checkpoint's {own_type}"
        unusual = unusual_weights(checkpoint.config)
        if unusual is not None and not engine.limits.unusual_weights:
            return url, f"it is {engine.name}, and {unusual}, of which pushes are not proven there"
        if served.path is not None and is_loopback(url):
            settings = other_settings(Path(served.path), checkpoint.config)
            if settings:
                return url, f"its folder {served.path} has {settings}"
        if with_names and not is_interrupted(served.weight_version or ""):
            answer = await client.ask(url, engine.weights_checker())
            names = other_names(engine, engine.checksums(url, info, answer), checkpoint)
            if names:
                return url, names
    return None


def other_settings(folder: Path, config: Mapping[str, Any]) -> str:
    """The settings by which a folder's config.json differs from a configuration; "" where none does,
    or it has no file.

    Compared is what decides a parameter's shape or what the model computes, with transformers' defaults,
    wherever it stands in the file, and with settings that are not known here.
    """
    try:
        served = read_model(folder)
    except (ValueError, OSError):  # a name of the Hub, or a folder that this user may not read
        return ""
    try:
        theirs, ours = computed(served), computed(config)
    except ValueError as error:
        return f"settings that can't be compared: {error}"
    return ", ".join(
        f"{key} {theirs.get(key, 'not set')} where the checkpoint has {ours.get(key, 'it not set')}"
        for key in sorted({*theirs, *ours})
        if key not in theirs or key not in ours or theirs[key] != ours[key]
    )


def other_names(engine: Engine, server: ServerChecksums, checkpoint: HFCheckpoint) -> str:
    """The parameters that a server lacks, or has more of; "" where it has those of the checkpoint."""
    table = CheckpointNames(checkpoint.config)
    sent = {engine.server_parameter(name)[0] for name in checkpoint.names if table.why_kept(name) is None}
    held = {name for _, sums in server.ranks for name in sums}
    lacking = sorted(name for name in sent if engine.held_in(name, held) not in held)
    if lacking and server.shows_all:
        return f"it has none of {len(lacking)} of its {len(sent)} parameters: {shortened(lacking)}"
    # a tied one stands there twice
    own = held - {engine.held_in(name, held) for name in sent} - {"lm_head.weight"}
    more = sorted(name for name in own if table.why_kept(name) is None)
    if more and server.quantization is None:  # a quantised server has scales beside its weights
        return f"it has {len(more)} parameters that the checkpoint lacks: {shortened(more)}"
    return ""
