"""Finds what of a step cannot come back from a bundle, in plain words, and changes the command by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl_corr.commands.incident.recorded_run import Launch, RecordedRun
from megatron_rl_corr.commands.incident.replay_command import BUNDLE, given_options, needing
from megatron_rl_corr.commands.incident.sample_files import BatchFiles
from megatron_rl_corr.commands.incident.start_point import StartPoint
from megatron_rl_corr.config.flags import flags_by_field
from megatron_rl_corr.core.auto_weights import LEVELS
from megatron_rl_corr.engines.secrets import without_lookalikes
from megatron_rl_corr.files import sha256_of

CORRECTION_FILE = "files/correction.yaml"
"""Where the file of --rollout-correction-config is in a bundle."""


@dataclass
class Findings:
    """Lacks of a step's replay, and how its command differs because of them."""

    lost: list[str] = field(default_factory=list)
    """Sentences."""
    changes: dict[str, Sequence[str] | None] = field(default_factory=dict)
    """Option -> words in the place of its flag; None: it is dropped."""
    copied: dict[str, Path] = field(default_factory=dict)
    """Name in the bundle -> file."""


def find_losses(
    run: RecordedRun,
    launch: Launch,
    start: StartPoint,
    batches: Sequence[BatchFiles],
    environment: Mapping[str, str],
) -> Findings:
    """Find what cannot come back of the last of these batches.

    Args:
        run, launch: that made it.
        start: where the replay begins.
        batches: all that are done again.
        environment: of this process, to know secrets by.

    Raises:
        ValueError: nothing can come back.
    """
    found, given = Findings(), given_options(launch)
    _check_launches(run, batches, found)
    _check_masks(given, batches)
    _check_routes(run, given, batches, found)
    _check_auto(run, given, start, batches, found)
    _check_reference(given, found)
    _check_correction_file(run, launch, given, environment, found)
    _check_state(launch, start, found)
    for batch in batches[-1:]:
        missing = [step for step in range(batch.first, batch.last + 1) if run.row(step) is None]
        if missing:
            found.lost.append(
                f"step {missing[0]} has no row in metrics.jsonl, as the run ended in it: there is nothing "
                "to compare the replay with"
            )
    return found


def _check_launches(run: RecordedRun, batches: Sequence[BatchFiles], found: Findings) -> None:
    first, *others = run.launches_of(batches[0].first, batches[-1].last)
    changed = [one.first_step for one in others if not one.makes_the_same(first)]
    if changed:
        found.lost.append(
            f"the trainer was started again with another command, ranks or versions at step {changed[-1]}, "
            f"between the checkpoint and the step: all steps from {batches[0].first} on are done with the "
            "last one"
        )


def _check_masks(given: Mapping[str, Any], batches: Sequence[BatchFiles]) -> None:
    flags = flags_by_field()
    truncated = [
        flags[name]
        for name, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0))
        if given.get(name, off) != off
    ]
    lacking = [batch for batch in batches if truncated and batch.lacks("support_lengths")]
    if lacking:
        raise ValueError(
            f"{lacking[0].paths[0]} has no support_ids, the ids that each token was drawn from with "
            f"{truncated[0]}: the training log-probs are renormalised on them, so the step can't be done "
            "again"
        )


def _check_routes(
    run: RecordedRun, given: Mapping[str, Any], batches: Sequence[BatchFiles], found: Findings
) -> None:
    flags, mode = flags_by_field(), given.get("router_replay", "off")
    if mode not in ("R3", "compare"):
        return
    if mode == "R3" and not any(batch.lacks("routed_experts_shape") for batch in batches):
        return
    found.changes |= dict.fromkeys(("router_replay", *needing("router_replay"), "save_routed_experts"), None)
    if mode == "compare":
        found.lost.append(
            f"the servers' experts are in no file, as {flags['router_replay']} compare keeps none: metrics "
            "of their agreement can't come back; training does not take them, and all else does"
        )
        return
    found.lost.append(
        f"the servers' experts were not saved ({flags['save_routed_experts']} does): the replay takes the "
        f"trainer's own, without {flags['router_replay']} R3, so log-probs, k3_kl, weights, rejections, "
        "loss and gradients are others"
    )
    rules = (run.settings.get("rollout_correction") or {}).get("rollout_rs")
    if rules and "routing" in str(rules):
        found.lost.append(
            f"{flags['rollout_rs']} has a rule of the routing, which is refused without experts: take it "
            "out of the command"
        )


