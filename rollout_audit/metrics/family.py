"""What metric families share: merging field by field, and an exp that does not raise."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from rollout_audit.stats import Extremes


def merge_fields(mine: Any, other: Any) -> None:
    """Merge each statistic of a dataclass into its namesake; plain counts are added, settings are left alone."""
    for side in (mine, other):
        if hasattr(side, "settle"):
            side.settle()
    for field in fields(mine):
        value = getattr(mine, field.name)
        if hasattr(value, "merge"):
            value.merge(getattr(other, field.name))
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(mine, field.name, value + getattr(other, field.name))


def exp_or_inf(x: float) -> float:
    """exp(x), infinite where float64 ends (math.exp raises there)."""
    return math.exp(x) if not x > 709.7 else math.inf


def exp_range(logs: Extremes) -> Extremes:
    """Extremes of exp(x) from those of x."""
    return logs if logs.empty else Extremes(exp_or_inf(logs.low), exp_or_inf(logs.high))
