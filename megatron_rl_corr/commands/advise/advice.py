"""`megatron-rl-corr advise`: the weights that --rollout-correction auto takes for what a run measured.

Trains nothing: the rule needs two numbers a batch, which every run logs and saved samples give.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl_corr.commands.correct.compare import KeptBatch
from megatron_rl_corr.commands.samples.saved_samples import SavedRun
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.auto_weights import LEVELS, AutoWeights
from megatron_rl_corr.files import CONFIG_NAME, METRICS_NAME
from megatron_rl_corr.observability.metrics_file import read_metrics
from megatron_rl_corr.tables import readable, text_table

ESS, VARIANCE = "rollout_corr/ess_sequences", "rollout_corr/chi2_token"
CAUSES = (
    "The ratios of single tokens vary so much that no weights mend it. Find the cause first: a lower "
    "--rollout-max-lag, --router-replay R3 for MoE, a server's --dtype, `megatron-rl-corr doctor` for what "
    "it samples from, `diagnose` for shares by cause."
)


@dataclass(frozen=True)
class MeasuredBatch:
    """What the rule needs of a batch."""

    step: int
    sequences: int
    """Of one update."""
    ess: float
    variance: float
    level: float | None = None
    """auto/level, where the run chose its weights."""


def advice(paths: Sequence[str]) -> str:
    """The rule's choice behind each batch in a few lines, and the flags of the last.

    Args:
        paths: the folder of --rollout-log-dir; or files, or a folder, of --rollout-save-trajectories.

    Raises:
        ValueError: there is no batch with what the rule needs.
        OSError: there is no such file or folder.
    """
    folder = Path(paths[0])
    of_run = len(paths) == 1 and (folder / METRICS_NAME).is_file()
    batches = list(_of_run(folder) if of_run else _of_samples(SavedRun.find(paths)))
    if not batches:
        raise ValueError(f"{folder / METRICS_NAME}: no step has {ESS} and {VARIANCE}")
    return "\n".join(_lines(batches))


def _of_run(folder: Path) -> Iterator[MeasuredBatch]:
    updates = _updates_of_batch(folder)
    for row in read_metrics(folder / METRICS_NAME):
        if ESS in row:  # the first update of a batch
            yield MeasuredBatch(
                row["step"],
                max(1, round(row["rollout_corr/sequences"] / updates)),
                row.get("auto/ess", row[ESS]),
                row.get("auto/variance", row[VARIANCE]),
                row.get("auto/level"),
            )


def _updates_of_batch(folder: Path) -> int:
    """Parts that the run cut a batch into; 1 where its run.json is gone."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        return 1
    return json.loads(path.read_text(encoding="utf-8")).get("rollout", {}).get("updates_per_batch") or 1


def _of_samples(saved: SavedRun) -> Iterator[MeasuredBatch]:
    for step in sorted(saved.files):
        batch = KeptBatch.of(saved.samples(step))
        found = batch.metrics(RolloutCorrectionConfig())
        yield MeasuredBatch(step, batch.num_sequences, found[ESS], found[VARIANCE])


def _lines(batches: Sequence[MeasuredBatch]) -> Iterator[str]:
    weights = AutoWeights(batches[0].sequences)
    counts, last, others = dict.fromkeys(LEVELS, 0), None, 0
    rows = [("step", "sequences", "ESS / n", "variance", "weights of the next batch")]
    for batch in batches:
        others += batch.level is not None and batch.level != LEVELS.index(weights.level)
        weights = AutoWeights(batch.sequences, weights.level).after(batch.ess, batch.variance)
        counts[weights.level] += 1
        if weights.level != last or batch is batches[-1]:
            numbers = readable(batch.ess), readable(batch.variance)
            rows.append((str(batch.step), str(batch.sequences), *numbers, str(weights)))
        last = weights.level
    shares = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    yield f"{len(batches)} batches, of steps {batches[0].step} to {batches[-1].step}; behind them: {shares}"
    yield "where it changes, and at the end:"
    yield from text_table(rows, align="rrrrl")
    if others:
        yield f"the run had other weights in {others} of these steps: it began again in between"
    yield from _flags(weights)


def _flags(weights: AutoWeights) -> Iterable[str]:
    """What to give a run."""
    if weights.level == "hold":
        return [CAUSES]
    config = weights.corrected(RolloutCorrectionConfig())
    fixed = f"--rollout-is {config.rollout_is} --rollout-is-threshold {config.rollout_is_upper:.3g}"
    return [f"to let the run choose: --rollout-correction auto; to keep the last choice: {fixed}"]
