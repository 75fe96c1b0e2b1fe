"""The flags of the connection to the rollout servers: how many samples in flight, how long to wait, who may ask."""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass
from typing import Any

PREFIX = "--rollout-"


@dataclass(frozen=True)
class ClientOptions:
    """RolloutClient's, of the same names, but for the key: api_key_env is the environment variable that holds it."""

    max_concurrency: int
    max_per_server: int | None
    timeout_s: float
    read_timeout_s: float
    outage_timeout_s: float
    update_timeout_s: float
    max_retries: int
    max_continuations: int
    ca_file: str | None
    api_key_env: str | None

    def arguments(self) -> dict[str, Any]:
        """For RolloutClient. Reads the key, which is in no flag, no log and no file."""
        values = dataclasses.asdict(self)
        name = values.pop("api_key_env")
        return values | {"api_key": None if name is None else os.environ[name]}


def add_client_arguments(group: Any) -> None:
    """Add them to a group of a parser."""
    add = group.add_argument
    add("--rollout-max-concurrency", metavar="N", type=int, default=64,
        help="samples in flight per data-parallel replica (default 64)")
    add("--rollout-max-per-server", metavar="N", type=int, default=None,
        help="samples in flight per data-parallel replica at each server (default: as many as over all)")
    add("--rollout-timeout-s", metavar="S", type=float, default=600.0,
        help="longest wait for the answer to a pause or to a bucket of weights; samples have no such limit "
        "(default 600)")
    add("--rollout-read-timeout-s", metavar="S", type=float, default=60.0,
        help="longest time without progress of the samples at a server, before it is left out; waiting in its queue "
        "and pauses don't count (default 60)")
    add("--rollout-outage-timeout-s", metavar="S", type=float, default=10.0,
        help="longest wait for a server to come back when none is left, before the run ends (default 10)")
    add("--rollout-update-timeout-s", metavar="S", type=float, default=3600.0,
        help="longest wait, in a push, for a server that reads or writes all of its weights: a folder, checksums, the "
        "end of an update (default 3600)")
    add("--rollout-max-retries", metavar="N", type=int, default=3,
        help="failed requests of one sample that are asked again (default 3)")
    add("--rollout-max-continuations", metavar="N", type=int, default=8,
        help="times that one sample is continued that a server cut short (default 8)")
    add("--rollout-api-key-env", metavar="NAME", default=None,
        help="environment variable that holds the servers' --api-key")
    add("--rollout-ca-file", metavar="PEM", default=None,
        help="certificates that https servers are trusted by, instead of the system's")


def client_options(values: argparse.Namespace) -> ClientOptions:
    """ValueError for what is out of range or missing."""
    names = [field.name for field in dataclasses.fields(ClientOptions)]
    options = ClientOptions(**{name: getattr(values, f"rollout_{name}") for name in names})
    for name in ("max_concurrency", "max_per_server", "timeout_s", "read_timeout_s", "update_timeout_s"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"{PREFIX}{name.replace('_', '-')} must be positive, got {value}")
    for name in ("outage_timeout_s", "max_retries", "max_continuations"):
        value = getattr(options, name)
        if not value >= 0:
            raise ValueError(f"{PREFIX}{name.replace('_', '-')} must be at least 0, got {value}")
    if options.api_key_env is not None and not os.environ.get(options.api_key_env):
        raise ValueError(f"--rollout-api-key-env: the environment variable {options.api_key_env} is not set; export it")
    if options.ca_file is not None and not os.path.isfile(options.ca_file):
        raise ValueError(f"--rollout-ca-file: there is no file {options.ca_file}")
    return options
