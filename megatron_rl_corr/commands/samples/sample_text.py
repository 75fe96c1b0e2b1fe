"""`megatron-rl-corr samples`: a step's samples as text on a terminal, each token coloured by D."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import groupby
from typing import TextIO

from megatron_rl_corr.commands.samples.sample_view import (
    SHADES,
    SampleView,
    ViewedMessage,
    ViewedSpan,
    ViewSettings,
    views_of,
)
from megatron_rl_corr.commands.samples.saved_samples import SavedRun, chosen, episodes_of

INDENT = " " * 6
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
    found = chosen(samples, group=arguments.group, order=arguments.order)
    shown, rejections = found[: arguments.limit], saved.rejections(samples)
    settings, count = ViewSettings(tokenizer, tool_format=saved.tool_format), len(episodes_of(samples))
    coloured = has_colours(stream) if arguments.color == "auto" else arguments.color == "always"
    words = f"step {step}" if step else "files without a step in their names"
    print(
        f"{words}: {len(shown)} of {len(found)} samples"
        + ("" if len(found) == count else f" (of {count} in all)")
        + f"; steps with files: {_steps(saved)}",
        file=stream,
    )
    if coloured:
        print(legend(), file=stream)
    for own in shown:
        views = views_of([samples[at] for at in own], [rejections[at] for at in own], settings)
        print(
            "\n" + "\n".join(line for view in views for line in lines_of(view, coloured=coloured)),
            file=stream,
        )


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
    """A sample's lines: its head, its notes, the prompt, the response, or the messages of a conversation.
    Their texts are indented behind their first lines, so that none can be taken for a head.
    """
    yield f"{BOLD}{view.head}{RESET}" if coloured else view.head
    yield from (note.replace("\n", f"\n{INDENT}") for note in view.notes)
    for message in view.conversation:
        yield (
            f"  {BOLD}{message.role}{RESET} | {message.words}"
            if coloured
            else (f"  {message.role} | {message.words}")
        )
        if message.spans:
            yield INDENT + _text(message, coloured=coloured).replace("\n", f"\n{INDENT}")
    if view.conversation:
        return
    prompt = view.prompt.replace("\n", f"\n{INDENT}")
    yield f"{DIM}prompt:{RESET} {prompt}" if coloured else f"prompt: {prompt}"
    response = "".join(_span(span) if coloured else _plain(span) for span in view.response)
    response = response.replace("\n", f"\n{INDENT}")
    yield f"{DIM}response:{RESET} {response}" if coloured else f"response: {response}"


def _text(message: ViewedMessage, *, coloured: bool) -> str:
    """In a message of the policy, what it did not sample is set apart; of other messages that is all."""
    if coloured:
        return "".join(map(_span, message.spans))
    if not message.is_policy:
        return "".join(span.text for span in message.spans)
    texts = [
        (is_foreign, "".join(span.text for span in own))
        for is_foreign, own in groupby(message.spans, key=lambda span: span.environment)
    ]
    return "".join(f"⟦{text}⟧" if is_foreign else text for is_foreign, text in texts)


def _span(span: ViewedSpan) -> str:
    if span.environment:
        return DIM + span.text.replace("\n", f"{RESET}\n{DIM}") + RESET
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
