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
    """Something that can be wrong with a server; what mends it is the engine's own
    (`Inspection.remedies`).
    """

    kind: Kind
    means: str
    """What is wrong, in one phrase."""


DEFECTS: dict[str, Defect] = {
    "temperature_ignored": Defect("semantic", "samples are not drawn at the requested temperature"),
    "logprobs_without_temperature": Defect(
        "semantic", "samples follow the temperature, log-probs are of temperature 1"
    ),
    "logprobs_of_another_temperature": Defect(
        "semantic", "log-probs are scaled, but not by the requested temperature"
    ),
    "logprobs_of_another_set": Defect(
        "semantic",
        "log-probs under top-p are of another set of ids than those that the engine defines them on",
    ),
    "sampling_mask_missing": Defect("semantic", "the server does not tell which ids top-p and top-k kept"),
    "sampling_mask_wrong": Defect(
        "semantic", "the log-probs renormalised on the kept ids are not those of the kept ids"
    ),
    "one_response": Defect(
        "semantic", "samples of one prompt with different seeds are one and the same response"
    ),
    "another_checkpoint": Defect(
        "semantic",
        "log-probs differ from the model's by far more than the server's precision explains: its weights "
        "differ",
    ),
    "ids_differ": Defect(
        "semantic",
        "single ids have other log-probs than the model's, or ids that it lacks have mass, which sampled "
        "tokens need not show",
    ),
    "servers_differ": Defect("semantic", "two servers score the same tokens differently"),
    "vocabulary_differs": Defect("semantic", "the server's vocabulary or tokenizer is not the model's"),
    "dtype_differs": Defect("inference-path", "the server computes in another precision than the trainer"),
    "model_difference": Defect(
        "inference-path", "log-probs differ from the float32 model's as 16-bit rounding makes them differ"
    ),
    "decode_prefill_difference": Defect(
        "inference-path", "a token's log-prob is another one when it is sampled than when it is scored"
    ),
    "not_deterministic": Defect(
        "inference-path", "the same greedy request has other log-probs each time, beyond rounding"
    ),
    "routed_experts_missing": Defect(
        "inference-path", "the server does not return the experts that each token went through"
    ),
    "routed_experts_wrong": Defect(
        "inference-path", "the routed experts returned do not have one row for each token, layer and expert"
    ),
    "version_unsupported": Defect(
        "objective",
        "this version cannot be paused for a weight update, or does not tell which weights sampled a token",
    ),
    "no_weight_updates": Defect(
        "objective", "the server cannot be sent new weights in the way that a push sends them"
    ),
    "quantisation_unsupported": Defect(
        "objective", "the server's weights are quantised in a way in which a push can't send new ones"
    ),
    "stale_prefix_cache": Defect(
        "objective", "cached prefixes hold keys and values of weights that are gone"
    ),
    "version_spans_wrong": Defect(
        "objective", "the reported switch of weights inside a response is not where the log-probs switch"
    ),
    "pause_mode_broken": Defect(
        "objective", "a pause did not do what its mode says to the request that was running"
    ),
    "update_without_effect": Defect("objective", "the server accepted new weights and kept its log-probs"),
    "state_not_restored": Defect("objective", "the server's weights are not those from before the check"),
}


@dataclass(frozen=True)
class Finding:
    """A defect of one server, with the numbers that show it."""

    name: str
    """In DEFECTS."""
    server: str
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""
    """What mends it, in the words of the server's engine."""

    @property
    def kind(self) -> Kind:
        return DEFECTS[self.name].kind

    def __str__(self) -> str:
        found = f"{self.server}: {self.name} ({self.kind} mismatch): {self.message}"
        return f"{found}; {self.remedy}" if self.remedy else found


@dataclass(frozen=True)
class Row:
    """The answer to one question.

    Example: Row("temperature", "ok", "at 2 log-prob differences are 0.500 of those at 1; ...",
    {"slope": 0.5}).
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

    def finding(self, server: str, remedies: Mapping[str, str]) -> Finding:
        """The finding of a row that is one, with the remedy of the server's engine."""
        return Finding(self.defect, server, self.message, self.numbers, remedies.get(self.defect, ""))


def found(check: str, defect: str, message: str, **numbers: Any) -> Row:
    """A row that is a finding."""
    return Row(check, "finding", message, numbers, defect)


@dataclass
class Examination:
    """All rows of one server, in the order of the questions."""

    server: str
    rows: list[Row] = field(default_factory=list)
    remedies: Mapping[str, str] = field(default_factory=dict)
    """The engine's: a name in DEFECTS -> what mends it."""

    @property
    def findings(self) -> list[Finding]:
        return [row.finding(self.server, self.remedies) for row in self.rows if row.defect]

    @property
    def failed(self) -> bool:
        return any(row.status == "failed" for row in self.rows)


def exit_status(examinations: list[Examination]) -> int:
    """0: no finding; 1: a finding; 2: a question could not be asked, whatever else was found."""
    if any(examination.failed for examination in examinations):
        return 2
    return 1 if any(examination.findings for examination in examinations) else 0
