"""--fail-if: conditions on metrics that decide the exit status, so that no script has to."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Iterable

from rollout_audit.errors import AuditError
from rollout_audit.report import Gate, Number, Report

_OPERATORS = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(r"^\s*([\w./]+)\s*(<=|>=|==|!=|<|>)\s*(\S+)\s*$")


def parse(expression: str) -> tuple[str, str, float]:
    """(metric, operator, number) of 'METRIC OP NUMBER'. Raises AuditError for anything else."""
    match = _FORM.match(expression)
    try:
        # Python reads "0.5_2" as 0.52; in a threshold it is a pair of bounds.
        number = float(match.group(3)) if match and "_" not in match.group(3) else math.nan
    except ValueError:
        number = math.nan
    if match is None or not math.isfinite(number):
        raise AuditError(
            f"--fail-if '{expression}': not understood",
            wanted="'METRIC OP NUMBER', OP one of " + " ".join(_OPERATORS),
            do="for example --fail-if 'rollout_corr/k3_kl > 0.001'",
        )
    return match.group(1), match.group(2), number


def find_key(name: str, report: Report) -> str | None:
    """The full key of a metric: as written, by its last part among `metrics`, else among `audited`.

    A short name that both have means the framework's value; `audited/NAME` means the other. Raises AuditError when
    a short name fits several metrics; None when it fits none.
    """
    values = all_values(report)
    if name in values:
        return name
    short = [key for key in report.metrics if key.rsplit("/", 1)[-1] == name]
    if len(short) > 1:
        raise AuditError(f"--fail-if: {name} is ambiguous", wanted="one metric", found=", ".join(short))
    if short:
        return short[0]
    return f"audited/{name}" if f"audited/{name}" in values else None


def all_values(report: Report) -> dict[str, Number]:
    """Every number of a report by its full key."""
    return report.metrics | {f"audited/{key}": value for key, value in report.audited.items()}


def check(expressions: Iterable[str], report: Report) -> list[Gate]:
    """The gates of a report. One whose metric is null or absent fails: a lost metric is no pass."""
    return [_check(expression, report) for expression in expressions]


def check_findings(severity: str | None, report: Report) -> list[Gate]:
    """The gate of --fail-on: no finding of this severity or worse."""
    if severity is None:
        return []
    severities = ("error",) if severity == "error" else ("error", "warning")
    verdict = report.extra.get("verdict")
    if severity == "watch" or verdict == "cannot-audit":  # what cannot be audited passes no gate
        return [Gate(f"--fail-on {severity}", None, None, verdict != "healthy", f"the verdict is {verdict}")]
    found = [finding for finding in report.findings if finding.severity in severities]
    reason = "; ".join(f"{finding.code}: {finding.summary}" for finding in found) or "no such finding"
    return [Gate(f"--fail-on {severity}", None, len(found), bool(found), reason)]


def _check(expression: str, report: Report) -> Gate:
    name, op, number = parse(expression)
    key = find_key(name, report)
    if key is None:
        short = {known.rsplit("/", 1)[-1]: known for known in all_values(report)}
        close = difflib.get_close_matches(name.rsplit("/", 1)[-1], short, 3)
        hint = f"; did you mean {', '.join(short[word] for word in close)}?" if close else ""
        return Gate(expression, None, None, True, f"no metric {name} in this report{hint}")
    value = all_values(report)[key]
    if value is None:
        why = next((f": {note.text}" for note in report.notes if key in note.about), "")
        return Gate(expression, key, None, True, f"{key} could not be computed{why}")
    met = _OPERATORS[op](value, number)
    return Gate(expression, key, value, bool(met), f"{key} is {value:.6g}")
