"""The questions that pause a server and change its weights for a moment; it gets everything back."""

from collections.abc import Callable
from pathlib import Path

from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.doctor.in_flight import ask_pause, ask_spans, ask_update
from megatron_rl_corr.doctor.probe import PROMPT_TOKENS, Probe
from megatron_rl_corr.doctor.quick import Facts
from megatron_rl_corr.doctor.weights import (
    FINAL_NORM,
    FIRST_NORM,
    INITIAL_VERSION,
    ServerWeights,
    read_tensors,
)
from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.engines.sglang import requests
from megatron_rl_corr.engines.sglang.requests import Request

MOST_TOKENS = 2000


async def ask_full(
    probe: Probe, facts: Facts, directory: str | None, say: Callable[[str], None], rows: list[Row]
) -> None:
    """Pause modes; then spans, cache and restoration around weight updates, each appended to rows when it is known.

    directory: Hugging Face folder with the weights that the server was started with; None: its model_path. say is
    told what is being asked.
    """
    tokens = await _room(probe)
    for mode in requests.PAUSE_MODES:
        say(f"pausing ({mode})")
        rows.append(await ask_pause(probe, mode, tokens, facts.half))
    weights = await _weights(probe, facts, directory or facts.model["model_path"])
    if isinstance(weights, Row):
        rows.append(weights)
        return
    say("computing the checksum of the weights")
    before = await weights.checksum()
    for mode in ("in_place", "retract"):
        say(f"updating weights under a running request ({mode})")
        rows.append(await ask_spans(probe, weights, mode, tokens, facts.half))
    say("updating weights and flushing the cache")
    rows.append(await ask_update(probe, weights, facts.half))
    say("comparing the checksum of the weights")
    rows.append(await _restored(probe, weights, before, facts.model["weight_version"]))


async def _room(probe: Probe) -> int:
    """Tokens of a response that fits the model's context after a prompt."""
    listed = await probe.control(Request("GET", "/v1/models"))
    try:
        return min(MOST_TOKENS, int(listed["data"][0]["max_model_len"]) - PROMPT_TOKENS - 8)
    except (KeyError, IndexError, TypeError) as error:
        raise RolloutProtocolError(probe.url, "/v1/models", f"no max_model_len ({error!r})") from None


async def _weights(probe: Probe, facts: Facts, directory: str) -> ServerWeights | Row:
    """The weights to change, or the row that says why they cannot be put back and so are left alone."""
    version = facts.model["weight_version"]
    if version != INITIAL_VERSION:
        said = f"not asked: weights {version!r} were pushed, and cannot be read back; ask before training"
        return Row("update", "note", said)
    if not Path(directory).is_dir():
        return Row("update", "note", f"not asked: no such folder here: {directory}; give --model HF_DIR")
    try:
        originals = read_tensors(directory, [FINAL_NORM, FIRST_NORM])
    except (FileNotFoundError, KeyError) as error:
        return Row("update", "note", f"not asked: the weights in {directory} have no {error}")
    return ServerWeights(probe, originals, ranks=int(facts.info["tp_size"]), version=version)


async def _restored(probe: Probe, weights: ServerWeights, before: list, version: str) -> Row:
    now, named = await weights.checksum(), (await probe.control(requests.model_info()))["weight_version"]
    changed = [name for old, new in zip(before, now, strict=True) for name in old if old[name] != new.get(name)]
    if changed or named != version:
        said = f"weights {named!r} differ from before in {', '.join(changed) or 'their name'}"
        return found("restored", "state_not_restored", said, changed=changed, version=named)
    return Row("restored", "ok", f"checksums of {sum(map(len, now))} weights and the version {named!r} are as before")
