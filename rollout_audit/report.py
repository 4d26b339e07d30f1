"""Report, and what it is made of: plain data, no torch, no formatting. Renderers read it; JSON is its shape.

A number that cannot be computed is NaN or infinite in Python; `Report` turns it into None and keeps the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Number = float | int | None
SCHEMA_VERSION = 1

TOKENS = "valid tokens"
FINITE_TOKENS = "finite valid tokens"
SEQUENCES = "sequences with a valid token"
KEPT_TOKENS = "tokens kept by rejection"
AFTER = "after_rejection_"
"""Prefix of an audited key over kept tokens; without it, the value over all."""


@dataclass(frozen=True)
class Audited:
    """A value an auditor would defend, with what it was taken over."""

    value: float | int
    count: int
    of: str
    why_null: str = ""


@dataclass
class Section:
    """What one metric family has to say."""

    metrics: dict[str, float | int] = field(default_factory=dict)
    audited: dict[str, Audited] = field(default_factory=dict)
    why_null: dict[str, str] = field(default_factory=dict)
    """Reason for a metric that is not a finite number."""
    missing: str = ""
    """Reason for all of them: a field that the dump lacks."""


@dataclass(frozen=True)
class Finding:
    """Something wrong: code (see METRICS.md, Findings), severity, one sentence with numbers, evidence, remedy."""

    code: str
    severity: str
    summary: str
    evidence: dict[str, Any] = field(default_factory=dict)
    where: list[dict[str, Any]] = field(default_factory=list)
    remedy: str = ""
    explains: float | None = None
    """Share of the sum of |log ratio| that goes away when the fault is undone, where that can be tried."""
    settings: dict[str, str] = field(default_factory=dict)
    """What to set, by framework."""


@dataclass(frozen=True)
class Note:
    """A remark on the report, or the reason why the named keys are null."""

    text: str
    about: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Gate:
    """One --fail-if or --fail-on: `failed` when its condition holds or its metric could not be computed."""

    expression: str
    key: str | None
    value: Number
    failed: bool
    reason: str

    @property
    def words(self) -> str:
        """As it was given on the command line."""
        return self.expression if self.expression.startswith("--") else f"--fail-if '{self.expression}'"


@dataclass
class Report:
    """All that a command found out, in the order of the JSON document."""

    command: str
    inputs: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Number] = field(default_factory=dict)
    audited: dict[str, Number] = field(default_factory=dict)
    denominators: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    correction: str = ""
    """Whether importance sampling can correct this batch; empty where nothing speaks against it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Sections of one command only, such as worst_tokens."""
    why_not_finite: str = ""
    """Reason for a framework's metric that is NaN or infinite because of its input."""

    def add(self, section: Section) -> None:
        """Take a family's numbers; those that are not finite become None, with a note that says why."""
        reasons: dict[str, list[str]] = {}
        for key, value in section.metrics.items():
            self.metrics[key] = value if math.isfinite(value) else None
            if not math.isfinite(value):
                because = section.why_null.get(key) or section.missing or self.why_not_finite
                reason = because or f"the formula gives {value}"
                reasons.setdefault(reason, []).append(key)
        for key, number in section.audited.items():
            if key in self.audited:
                continue  # two families hold the same statistic
            self.audited[key] = number.value if math.isfinite(number.value) else None
            self.denominators[key] = {"count": number.count, "of": number.of}
            if not math.isfinite(number.value):
                empty = f"there are no {number.of}" if number.count == 0 else ""
                reason = section.missing or empty or number.why_null or f"the formula gives {number.value}"
                reasons.setdefault(reason, []).append(f"audited/{key}")
        self.notes += [Note(reason, about) for reason, about in reasons.items()]


def failed(gates: Iterable[Gate]) -> bool:
    """Whether any gate was met."""
    return any(gate.failed for gate in gates)
