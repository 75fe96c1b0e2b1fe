"""Which rewards a run adds up: what the user's words [NAME=]SPEC say, and the built-in ones with
their parameters.

The formulas of the built-in rewards are in data/builtin_rewards.py.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from megatron_rl_corr.config.problems import Problems, check_each

NAMED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
REQUIRED = "required"


@dataclass(frozen=True)
class BuiltinReward:
    """A reward that needs no file of the user's.

    Example: BuiltinReward("1 where ...", {"penalty": 1.0}) is given as NAME or NAME:penalty=0.5.
    """

    doc: str
    parameters: Mapping[str, float | str | None] = field(default_factory=dict)
    """Each one's default; REQUIRED: it has none. `max`, where it is None, is the run's max_new_tokens."""
    needs_label: bool = False
    reads_label: bool = False
    """It may meet a label that it can't read."""


BUILTIN_REWARDS: dict[str, BuiltinReward] = {
    "math": BuiltinReward(
        "1 where the response's answer equals the label as mathematics, else 0: by the library math-verify",
        needs_label=True,
        reads_label=True,
    ),
    "exact": BuiltinReward(
        "1 where the response's answer is the label's text, but for case and white space, else 0",
        needs_label=True,
    ),
    "f1": BuiltinReward(
        "the F1 of the words of the response's answer and of the label's, as SQuAD counts them",
        needs_label=True,
    ),
    "format": BuiltinReward(
        "1 where the whole response matches a pattern, else 0: <think>...</think> and <answer>...</answer>, "
        "each once, or format:pattern=REGEX",
        {"pattern": None},
    ),
    "overlong": BuiltinReward(
        "DAPO's soft punishment of a long response: 0 up to max - cache tokens, from there falling to "
        "-penalty at max; overlong:cache=N[,max=N][,penalty=X]",
        {"cache": REQUIRED, "max": None, "penalty": 1.0},
    ),
    "length": BuiltinReward(
        "-penalty x tokens / max; length[:max=N][,penalty=X]", {"max": None, "penalty": 1.0}
    ),
}


@dataclass(frozen=True)
class RewardSpec:
    """One of the rewards of a run.

    Example: RewardSpec("short", "overlong", 0.5, {"cache": 512, "max": 4096, "penalty": 1.0}) of the words
    short=overlong:cache=512 and the weight 0.5.
    """

    name: str
    """In metrics and sample files."""
    source: str
    """path/to/file.py:name, package.module:name, the name of a built-in reward, or an address."""
    weight: float = 1.0
    parameters: Mapping[str, float | str | None] = field(default_factory=dict)
    """All parameters of a built-in reward; empty for the user's own."""
    kind: str = "function"
    """function, builtin or url."""

    @property
    def flag(self) -> str:
        """The option that named it."""
        return "`reward_url`" if self.kind == "url" else "`reward_function`"

    @property
    def needs_label(self) -> bool:
        """True if it is built in and compares with the row's label."""
        return self.kind == "builtin" and BUILTIN_REWARDS[self.source].needs_label

    @property
    def reads_label(self) -> bool:
        """True if it is built in and may meet a label that it can't read."""
        return self.kind == "builtin" and BUILTIN_REWARDS[self.source].reads_label


def parse_rewards(
    functions: Sequence[str],
    urls: Sequence[str],
    weights: Sequence[float],
    *,
    max_new_tokens: int | None = None,
) -> tuple[RewardSpec, ...]:
    """The rewards of a run in the order of the user's words: functions, then addresses.

    Args:
        functions, urls: [NAME=]SPEC each. Without NAME a function is called as in its file, an address `url`.
        weights: one for each reward; none: all are 1.
        max_new_tokens: of the run; None: not known, and neither is what depends on it.

    Raises:
        ValueError: names the option, the value and the remedy.
    """
    problems = Problems()
    own = problems.check("functions", lambda: check_each(_function, functions))
    others = problems.check("urls", lambda: check_each(_url, urls))
    problems.raise_all()
    found = own + others
    for spec in found:
        if sum(other.name == spec.name for other in found) > 1:
            raise ValueError(
                f"{spec.flag}: two rewards are called {spec.name!r}; name them, as in NAME={spec.source}"
            )
    if weights and len(weights) != len(found):
        names = ", ".join(spec.name for spec in found)
        raise ValueError(
            f"`reward_weights` must have a weight for each of the {len(found)} rewards ({names}), got "
            f"{len(weights)}"
        )
    for weight in weights:
        if not math.isfinite(as_float32(weight)):
            raise ValueError(f"`reward_weights` must be finite in float32, got {weight:g}")
    if weights:
        found = [
            replace(spec, weight=as_float32(weight)) for spec, weight in zip(found, weights, strict=True)
        ]
    return tuple(_completed(spec, max_new_tokens) for spec in found)


