"""docs/reference/engines.md: what each engine gives, needs and is asked, from its code, and
what was measured.
"""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.engine_tables import TITLES, tables
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import Request
from tools.local_server import PROGRAMS

MEASURED = Path(__file__).resolve().parents[1] / "benchmarks/engines.json"
HEAD = ["| | SGLang | vLLM |", "|---|---|---|"]

_HOW_TESTED = {"vLLM": " ([how](../get_started/install.md#vllm))"}
"""Behind an engine's versions, where not all were tested alike."""
IN_THE_CODE: dict[str, Callable[[Engine], str]] = {
    "tested versions": lambda engine: engine.version_support({}).tested + _HOW_TESTED.get(engine.name, ""),
    "samples come from": lambda engine: f"`{engine.generate_endpoint}`",
    "temperatures": lambda engine: _temperatures(engine),
    "log-probs of a sample with top-p, top-k or min-p": lambda engine: (
        "of what was kept"
        if engine.renormalises
        else "of the whole vocabulary; renormalised here on the sampling mask"
    ),
    "sampling mask": lambda engine: (
        "with a top-k of 2 or more"
        + (f", at most {engine.limits.max_top_k}" if engine.limits.max_top_k else "")
        + ("; not of top-p or min-p alone" if engine.limits.top_p_needs_top_k else "")
    ),
    "stop texts of a request": lambda engine: (
        f"at most {engine.limits.max_stop_texts}" if engine.limits.max_stop_texts else "any number"
    ),
    "pause modes": lambda engine: _codes(engine.limits.pause_modes),
    "weight transports": lambda engine: _codes(engine.limits.weight_transports),
}

V1 = " (V1 runner; with V2 not tried)"
"""Of vLLM's two model runners."""
BEHAVIOUR = [
    (
        "seeds",
        "heeded with `--enable-deterministic-inference`, else ignored",
        f"always heeded{V1}",
        "rollout/test_seeds_real_server",
    ),
    ("weight version of each token", "yes", "yes", "rollout/test_client_real_server"),
    (
        "running responses over an update, pause mode `retract`",
        "keys and values computed anew",
        "the same, with both runners",
        "matrix/test_vllm_v2_push",
    ),
    (
        "an aborted request",
        "returns its tokens so far, and is continued elsewhere",
        f"the same{V1}",
        "rollout/test_client_continuation",
    ),
    (
        "log-probs of a given text",
        "a prefill, also with cached prefixes",
        f"a prefill, which never uses the cache{V1}",
        "doctor/test_both_engines",
    ),
    (
        "routed experts",
        "of each token but the last; a request asks for them",
        "the same; the server returns them always, with its V2 model runner",
        "matrix/test_vllm_v2_client",
    ),
    (
        "cached prompt tokens",
        "always told",
        "told with `--enable-prompt-tokens-details`, else 0",
        "engines/test_vllm_responses",
    ),
    (
        "hashes of the weights",
        "of what lies in memory",
        "of what lies in memory; of a parameter that kernels pack, as an update loaded it",
        "weight_sync/test_push_real_servers",
    ),
    (
        "an update that does not fit the model",
        "the trainer refuses it, or the server when the tensor comes",
        "the server refuses it before the first byte",
        "weight_sync/test_push_real_servers",
    ),
    ("updates of several pipeline stages of a server", "yes (by its code)", "refused: not proven", ""),
    (
        "updates of quantised weights",
        "[FP8 in blocks of 128 x 128](../guides/weights.md#fp8-rollouts); `--load-format flash_rl` (by its "
        "code)",
        "refused: not proven",
        "weight_sync/test_fp8_real_server",
    ),
    (
        "a router's address",
        "its servers are found",
        "no router is known",
        "engines/test_discovery_real_servers",
    ),
    (
        "a server that makes no progress",
        "found by `/v1/loads`",
        "found by `/metrics` and `/is_paused`" + V1,
        "engines/test_vllm_progress_real_server",
    ),
    (
        "a key for pause and updates",
        "`--admin-api-key` or `--api-key`",
        "none: [guard the port](../explanation/security.md)",
        "",
    ),
]
"""What no object of the code tells: row, SGLang, vLLM, and the test that holds it, if there is one."""

NEEDS = {
    "weights in flight": "no_weight_updates",
    "log-probs at a temperature other than 1": "logprobs_without_temperature",
    "the sampling mask, to train with top-p or top-k": "sampling_mask_missing",
    "routed experts, to replay them": "routed_experts_missing",
    "the same log-probs every time": "not_deterministic",
    "no stale prefixes": "stale_prefix_cache",
}
"""What is needed for it -> the finding of the doctor whose remedy says how."""


