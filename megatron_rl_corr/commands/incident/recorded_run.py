"""A run as its folder tells it: rows, settings, how it was started, and where its files are now."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl_corr.engines.secrets import without_secret_words
from megatron_rl_corr.files import CONFIG_NAME, METRICS_NAME
from megatron_rl_corr.observability.launch_record import LAUNCHES
from megatron_rl_corr.observability.metrics_file import read_metrics


@dataclass(frozen=True)
class Launch:
    """One start of the trainer, as `launch_record` describes it.

    Example: Launch(first_step=201, record={"script": "pretrain_gpt.py", "arguments": ["--lr", "1e-6"], ...}).
    """

    first_step: int
    """Step that it began with, from 1."""
    record: Mapping[str, Any]

    @property
    def arguments(self) -> list[str]:
        """Flags and values of the script."""
        return list(self.record["arguments"])

    def value(self, flag: str) -> str | None:
        """The last value of a flag that takes one; None where it is not given."""
        found, words = None, self.arguments
        for word, following in zip(words, [*words[1:], ""], strict=True):
            name, joined, value = word.partition("=")
            if name == flag:
                found = value if joined else following
        return found

    def makes_the_same(self, other: Launch) -> bool:
        """True if both have the same command, ranks, environment and versions."""
        names = ("script", "arguments", "processes", "environment", "versions", "files")
        return all(self.record.get(name) == other.record.get(name) for name in names)


@dataclass(frozen=True)
class RecordedRun:
    """The folder of --rollout-log-dir, read."""

    folder: Path
    """Where it is now."""
    rows: list[dict[str, Any]]
    """Steps of metrics.jsonl."""
    settings: dict[str, Any]
    """Content of run.json."""
    launches: tuple[Launch, ...]

    @classmethod
    def read(cls, run_dir: str | os.PathLike) -> RecordedRun:
        """Read the folder.

        Raises:
            OSError: metrics.jsonl or run.json is not there.
            ValueError: one of them cannot be read, or does not say how the run was started.
        """
        folder = Path(run_dir)
        for name in (METRICS_NAME, CONFIG_NAME):
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"no {name} in {folder}; give the folder that --rollout-log-dir named"
                )
        path = folder / CONFIG_NAME
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
            # whoever has put a run.json here may not have left secrets out
            settings[LAUNCHES] = [
                one | {"arguments": without_secret_words(one["arguments"], os.environ)}
                for one in settings[LAUNCHES]
            ]
            launches = tuple(Launch(one["first_step"], one) for one in settings[LAUNCHES])
        except KeyError as error:
            raise ValueError(
                f"{path} does not say how the run was started ({error} is missing): it was written by an "
                "earlier version, and no command can be made of it; give --rollout-replay by hand "
                "(docs/guides/samples.md)"
            ) from None
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read: {error}; repair it") from None
        if not isinstance(settings.get("rollout"), dict):
            raise ValueError(
                f"{path} has no settings of rollouts: Megatron's own RL (train_rl.py) keeps its samples, "
                "and they can't be replayed"
            )
        return cls(folder, read_metrics(folder / METRICS_NAME), settings, launches)

    def row(self, step: int) -> dict[str, Any] | None:
        """The metrics of a step; None where it has none, as one that the run ended in."""
        return next((row for row in self.rows if row["step"] == step), None)

    def launch_of(self, step: int) -> Launch:
        """The start that has made a step."""
        before = [one for one in self.launches if one.first_step <= step]
        if not before:
            raise ValueError(
                f"{self.folder / CONFIG_NAME} knows of no start before step {step}; the first one began "
                f"with step {self.launches[0].first_step}"
            )
        return before[-1]

    def launches_of(self, first: int, last: int) -> Sequence[Launch]:
        """The starts that have made the steps from first to last."""
        return [self.launch_of(first), *(one for one in self.launches if first < one.first_step <= last)]

    def located(self, named: str, launch: Launch) -> Path | None:
        """Where what a launch has named is now, beside a run's folder that was moved too; None: nowhere.

        Args:
            named: a path of its command line.
            launch: that named it.
        """
        began = Path(launch.record["folder"])
        then = Path(os.path.normpath(began / named))
        log_dir = launch.value("--rollout-log-dir")
        places = [then]
        if log_dir is not None:
            beside = os.path.relpath(then, os.path.normpath(began / log_dir))
            # first, as what is at the old place may be of another run meanwhile
            places.insert(0, Path(os.path.normpath(self.folder.resolve() / beside)))
        return next((path for path in places if path.exists()), None)
