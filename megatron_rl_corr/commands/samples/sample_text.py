"""`megatron-rl-corr samples`: a step's samples as text on a terminal, each token coloured by D."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import TextIO

from megatron_rl_corr.commands.samples.sample_view import SHADES, SampleView, ViewedSpan, view_of
from megatron_rl_corr.commands.samples.saved_samples import SavedRun, chosen

RESET, BOLD, DIM, STRUCK = "\033[0m", "\033[1m", "\033[2m", "\033[9m"
BACKGROUNDS = {
    "n1": 230,
    "n2": 222,
    "n3": 214,
    "n4": 208,
    "p1": 195,
    "p2": 153,
    "p3": 111,
    "p4": 75,
}
"""Shade -> colour of 256: orange where the trainer finds a token less likely, blue where
more; black on it.
"""


def run(arguments: argparse.Namespace, stream: TextIO) -> None:
    """Print what the command's arguments ask for.

    Raises:
        FileNotFoundError, ValueError: as `SavedRun` and `chosen`.
    """
    saved = SavedRun.find(arguments.paths)
    step = max(saved.files) if arguments.step is None else arguments.step
    samples = saved.samples(step)
    tokenizer = None if arguments.ids else saved.tokenizer(step, arguments.tokenizer)
    places = chosen(samples, group=arguments.group, order=arguments.order)
    shown, rejections = places[: arguments.limit], saved.rejections(samples)
    coloured = has_colours(stream) if arguments.color == "auto" else arguments.color == "always"
    words = f"step {step}" if step else "files without a step in their names"
    print(
        f"{words}: {len(shown)} of {len(places)} samples"
        + ("" if len(places) == len(samples) else f" (of {len(samples)} in all)")
        + f"; steps with files: {_steps(saved)}",
        file=stream,
    )
    if coloured:
        print(legend(), file=stream)
    for place in shown:
        view = view_of(samples[place], tokenizer, rejections[place])
        print("\n" + "\n".join(lines_of(view, coloured=coloured)), file=stream)


def has_colours(stream: TextIO) -> bool:
    """True if the stream is a terminal that shows colours, and the user wants them (NO_COLOR)."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def legend() -> str:
    """What the colours mean, in one line."""
    shades = [
        f"{'<= -' if sign == 'n' else '>= '}{SHADES[place - 1]:g}" for sign in "np" for place in (1, 2, 3, 4)
    ]
    names = [f"{sign}{place}" for sign in "np" for place in (1, 2, 3, 4)]
    cells = [_painted(f" {shade} ", name) for shade, name in zip(shades, names, strict=True)]
    return (
        f"D = train - rollout log-prob: {' '.join(cells)}; {STRUCK}not in the loss{RESET}; {DIM}not "
        f"sampled{RESET}"
    )


def lines_of(view: SampleView, *, coloured: bool) -> Iterator[str]:
    """A sample's lines: its head, its notes, the prompt, the response."""
    yield f"{BOLD}{view.head}{RESET}" if coloured else view.head
    yield from view.notes
    yield f"{DIM}prompt:{RESET} {view.prompt}" if coloured else f"prompt: {view.prompt}"
    response = "".join(_span(span) if coloured else _plain(span) for span in view.response)
    yield f"{DIM}response:{RESET} {response}" if coloured else f"response: {response}"


def _span(span: ViewedSpan) -> str:
    if span.environment:
        return f"{DIM}{span.text}{RESET}"
    return (
        _painted((STRUCK if span.rejected else "") + span.text, span.shade)
        if span.shade or span.rejected
        else (span.text)
    )


def _painted(text: str, shade: str) -> str:
    """The text on its shade, line by line, as a terminal would colour the rest of a line."""
    if shade:
        text = f"\033[30;48;5;{BACKGROUNDS[shade]}m{text}"
    return text.replace("\n", f"{RESET}\n") + RESET


def _plain(span: ViewedSpan) -> str:
    """Without colours: what an environment returned in double brackets."""
    return f"⟦{span.text}⟧" if span.environment else span.text


def _steps(saved: SavedRun) -> str:
    steps = sorted(step for step in saved.files if step)
    if len(steps) < 2:
        return ", ".join(map(str, steps)) or "none"
    return f"{len(steps)}, {steps[0]} to {steps[-1]}"
