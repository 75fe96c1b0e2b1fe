"""A reward function that sleeps in one call of 16, raises in one of 50 and hangs in one of 200, and
writes down which.

PLANTED names the file of all calls so far, one letter each, which all workers share; SLEEP_S is
how long it sleeps.
"""

import fcntl
import os
import time

EVERY = {"sleep": 16, "raise": 50, "hang": 200}


def fate(number):
    """What happens in the number-th call, from 1; the rarest counts."""
    found = "right"
    for name, every in EVERY.items():
        if number % every == 0:
            found = name
    return found


def reward(prompt, output_ids, finish_reason):
    with open(os.environ["PLANTED"], "a") as calls:
        fcntl.flock(calls, fcntl.LOCK_EX)
        happens = fate(os.fstat(calls.fileno()).st_size + 1)
        calls.write({"right": ".", "sleep": "s", "raise": "r", "hang": "h"}[happens])
    if happens == "raise":
        raise RuntimeError("planted")
    time.sleep({"sleep": float(os.environ["SLEEP_S"]), "hang": 3600.0}.get(happens, 0.0))
    return float(sum(output_ids) % 7)


def quick(prompt, output_ids, finish_reason):
    """The run without."""
    return float(sum(output_ids) % 7)
