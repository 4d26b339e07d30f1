"""Rejection rules as a table: 4 levels by 3 estimators, of which verl 0.9.1 offers 11.

verl/trainer/ppo/rollout_corr_helper.py, compute_rollout_rejection_mask: a token or sequence is kept while its
statistic lies in the rule's band; several rules must all keep it. The estimators are those of divergence.py.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rollout_audit.kernels.sequence import Segments, seq_max, seq_sum


def seq_mean(values_N: Tensor, rows: Segments, divisor_R: Tensor) -> Tensor:
    """Mean of each row, with the caller's denominator."""
    return seq_sum(values_N, rows) / divisor_R


LEVELS: dict[str, Callable[[Tensor, Segments, Tensor], Tensor]] = {
    "seq_sum": lambda values_N, rows, _: seq_sum(values_N, rows),
    "seq_mean": seq_mean,
    "seq_max": lambda values_N, rows, _: seq_max(values_N, rows),
}
"""How a token statistic becomes one of its sequence. Level "token" takes it as it is."""


def keeps(statistic: Tensor, low: float | None, high: float) -> Tensor:
    """Where the statistic lies in the band, bounds included; a NaN is not kept."""
    kept = statistic <= high
    return kept if low is None else kept & (statistic >= low)
