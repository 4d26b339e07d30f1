"""Rejection rules as a table: 4 levels by 3 estimators, of which verl 0.9.1 offers 11.

verl/trainer/ppo/rollout_corr_helper.py, compute_rollout_rejection_mask: a token or sequence is kept while its
statistic lies in the rule's band; several rules must all keep it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rollout_audit.kernels.sequence import seq_max, seq_sum


def seq_mean(values_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Mean of each row; NaN for a row without tokens."""
    return seq_sum(values_N, lengths_B) / lengths_B


LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"seq_sum": seq_sum, "seq_mean": seq_mean, "seq_max": seq_max}
"""How a token statistic becomes one of its sequence. Level "token" takes it as it is."""


def keeps(statistic: Tensor, low: float | None, high: float) -> Tensor:
    """Where the statistic lies in the band, bounds included; a NaN is not kept."""
    kept = statistic <= high
    return kept if low is None else kept & (statistic >= low)
