"""Rejection rules as a table: 4 levels by 3 estimators, of which verl 0.9.1 offers 11.

verl/trainer/ppo/rollout_corr_helper.py, compute_rollout_rejection_mask: a token or sequence is kept while its
statistic lies in the rule's band; several rules must all keep it. The estimators are those of divergence.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from rollout_audit.kernels.comparison import at_least, at_most
from rollout_audit.kernels.sequence import Segments, seq_max, seq_sum


@dataclass
class OverRows:
    """A token statistic over the tokens of each row, reduced when asked for."""

    values_N: Callable[[], Tensor]
    rows: Segments
    divisor_R: Tensor
    """What a row's sum is divided by for its mean."""
    known: dict[str, Tensor] = field(default_factory=dict)
    """What was reduced before, by "sum" and "max"."""

    @property
    def sum_R(self) -> Tensor:
        return self._reduced("sum", seq_sum)

    @property
    def max_R(self) -> Tensor:
        return self._reduced("max", seq_max)

    @property
    def mean_R(self) -> Tensor:
        return self.sum_R / self.divisor_R

    def _reduced(self, name: str, reduce: Callable[[Tensor, Segments], Tensor]) -> Tensor:
        if name not in self.known:
            self.known[name] = reduce(self.values_N(), self.rows)
        return self.known[name]


LEVELS: dict[str, Callable[[OverRows], Tensor]] = {
    "seq_sum": lambda over: over.sum_R,
    "seq_mean": lambda over: over.mean_R,
    "seq_max": lambda over: over.max_R,
}
"""How a token statistic becomes one of its sequence. Level "token" takes it as it is."""


def keeps(statistic: Tensor, low: float | None, high: float) -> Tensor:
    """Where the statistic lies in the band, bounds included; a NaN is not kept."""
    kept = at_most(statistic, high)
    return kept if low is None else kept & at_least(statistic, low)
