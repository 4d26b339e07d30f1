"""verl's std, to its last digits: sqrt(E[x²] - E[x]²), which leaves round-off where the exact answer is 0.

Where a rule's statistic is clamped everywhere (every sequence above the threshold), every value is the same and the
true std is 0; verl logs something like 1e-9, the round-off of two float64 sums over the padded tensor. Users compare
with their dashboards, so for small batches the same sums are made over the same layout; for large ones (more tokens
than SmallSample keeps) the exact value stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_audit.batch import Batch
from rollout_audit.stats import Extremes, Moments

_LIMIT = 32_768


@dataclass(order=True)
class Rows:
    """Where the valid tokens of some rows lie."""

    path: str
    first_row: int
    width: int = field(compare=False)
    lengths_B: Tensor = field(compare=False)
    columns_N: Tensor = field(compare=False)


@dataclass
class Layout:
    """Positions of the valid tokens in the padded batch, while there are few."""

    count: int = 0
    chunks: list[Rows] = field(default_factory=list)

    def update(self, batch: Batch) -> None:
        self.count += batch.num_tokens
        if self.count > _LIMIT:
            self.chunks.clear()
            return
        rows = Rows(batch.path, batch.first_row, batch.width, batch.lengths_B, batch.columns_of_all())
        self.chunks.append(rows)

    def merge(self, other: Layout) -> None:
        self.count += other.count
        self.chunks = [] if self.count > _LIMIT else self.chunks + other.chunks

    def std_of_constant(self, value: float, divisor: float) -> float:
        """What verl gets for the std of one value at every valid token."""
        chunks = sorted(self.chunks)
        width = max(rows.width for rows in chunks)
        x_BT = torch.zeros(sum(rows.lengths_B.numel() for rows in chunks), width, dtype=torch.float64)
        first = 0
        for rows in chunks:
            row_N = torch.repeat_interleave(torch.arange(rows.lengths_B.numel()), rows.lengths_B)
            x_BT[first + row_N, rows.columns_N] = value
            first += rows.lengths_B.numel()
        mean = float(x_BT.sum()) / divisor
        variance = float(x_BT.square().sum()) / divisor - mean * mean
        return math.sqrt(max(variance, 0.0))


def guarded_std(
    values: Moments, divisor: float, layout: Layout, extremes: Extremes, bounds: tuple[float, float]
) -> float:
    """sqrt(E[x²] - E[x]²) with verl's denominator n + 1e-8; from deviations, in which nothing cancels.

    `extremes` are those of the values before they were clamped to `bounds`.
    """
    low, high = (min(max(x, bounds[0]), bounds[1]) for x in (extremes.low, extremes.high))
    if values.count and low == high and layout.chunks:
        return layout.std_of_constant(low, divisor)
    variance = values.m2 / divisor + values.total * values.total / divisor * (1 / values.count - 1 / divisor)
    return variance if math.isnan(variance) else math.sqrt(max(variance, 0.0))
