"""The JSON document: the contract of the command line (schema: rollout_audit/schema/report.schema.json)."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from rollout_audit import __version__
from rollout_audit.report import SCHEMA_VERSION, Note, Report


def to_document(report: Report) -> dict[str, Any]:
    """The report as one JSON object; a number that is not finite is None."""
    notes = [*report.notes, Note(report.correction)] if report.correction else report.notes
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "rollout-audit", "version": __version__},
        "command": report.command,
        "inputs": report.inputs,
        "settings": report.settings,
        "metrics": report.metrics,
        "audited": report.audited,
        "denominators": report.denominators,
        "findings": [_finite(asdict(finding)) for finding in report.findings],
        "gates": [asdict(gate) for gate in report.gates],
        "notes": [asdict(note) for note in notes],
        **_finite(report.extra),
    }


def to_json(document: dict[str, Any], one_line: bool = False) -> str:
    """RFC 8259: never NaN or Infinity. ASCII, so that any encoding of stdout has it and any file name passes."""
    return json.dumps(document, indent=None if one_line else 2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
