"""What happened while samples were collected, as numbers that only grow: a step's are differences of two readings."""

from dataclasses import dataclass


@dataclass
class Counts:
    """Of one client, since it was made."""

    samples: int = 0
    """Samples returned."""
    tokens: int = 0
    """Their response tokens."""
    prefilled: int = 0
    """Prompt tokens of all requests that a server had not cached, and computed."""
    stop: int = 0
    """Samples that ended with a stop id."""
    length: int = 0
    """Samples that ended with max_new_tokens."""
    abort: int = 0
    """Samples cut short, and returned so because max_continuations were used up."""
    continuations: int = 0
    """Requests that took up an aborted sample where it was cut."""
    retries: int = 0
    """Requests sent again, because the server failed or did not answer; no token of the failed ones is used."""
    left_out: int = 0
    """Times that a server was left out."""
    rejoined: int = 0
    """Times that one came back."""
    stale: int = 0
    """Times that a server was refused because its weights were not the trainer's."""
    nonfinite_logprobs: int = 0
    """Tokens returned whose log-prob was null, NaN or infinite; NaN in the trajectory."""