def as_float32(value: float) -> float:
    """The nearest number that float32 has; inf beyond its range."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf


def _named(text: str) -> tuple[str | None, str]:
    match = NAMED.fullmatch(text)
    return (match[1], match[2]) if match else (None, text)


def _function(text: str) -> RewardSpec:
    name, source = _named(text)
    head, colon, rest = source.partition(":")
    # math:sqrt is the standard library's, and math has no parameters.
    if head in BUILTIN_REWARDS and (not colon or BUILTIN_REWARDS[head].parameters):
        return RewardSpec(name or head, head, parameters=_parameters(text, head, rest), kind="builtin")
    if not colon:
        raise ValueError(
            f"`reward_function` {text!r}: there is no built-in reward of this name; they are "
            f"{', '.join(BUILTIN_REWARDS)}. Or give path/to/file.py:name or package.module:name"
        )
    return RewardSpec(name or source.rpartition(":")[2], source)


def _url(text: str) -> RewardSpec:
    name, url = _named(text)
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        right = False
    if not right or parts.fragment:
        raise ValueError(
            f"`reward_url` must be http://HOST:PORT/PATH or https://HOST:PORT/PATH, got {text!r}"
        )
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"`reward_url`: the address of {parts.hostname} must not hold a password; give the key in an "
            "environment variable with `reward_api_key_env`"
        )
    return RewardSpec(name or "url", url, kind="url")


def _parameters(text: str, head: str, rest: str) -> dict[str, float | str | None]:
    """The parameters of a built-in reward as given, and the others' defaults."""
    known = BUILTIN_REWARDS[head].parameters
    given: dict[str, float | str | None] = {}
    if rest.startswith("pattern=") and "pattern" in known:
        given["pattern"], rest = rest.removeprefix("pattern="), ""
        try:
            re.compile(given["pattern"])
        except re.error as error:
            raise ValueError(f"`reward_function` {text!r}: not a regular expression: {error}") from None
    for part in rest.split(",") if rest else ():
        key, _, value = part.partition("=")
        if key not in known or key in given or key == "pattern":
            raise ValueError(
                f"`reward_function` {text!r}: {head} takes {', '.join(known)} once each, got {part!r}"
            )
        given[key] = _positive(text, key, value)
    missing = [key for key, default in known.items() if default == REQUIRED and key not in given]
    if missing:
        raise ValueError(f"`reward_function` {text!r} needs {missing[0]}: give {head}:{missing[0]}=N")
    return {key: given.get(key, default) for key, default in known.items()}


def _positive(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    whole = key != "penalty"
    if not 0 < number < math.inf or (whole and number != int(number)):
        kind = "a whole number above 0" if whole else "a number above 0"
        raise ValueError(f"`reward_function` {text!r}: {key} must be {kind}, got {value!r}")
    return int(number) if whole else number


def _completed(spec: RewardSpec, max_new_tokens: int | None) -> RewardSpec:
    """With max_new_tokens where `max` was not given."""
    own = dict(spec.parameters)
    if "max" in own and own["max"] is None:
        own["max"] = max_new_tokens
    if own.get("cache") and own["max"] and own["cache"] > own["max"]:
        raise ValueError(
            f"`reward_function` {spec.name}: cache must be at most max (`max_new_tokens` where it is not "
            f"given), got cache {own['cache']} and max {own['max']}"
        )
    return replace(spec, parameters=own)
