"""README.txt of a bundle: what it is of, how the step is done again, what of it cannot come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl_corr.commands.incident.compare import NOT_REPLAYED
from megatron_rl_corr.commands.incident.replay_command import ReplayCommand
from megatron_rl_corr.tables import one_message

BEGIN, END = "---- command ----", "---- end ----"
"""Lines around the command."""


def readme(facts: Mapping[str, Any], command: ReplayCommand, out: Path) -> str:
    """The text.

    Args:
        facts: of the manifest.
        command: that does the step again.
        out: the bundle's folder.
    """
    first, last = facts["replayed_steps"]
    lost = facts["cannot_come_back"]
    several = "" if first == last else f" It does the steps {first} to {last} (see the checkpoint below)."
    parts = [
        f"Step {facts['step']} of a run: {facts['why']}.",
        _list("Alerts of the step:", facts["alerts"]),
        f"Ledger of the mismatch: {facts['ledger']}" if facts["ledger"] else "",
        f"This does it again, and ends.{several} BUNDLE is this folder: mend the first line where it was "
        "moved.",
        f"{BEGIN}\n{command.as_text(out)}\n{END}",
        _hosts(command),
        "It asks no server, writes beside the bundle, into BUNDLE.replayed, and changes nothing else. "
        f"Paths are those of the run's machine, relative ones from {one_message(command.folder)}. "
        "Then\n\n    "
        "megatron-rl-corr incident --check BUNDLE --replayed BUNDLE.replayed/log\n\nsays which metrics "
        "are the same. In the same layout and with the same software all that it compares are, bit for "
        "bit; left out are "
        + ", ".join(f"{name}*" if name.endswith("/") else name for name in NOT_REPLAYED)
        + ". In another layout (other ranks in the first line of torchrun, other --...-parallel-size flags "
        "at the end of the command: the last one counts) the batch is the same, and sums in floating "
        "point differ by rounding.",
        _list("What cannot come back:", lost) or "All of the step that is compared can come back.",
        _start(facts["start"]),
        _list("Versions that the run had:", [f"{name} {value}" for name, value in facts["versions"].items()]),
        "samples/ holds prompts and responses as ids, labels and rewards: it is as confidential as the "
        "data. manifest.json has the hash of each file; `megatron-rl-corr incident --check BUNDLE` looks "
        "at them.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _hosts(command: ReplayCommand) -> str:
    if command.processes <= command.processes_of_host:
        return ""
    return (
        "The run had several hosts: start the command on each, with --node_rank and --master_addr before "
        "-m megatron_rl_corr.launch."
    )


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  - {one_message(line)}" for line in lines)]) if lines else ""


def _start(start: Mapping[str, Any]) -> str:
    if start["iteration"] == 0:
        return (
            "The replay begins where the run began, at iteration 0: with the weights of "
            "--rollout-hf-checkpoint, or --pretrained-checkpoint. They are not in the bundle."
        )
    if start["in_bundle"]:
        return f"The checkpoint of iteration {start['iteration']} is in checkpoints/."
    size = sum(one["bytes"] for one in start["files"].values()) / 2**30
    return (
        f"The checkpoint of iteration {start['iteration']} is not in the bundle: {len(start['files'])} "
        f"files, {size:.2f} GiB, were in {start['folder']}; manifest.json lists them. Where it is "
        "elsewhere, change --load."
    )