def page() -> str:
    """Both engines side by side."""
    engines = {name: load_engine(name) for name in TITLES}
    lines = [
        "# Engines",
        "",
        "Generated by `scripts/generate_docs.py` from `megatron_rl_corr/engines/` and the figures in",
        "`benchmarks/engines.json`. A run may have servers of both; each sample says which it came from. How "
        "to start",
        "them: [servers](../guides/servers.md) and, for vLLM, [install](../get_started/install.md#vllm).",
        "",
        "## What each gives",
        "",
        *HEAD,
    ]
    for what, told in IN_THE_CODE.items():
        lines.append(_row(what, *map(told, engines.values())))
    lines += [
        "",
        "vLLM has two model runners, and chooses one by the model and the machine "
        "(`VLLM_USE_V2_MODEL_RUNNER`).",
        "A row without a remark does not depend on them, or was tested with both.",
    ]
    lines += ["", "| | SGLang | vLLM | tested by |", "|---|---|---|---|"]
    lines += [_row(*cells, f"`tests/{test}.py`" if test else "not tested") for *cells, test in BEHAVIOUR]
    lines += [
        "",
        "## What each needs",
        "",
        "Every run: what the tests' servers are started with. The rest: as the [doctor](../guides/doctor.md) "
        "says it",
        "where something is missing.",
        "",
        "| for | SGLang | vLLM |",
        "|---|---|---|",
    ]
    lines.append(_row("every run", *(_started_with(name) for name in engines)))
    lines.append(_row("an environment", "any", "of its own, as vLLM pins its torch, with this package in it"))
    for what, defect in NEEDS.items():
        lines.append(_row(what, *(engine.remedies[defect] for engine in engines.values())))
    lines += [
        "",
        "## What a server is asked",
        "",
        "For those who guard its port. A name after `/collective_rpc` is a method of our worker extension.",
        "",
        *HEAD,
    ]
    asked = {name: requests_of(engine) for name, engine in engines.items()}
    for what in asked["sglang"]:
        lines.append(_row(what, *(_request(own[what]) for own in asked.values())))
    lines += ["", "## Measured on one machine", "", *measured()]
    return "\n".join(lines) + "\n"


def requests_of(engine: Engine) -> dict[str, Request | None]:
    """Every request of a run, by what it is for."""
    group = {"group_name": "g", "backend": "gloo"}
    return {
        "health": engine.health(),
        "how it was started": engine.server_info(),
        "the version of its weights": engine.model_info(),
        "a sample": engine.generate([1], SamplingParams(1), seed=0),
        "log-probs of a given text": engine.score([1], [2], likeliest=1),
        "pause": engine.pause_generation("retract"),
        "go on": engine.continue_generation(),
        "begin an update": engine.begin_weight_update(),
        "`distributed`: join the group": engine.init_weights_update_group(
            "host", 1, rank_offset=1, world_size=2, **group
        ),
        "`distributed`: receive": engine.update_weights_from_distributed(
            ["w"], ["float32"], [[1]], group_name="g"
        ),
        "`distributed`: leave the group": engine.destroy_weights_update_group("g"),
        "`tensor`": engine.update_weights_from_tensor([engine.serialized([("w", torch.zeros(1))])]),
        "`disk`": engine.update_weights_from_disk("folder"),
        "end an update": engine.end_weight_update(),
        "name the weights": engine.update_weight_version("1"),
        "hashes of the weights": engine.weights_checker(),
        "forget cached prefixes": engine.flush_cache(),
        "end a request": engine.abort_request("id"),
    }


def measured() -> list[str]:
    """The tables of the last run of the benchmark whose figures were kept."""
    return [
        *tables(json.loads(MEASURED.read_text())),
        "",
        "[Benchmarks](../explanation/benchmarks.md#both-engines) has the command, and says what was measured "
        "and how.",
    ]


def _started_with(name: str) -> str:
    """Variables and flags of every server, as tools/local_server.py starts it."""
    program = PROGRAMS[name]
    variables = [f"{variable}={value}" for variable, value in program.variables.items()]
    flags = re.split(r" (?=--)", shlex.join(program.arguments)) if program.arguments else []
    return _codes((*variables, *flags)) or "the model alone"


def _request(request: Request | None) -> str:
    if request is None:
        return "nothing"
    method = (request.json or {}).get("method", "") if request.endpoint == "/collective_rpc" else ""
    return f"`{request.method} {request.endpoint}{' ' * bool(method)}{method}`"


def _temperatures(engine: Engine) -> str:
    highest = engine.limits.max_temperature
    return f"0, and {engine.limits.min_temperature:g} " + (f"to {highest:g}" if highest < 1e9 else "or more")


def _codes(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