def _check_auto(
    run: RecordedRun,
    given: Mapping[str, Any],
    start: StartPoint,
    batches: Sequence[BatchFiles],
    found: Findings,
) -> None:
    """A checkpoint keeps which weights auto had; else they are frozen as the rows have them."""
    if given.get("correction") is None:
        return
    rows = [run.row(batch.first) or {} for batch in batches]
    levels = [LEVELS[int(row["auto/level"])] for row in rows if "auto/level" in row]
    begun = start.auto_level or "token"
    if not levels or levels[0] == begun:
        return
    flags = flags_by_field()
    frozen = [
        flags["rollout_is"],
        levels[-1],
        flags["rollout_is_threshold"],
        repr(float(rows[-1]["auto/upper"])),
    ]
    # auto takes another one in the place of raw
    trained = (run.settings.get("rollout_correction") or {}).get("advantage")
    if trained is not None and given.get("advantage") is not None:
        frozen += [flags["advantage"], trained]
        found.changes["advantage"] = None
    found.changes["correction"] = frozen
    found.lost.append(
        f"the checkpoint does not say which weights {flags['correction']} auto had: the replay takes those "
        f"of step {batches[-1].first}, {' '.join(frozen)}; auto/* is not in its metrics"
    )
    if set(levels) != {levels[-1]}:
        found.lost.append(
            f"steps before {batches[-1].first} had other weights than these, so the policy that the step "
            "starts from is another one"
        )


def _check_reference(given: Mapping[str, Any], found: Findings) -> None:
    if given.get("reference_urls"):
        urls = " ".join(given["reference_urls"])
        found.lost.append(
            f"the reference's log-probs are in no file: the replay asks {urls} for them, and has the KL "
            "that these servers give"
        )
    if given.get("teacher_urls"):
        urls = " ".join(given["teacher_urls"])
        found.lost.append(
            f"the teacher's log-probs are in no file: the replay asks {urls} for them, and is distilled from "
            "what these servers have"
        )


def _check_correction_file(
    run: RecordedRun,
    launch: Launch,
    given: Mapping[str, Any],
    environment: Mapping[str, str],
    found: Findings,
) -> None:
    """The file of --rollout-correction-config goes with the bundle, where it is as the run has read it."""
    named, flag = given.get("rollout_correction_config"), flags_by_field()["rollout_correction_config"]
    path = None if named is None else run.located(named, launch)
    if path is None or sha256_of(path) != launch.record["files"].get(named):
        return  # changed_files tells it
    text = path.read_text(encoding="utf-8", errors="replace")
    if without_lookalikes(text, environment) == text:
        found.copied[CORRECTION_FILE] = path
        found.changes["rollout_correction_config"] = [flag, f"{BUNDLE}/{CORRECTION_FILE}"]
    else:
        found.lost.append(f"{path} holds something secret, and is not in the bundle; {flag} names it")


def changed_files(run: RecordedRun, launch: Launch, words: Sequence[str]) -> list[str]:
    """Files that words of a command name, and that are not as they were when the run was started: sentences.

    Args:
        run, launch: that recorded their hashes.
        words: of the command that does the step again.
    """
    found = []
    for named, sha256 in launch.record["files"].items():
        path = run.located(named, launch)
        if not any(named in (word, word.partition("=")[2], word.partition(":")[0]) for word in words):
            continue
        if path is None or not path.is_file():
            found.append(f"{named}, which the command names, is not there any more")
        elif sha256_of(path) != sha256:
            found.append(f"{path}, which the command names, has changed since the run was started")
    return found


def _check_state(launch: Launch, start: StartPoint, found: Findings) -> None:
    for save, what, load in (
        ("--no-save-optim", "the optimizer's state", "--no-load-optim"),
        ("--no-save-rng", "the state of random numbers", "--no-load-rng"),
    ):
        if save in launch.arguments and start.iteration:
            found.changes[save] = [load]
            found.lost.append(
                f"the checkpoint was saved without {what} ({save}), so the step's update is another one"
            )
