"""What a rule answers: a finding, what is left when the fault is undone, and what it makes of other rules."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout_audit.diagnosis.view import View
from rollout_audit.report import Finding


@dataclass
class Found:
    """A fault."""

    finding: Finding
    left: View | None = None
    """The rows with the fault undone; None where it cannot be, and what it changed is not looked at again."""
    explains: float | None = None
    """Share of the sum of |d| that it accounts for, where undoing it does not tell."""
    silences: frozenset[str] = field(default_factory=frozenset)
    """Codes that would only say the same again."""


@dataclass
class Unsure:
    """A rule that cannot tell, and what it would need."""

    code: str
    needs: str
