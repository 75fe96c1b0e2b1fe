"""What a run has left in its folder: the notes of its script, and its events."""

import json


def notes_of(folder, what):
    """Lines of notes.jsonl of this kind."""
    lines = (folder / "notes.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["what"] == what]


def events_of(folder, kind):
    """Those of this kind, in their order."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["kind"] == kind]
