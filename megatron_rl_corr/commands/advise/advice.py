"""`megatron-rl-corr advise`: the weights that --rollout-correction auto takes for what a run measured.

Trains nothing: the rule needs three numbers a batch, which every run logs and saved samples give.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl_corr.commands.correct.compare import KeptBatch
from megatron_rl_corr.commands.samples.saved_samples import SavedRun, run_setting
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.auto_weights import LEVELS, AutoWeights, MeasuredMismatch
from megatron_rl_corr.files import METRICS_NAME
from megatron_rl_corr.observability.metrics_file import read_metrics
from megatron_rl_corr.rollout.sample_file import read_batch
from megatron_rl_corr.tables import readable, text_table


@dataclass(frozen=True)
class MeasuredBatch:
    """What the rule needs of a batch."""

    step: int
    sequences: int
    """n, of one update."""
    mismatch: MeasuredMismatch
    level: float | None = None
    """auto/level, where the run chose its weights."""


def advice(paths: Sequence[str]) -> str:
    """The rule's choice behind each batch in a few lines, and the flags of the last.

    Args:
        paths: the folder of --rollout-log-dir; or files, or a folder, of --rollout-save-trajectories.

    Raises:
        ValueError: there is no batch with what the rule needs, or files of a step are missing.
        OSError: there is no such file or folder.
    """
    folder = Path(paths[0])
    of_run = len(paths) == 1 and (folder / METRICS_NAME).is_file()
    batches = list(_of_run(folder) if of_run else _of_samples(SavedRun.find(paths)))
    if not batches:
        raise ValueError(f"{paths[0]}: no step has sequences whose mismatch was measured")
    advantage = run_setting(folder, "advantage", "rollout_correction") if of_run else None
    return "\n".join(_lines(batches, advantage))


def _of_run(folder: Path) -> Iterator[MeasuredBatch]:
    updates = _updates_of_batch(folder)
    for row in read_metrics(folder / METRICS_NAME):
        if row.get("update", 1) != 1:
            continue
        try:
            mismatch, sequences = MeasuredMismatch.of(row), row["rollout_corr/sequences"]
        except KeyError:  # an older version's, or a step that was left out
            continue
        if not math.isnan(mismatch.ess):
            own = max(1, round(sequences / updates))
            yield MeasuredBatch(row["step"], own, mismatch, row.get("auto/level"))


def _updates_of_batch(folder: Path) -> int:
    """Parts that the run cut a batch into, where its metrics are of the whole batch; 1 without a run.json."""
    if run_setting(folder, "bypass_mode", "rollout_correction"):
        return 1  # the loss measures, one update at a time
    return run_setting(folder, "updates_per_batch") or 1


def _of_samples(saved: SavedRun) -> Iterator[MeasuredBatch]:
    for step, files in sorted(saved.files.items()):
        known = read_batch(files[0])
        if known is not None and len(files) != known.replicas:
            raise ValueError(
                f"{files[0]}: step {step} has {known.replicas} files, one of each replica, got {len(files)}; "
                "give all of them, or their folder"
            )
        batch = KeptBatch.of(saved.samples(step))
        numbers = batch.metrics(RolloutCorrectionConfig())
        if "rollout_corr/ess_sequences" in numbers:  # a token is valid
            sequences = max(1, round(batch.num_sequences / (1 if known is None else known.updates)))
            yield MeasuredBatch(step, sequences, MeasuredMismatch.of(numbers))


def _lines(batches: Sequence[MeasuredBatch], advantage: str | None) -> Iterator[str]:
    weights = AutoWeights(batches[0].sequences)
    counts, last, others = dict.fromkeys(LEVELS, 0), None, 0
    rows = [("step", "n", "ESS / n", "mean w", "weights of the next batch")]
    for batch in batches:
        others += batch.level is not None and batch.level != LEVELS.index(weights.level)
        found = batch.mismatch
        weights = AutoWeights(batch.sequences, weights.level).after(found)
        counts[weights.level] += 1
        if weights.level != last or batch is batches[-1]:
            measured = (readable(value) for value in (found.ess, found.mean_product))
            rows.append((str(batch.step), str(batch.sequences), *measured, str(weights)))
        last = weights.level
    shares = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    yield (
        f"{len(batches)} {'batch' if len(batches) == 1 else 'batches'}, of steps {batches[0].step} to "
        f"{batches[-1].step}; chosen for the next one: {shares}"
    )
    yield "where it changes, and at the end:"
    yield from text_table(rows, align="rrrrl")
    if others:
        yield f"the run had other weights in {others} of these steps: it began again in between"
    config = weights.corrected(RolloutCorrectionConfig())
    fixed = f"--rollout-is {config.rollout_is} --rollout-is-threshold {config.rollout_is_upper:.6g}"
    if advantage is not None:
        fixed += f" --rollout-advantage {advantage}"
    if counts[weights.level] < len(batches):
        yield "no fixed flags do what these batches asked for: the last choice is for the policy of now alone"
    yield f"to let the run choose: --rollout-correction auto; to keep the last choice: {fixed}"
