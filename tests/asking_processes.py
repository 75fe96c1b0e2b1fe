"""The processes of this one that ask servers, as rollout/ingest/process.py starts them."""

import psutil


def asking_processes() -> list[psutil.Process]:
    """Those that have been started and not been waited for."""
    return [one for one in psutil.Process().children() if "ingest.worker" in " ".join(one.cmdline())]
