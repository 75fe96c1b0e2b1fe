"""exact.json: what was compared, with which releases and modes, and that it held."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl_corr.files import sha256_of_json, write_atomically

NAME = "exact.json"
"""The certificate, in --rollout-log-dir."""
_SAYS = (
    "every sampled token's log-prob in training is at most `ulps_allowed` units in the last place of the "
    "server's number type from the server's"
)


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a certificate without its own digest, as JSON with sorted keys."""
    return sha256_of_json({name: value for name, value in content.items() if name != "sha256"})


def read_certificate(path: Path) -> dict[str, Any]:
    """A certificate that no one has changed.

    Raises:
        ValueError: its digest is not that of its content, or it is no JSON.
        OSError: it can't be read.
    """
    try:
        content = json.loads(path.read_text())
        intact = content["sha256"] == digest_of(content)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        intact = False
    if not intact:
        raise ValueError(f"{path} is no certificate as a run has written it; move it away")
    return content


@dataclass
class Certificate:
    """What a run has proven so far: of each start a part, the last of which grows with every batch.

    Example of a part: {"first_step": 1, "last_step": 40, "tokens": 81920, "ulps_max": 0.0, "log_ratio_max":
    0.0, "first_weights": 0, "last_weights": 39, "number_type": "float32", "releases": {...}, "modes": {...}}.
    """

    folder: Path
    ulps_allowed: float
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """Parts of the starts before."""
    ended: list[dict[str, Any]] = field(default_factory=list)
    """Starts before that a token ended: their steps and tokens."""
    part: dict[str, Any] = field(default_factory=dict)
    """This start's."""

    @classmethod
    def begun(cls, folder: Path, ulps_allowed: float, iteration: int, **facts: Any) -> Certificate:
        """That of a run which goes on behind `iteration` steps; those of a run from its beginning are new.

        Args:
            facts: of this start's part: number type, releases, modes.

        Raises:
            ValueError: the folder's certificate was changed, or allows another distance.
        """
        earlier, ended, path = [], [], folder / NAME
        if iteration and path.exists():
            before = read_certificate(path)
            if before["ulps_allowed"] != ulps_allowed:
                raise ValueError(
                    f"--rollout-expect-exact {ulps_allowed:g}: {path} was begun with "
                    f"{before['ulps_allowed']:g}; give that, or move the file away"
                )
            # A step behind the checkpoint that the run goes on from is made, and compared, once more.
            earlier = [one for one in before["parts"] if one["first_step"] <= iteration]
            ended = before.get("ended_before", [])
            if not before["held"]:
                ended = [*ended, {name: before[name] for name in ("ended_in_step", "token")}]
        return cls(folder, ulps_allowed, earlier, ended, dict(facts))

    def add(self, step: int, weights: int, numbers: Mapping[str, float]) -> None:
        """Count a batch that held, and write the file.

        Args:
            step: the batch's first, from 1.
            weights: the version that sampled it.
            numbers: of the step, by their logged names.
        """
        part = self.part
        part.setdefault("first_step", step)
        part.setdefault("first_weights", weights)
        part |= {"last_step": step, "last_weights": weights}
        part["tokens"] = part.get("tokens", 0) + int(numbers["exact/tokens"])
        for name in ("ulps_max", "log_ratio_max"):
            value = numbers[f"exact/{name}"]
            # A batch without a token has no largest distance.
            part[name] = max(part.get(name, 0.0), value if value == value else 0.0)
        self._write({"held": True})

    def refute(self, step: int, token: Mapping[str, Any]) -> None:
        """Write what did not hold. token: the first one that is apart."""
        self._write({"held": False, "ended_in_step": step, "token": dict(token)})

    def _write(self, verdict: Mapping[str, Any]) -> None:
        parts = [*self.earlier, *([self.part] if "tokens" in self.part else [])]
        content = {
            "says": _SAYS,
            "ulps_allowed": self.ulps_allowed,
            **verdict,
            "tokens": sum(one["tokens"] for one in parts),
            "ulps_max": max((one["ulps_max"] for one in parts), default=0.0),
            "log_ratio_max": max((one["log_ratio_max"] for one in parts), default=0.0),
            "weights_not_compared": _gaps(parts),
            "ended_before": self.ended,
            "parts": parts,
        }
        if "tokens" not in self.part:
            content["start"] = self.part
        written = json.dumps(content | {"sha256": digest_of(content)}, indent=1)
        write_atomically(self.folder / NAME, (written + "\n").encode())


def _gaps(parts: list[dict[str, Any]]) -> list[list[int]]:
    """[first, last] of weights, from 0 on, whose batches no part has compared: the flag was not given, or
    another folder has their certificate.
    """
    gaps, expected = [], 0
    for first, last in sorted((one["first_weights"], one["last_weights"]) for one in parts):
        if first > expected:
            gaps.append([expected, first - 1])
        expected = max(expected, last + 1)
    return gaps
