"""How far the two sides are apart in each file, so that steps can be held against each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rollout_audit.batch import Batch
from rollout_audit.metrics.family import merge_fields


@dataclass
class FileDifference:
    """Sums of |log ratio| over one file; rows are what varies independently."""

    rows: int = 0
    tokens: int = 0
    total: float = 0.0
    """Sum of |log ratio|."""
    square: float = 0.0
    """Sum over rows of the squared row sum."""
    cross: float = 0.0
    """Sum over rows of row sum times row length."""
    length_square: float = 0.0

    def merge(self, other: FileDifference) -> None:
        for name in ("total", "square", "cross", "length_square"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        merge_fields(self, other)

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else math.nan

    @property
    def standard_error(self) -> float:
        """Of the mean, rows taken as independent (a ratio of sums: linearised)."""
        if self.rows < 2:
            return math.inf
        m = self.mean
        spread = self.square - 2 * m * self.cross + m * m * self.length_square
        return math.sqrt(max(0.0, spread) * self.rows / (self.rows - 1)) / self.tokens


@dataclass
class Trend:
    """The same for every file."""

    files: dict[str, FileDifference] = field(default_factory=dict)

    def update(self, batch: Batch) -> None:
        if not batch.has_pair or not batch.num_tokens:
            return
        sums_R = batch.row_sums(batch.log_ratio_N.abs())
        lengths_R = batch.lengths_R.to(sums_R)
        self.files.setdefault(batch.path, FileDifference()).merge(
            FileDifference(
                sums_R.numel(),
                batch.num_tokens,
                float(sums_R.sum()),
                float(sums_R.square().sum()),
                float((sums_R * lengths_R).sum()),
                float(lengths_R.square().sum()),
            )
        )

    def merge(self, other: Trend) -> None:
        for path, difference in other.files.items():
            self.files.setdefault(path, FileDifference()).merge(difference)
