"""From a state to a diagnosis: gathers the evidence, lets the rules speak, and puts their answer into the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rollout_audit.audit import build_report
from rollout_audit.diagnosis.engine import Evidence, diagnose, states, versions_of
from rollout_audit.diagnosis.magnitude import Band
from rollout_audit.diagnosis.over_steps import Step
from rollout_audit.diagnosis.view import View
from rollout_audit.metrics.trend import FileDifference
from rollout_audit.readers.layout import by_step
from rollout_audit.report import Report
from rollout_audit.state import AuditState


def build_diagnosis(state: AuditState, bands: dict[str, Band], lacking: Sequence[str] | None = None) -> Report:
    """The report of `diagnose`: metrics as elsewhere, findings by all rules, the verdict."""
    report = build_report(state, lacking)
    assert state.sample is not None
    evidence = Evidence(
        View.of(state.sample),
        report.findings,
        bands,
        report.audited,
        state.missing(),
        _steps(state),
        versions_of(report.inputs),
    )
    answer = diagnose(evidence)
    report.findings = answer.findings
    known = states(evidence)
    report.extra = {
        "verdict": answer.verdict,
        "bands": {
            metric: {
                "value": report.audited.get(metric),
                "state": known[metric],
                "ok": band.ok,
                "bad": band.bad,
                "source": band.source,
            }
            for metric, band in bands.items()
        },
        "remaining_abs_log_ratio": answer.remaining,
        "looked_at": answer.looked_at,
        "unsure": [asdict(item) for item in answer.unsure],
        **report.extra,
    }
    return report


def _steps(state: AuditState) -> list[Step]:
    """The training steps that paths name, in order."""
    assert state.trend is not None
    metadata = {item["counted_as"]: item for item in state.inputs}
    result = []
    for number, paths in by_step(state.trend.files).items():
        if number is None:
            continue
        total = FileDifference()
        for path in paths:
            total.merge(state.trend.files[path])
        known = [metadata[path] for path in paths if path in metadata]
        result.append(Step(number, total.mean, total.standard_error, versions_of(known) if known else None))
    return result
