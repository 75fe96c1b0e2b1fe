"""Examinations as a table for people and as JSON for programs."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_rl_corr.doctor.findings import DEFECTS, KINDS, Examination, Finding, exit_status
from megatron_rl_corr.tables import text_table

MARKS = {"ok": "ok", "note": "note", "finding": "FOUND", "failed": "FAILED"}


def as_table(examinations: list[Examination]) -> str:
    """A table for each server, then the findings by kind of mismatch, each with what mends it, then one line."""
    lines = []
    for examination in examinations:
        lines.append(examination.server)
        rows = []
        for row in examination.rows:
            rows.append((f"{MARKS[row.status]:6}", row.check, row.said))
            for bucket, numbers in row.numbers.get("buckets", {}).items():
                rows.append(("", "", f"  {f'pi_rollout {bucket}':18}  {_distance(numbers)}"))
        lines += [*text_table(rows, indent="  "), ""]
    findings = [finding for examination in examinations for finding in examination.findings]
    for kind, means in KINDS.items():
        of_kind = [finding for finding in findings if finding.kind == kind]
        if of_kind:
            lines.append(f"{kind} mismatch: {means}")
            for finding in of_kind:
                lines += _described(finding)
            lines.append("")
    return "\n".join([*lines, _summary(examinations, len(findings))])


def as_json(examinations: list[Examination]) -> str:
    """{"exit_status", "servers": [{"server", "rows", "findings"}]}; numbers that are not finite are null."""
    servers = [
        {
            "server": examination.server,
            "rows": [asdict(row) for row in examination.rows],
            "findings": [
                {"name": f.name, "kind": f.kind, "said": f.said, "remedy": f.remedy, "numbers": dict(f.numbers)}
                for f in examination.findings
            ],
        }
        for examination in examinations
    ]
    return json.dumps(_finite({"exit_status": exit_status(examinations), "servers": servers}), indent=2)


def _described(finding: Finding) -> list[str]:
    return [
        f"  {finding.name} ({finding.server})",
        f"    {DEFECTS[finding.name].means}",
        f"    measured: {finding.said}",
        f"    mend: {finding.remedy}",
    ]


def _summary(examinations: list[Examination], findings: int) -> str:
    failed = [examination.server for examination in examinations if examination.failed]
    found = "nothing found" if not findings else f"{findings} finding{'s' if findings > 1 else ''}"
    return f"{found}; could not ask everything of {', '.join(failed)}" if failed else found


def _distance(numbers: Mapping[str, float]) -> str:
    sizes = f"max |D| {numbers['max']:.1e}, mean {numbers['mean']:.1e}, k3 {numbers['k3']:.1e}"
    return f"{sizes} over {numbers['tokens']} tokens"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
