"""The doctor's results: one row per question, and the catalogue of defects it can find."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["semantic", "inference-path", "objective"]
Status = Literal["ok", "note", "finding", "failed"]

KINDS: dict[Kind, str] = {
    "semantic": "server and trainer define different distributions",
    "inference-path": "the same distribution, computed in another way",
    "objective": "samples of other weights than those they are attributed to",
}


@dataclass(frozen=True)
class Defect:
    """Something that can be wrong with a server."""

    kind: Kind
    means: str
    """What is wrong, in one phrase."""
    remedy: str
    """The flags that fix it."""


DETERMINISTIC = (
    "with --enable-deterministic-inference (it needs --attention-backend fa3, fa4, flashinfer or triton, and a seed in "
    "every request, as ours have)"
)

DEFECTS: dict[str, Defect] = {
    "temperature_ignored": Defect(
        "semantic",
        "samples are not drawn at the requested temperature",
        "train with --rollout-temperature 1, or serve with an SGLang that applies the temperature",
    ),
    "logprobs_without_temperature": Defect(
        "semantic",
        "samples follow the temperature, log-probs are of temperature 1",
        "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB, or train with --rollout-temperature 1",
    ),
    "logprobs_of_another_temperature": Defect(
        "semantic",
        "log-probs are scaled, but not by the requested temperature",
        "train with --rollout-temperature 1, or serve with an unpatched SGLang 0.5.23",
    ),
    "logprobs_filtered": Defect(
        "semantic",
        "top-p changes the log-probs, which SGLang defines over the whole vocabulary",
        "train with --rollout-top-p 1 --rollout-top-k -1, or serve with SGLang 0.5.23",
    ),
    "sampling_mask_missing": Defect(
        "semantic",
        "the server does not tell which ids top-p and top-k kept",
        "serve with SGLang 0.5.16 or newer, or train with --rollout-top-p 1 --rollout-top-k -1",
    ),
    "sampling_mask_wrong": Defect(
        "semantic",
        "the log-probs renormalised on the kept ids are not those of the kept ids",
        "train with --rollout-top-p 1 --rollout-top-k -1, or serve with SGLang 0.5.23",
    ),
    "one_response": Defect(
        "semantic",
        "samples of one prompt with different seeds are one and the same response",
        "serve with SGLang 0.5.23, or without --enable-deterministic-inference and --rl-on-policy-target",
    ),
    "another_checkpoint": Defect(
        "semantic",
        "log-probs differ from the model's by far more than 16-bit rounding",
        "start the server with the --model-path that --rollout-hf-checkpoint names",
    ),
    "servers_differ": Defect(
        "semantic",
        "two servers score the same tokens differently",
        "start all servers with one --model-path and one --dtype, and push the weights to all of them",
    ),
    "vocabulary_differs": Defect(
        "semantic",
        "the server's vocabulary or tokenizer is not the model's",
        "start the server with the --model-path and --tokenizer-path that --rollout-hf-checkpoint names",
    ),
    "dtype_differs": Defect(
        "inference-path",
        "the server computes in another precision than the trainer",
        "start the server with the trainer's --dtype, or correct with --rollout-correction-preset decoupled_token_is",
    ),
    "model_difference": Defect(
        "inference-path",
        "log-probs differ from the float32 model's as 16-bit rounding makes them differ",
        "start the server with --dtype float32, or correct with --rollout-correction-preset decoupled_token_is",
    ),
    "decode_prefill_difference": Defect(
        "inference-path",
        "a token's log-prob is another one when it is sampled than when it is scored",
        "start the server with another --attention-backend, or " + DETERMINISTIC,
    ),
    "not_deterministic": Defect(
        "inference-path",
        "the same greedy request has other log-probs each time, beyond rounding",
        "start the server " + DETERMINISTIC,
    ),
    "routed_experts_missing": Defect(
        "inference-path",
        "the server does not return the experts that each token went through",
        "start the server with --enable-return-routed-experts",
    ),
    "routed_experts_wrong": Defect(
        "inference-path",
        "the routed experts returned do not have one row for each token, layer and expert",
        "serve with SGLang 0.5.23, and with the checkpoint that --rollout-hf-checkpoint names",
    ),
    "version_unsupported": Defect(
        "objective",
        "this SGLang cannot be paused for a weight update, or does not tell which weights sampled a token",
        "serve with SGLang 0.5.19 to 0.5.23",
    ),
    "stale_prefix_cache": Defect(
        "objective",
        "cached prefixes hold keys and values of weights that are gone",
        "POST /flush_cache after every weight update (a push of ours does), or start with --disable-radix-cache",
    ),
    "version_spans_wrong": Defect(
        "objective",
        "the reported switch of weights inside a response is not where the log-probs switch",
        "start the server with --disable-overlap-schedule, or pause with retract (a push of ours does)",
    ),
    "pause_mode_broken": Defect(
        "objective",
        "a pause did not do what its mode says to the request that was running",
        "serve with SGLang 0.5.23; a push of ours needs the mode retract",
    ),
    "update_without_effect": Defect(
        "objective",
        "the server accepted new weights and kept its log-probs",
        "look for a failed load in the server's log; serve with SGLang 0.5.23",
    ),
    "state_not_restored": Defect(
        "objective",
        "the server's weights are not those from before the check",
        "restart the server, or push the weights again",
    ),
}


@dataclass(frozen=True)
class Finding:
    """A defect of one server, with the numbers that show it."""

    name: str
    """In DEFECTS."""
    server: str
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return DEFECTS[self.name].kind

    @property
    def remedy(self) -> str:
        return DEFECTS[self.name].remedy

    def __str__(self) -> str:
        return f"{self.server}: {self.name} ({self.kind} mismatch): {self.message}; {self.remedy}"


@dataclass(frozen=True)
class Row:
    """The answer to one question.

    Example: Row("temperature", "ok", "at 2 log-prob differences are 0.500 of those at 1; ...", {"slope": 0.5}).
    """

    check: str
    """The question, in one or two words."""
    status: Status
    """note: nothing has to be fixed; failed: the question could not be asked."""
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """What the message is based on, for --json."""
    defect: str | None = None
    """A name in DEFECTS; for a finding only."""

    def __post_init__(self):
        assert (self.status == "finding") == (self.defect is not None), self
        assert self.defect is None or self.defect in DEFECTS, self.defect


def found(check: str, defect: str, message: str, **numbers: Any) -> Row:
    """A row that is a finding."""
    return Row(check, "finding", message, numbers, defect)


@dataclass
class Examination:
    """All rows of one server, in the order of the questions."""

    server: str
    rows: list[Row] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        return [Finding(row.defect, self.server, row.message, row.numbers) for row in self.rows if row.defect]

    @property
    def failed(self) -> bool:
        return any(row.status == "failed" for row in self.rows)


def exit_status(examinations: list[Examination]) -> int:
    """0: no finding; 1: a finding; 2: a question could not be asked, whatever else was found."""
    if any(examination.failed for examination in examinations):
        return 2
    return 1 if any(examination.findings for examination in examinations) else 0
