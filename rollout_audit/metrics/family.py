"""What metric families share: merging field by field, an exp that does not raise, k-hat of a tail."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from rollout_audit.kernels import psis
from rollout_audit.report import Audited
from rollout_audit.stats import Extremes
from rollout_audit.tails import Tail


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


_FEW = f"k-hat needs {psis.LEAST} weights or more: 5 in the tail"
_NO_TAIL = "no tail to fit: the largest weights, or a quarter of them, are all the same"
_NO_LAW = "the largest weights span more than float64 does: no k-hat is low enough for that"


def audited_khat(log_weights: Tail, of: str, name: str) -> dict[str, Audited]:
    """Pareto k-hat of raw weights, and the limit for as many of them (kernels/psis.py)."""
    count = log_weights.count
    if count < psis.LEAST:
        khat = threshold = math.nan
    else:
        # One of the largest must be left for the cutoff: above 7.4 million values the tail grows no more.
        length = min(psis.tail_length(count), log_weights.limit - 1)
        largest_K = log_weights.largest(length + 1)
        khat = psis.pareto_khat(largest_K[1:], float(largest_K[0])) if largest_K.numel() else math.nan
        threshold = psis.khat_threshold(count)
    why = _FEW if count < psis.LEAST else _NO_LAW if khat == math.inf else _NO_TAIL
    return {
        f"khat_{name}": Audited(khat, count, of, why),
        f"khat_threshold_{name}": Audited(threshold, count, of, why),
    }
