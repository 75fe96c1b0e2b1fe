"""Writes the bills of materials of the locks: CycloneDX 1.6 as JSON, a file a lock, in requirements/sbom.

    .venv/bin/python scripts/sbom.py

The same lock gives the same bytes: there is no time in them, and the serial number is made of the components.
"""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path

from audit import LOCKS, REQUIREMENTS, normal, pinned

from megatron_rl_corr import __version__

SBOM = REQUIREMENTS / "sbom"


def purl(name: str, version: str) -> str:
    """A package URL: PyPI's names are lower case with hyphens, and a + of a version is %2B."""
    return f"pkg:pypi/{normal(name)}@{version.replace('+', '%2B')}"


def bill(lock: Path) -> dict:
    """The bill of materials of a lock."""
    components = [
        {"type": "library", "bom-ref": purl(*pair), "name": pair[0], "version": pair[1], "purl": purl(*pair)}
        for pair in sorted(pinned(lock), key=lambda pair: normal(pair[0]))
    ]
    of = {"type": "application", "bom-ref": f"megatron-rl-corr/{lock.name}", "name": "megatron-rl-corr"}
    of |= {"version": __version__, "description": f"what requirements/{lock.name} installs beside it"}
    parts = json.dumps([of, components], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, parts)}",
        "version": 1,
        "metadata": {"component": of},
        "components": components,
        "dependencies": [{"ref": of["bom-ref"], "dependsOn": [one["bom-ref"] for one in components]}],
    }


def as_text(content: dict) -> str:
    """The file's text: a line a component."""
    lines = []
    for name, value in content.items():
        text = json.dumps(value)
        if name == "components":
            text = "[\n" + ",\n".join(f"  {json.dumps(one)}" for one in value) + "\n ]"
        lines.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def bills() -> dict[Path, str]:
    """File -> its text, of every lock."""
    return {SBOM / f"{name}.cdx.json": as_text(bill(REQUIREMENTS / name)) for name in LOCKS}


def main() -> int:
    SBOM.mkdir(exist_ok=True)
    for path, text in bills().items():
        path.write_text(text)
        print(path.relative_to(REQUIREMENTS.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
