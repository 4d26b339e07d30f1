"""What was counted: rows, tokens, masks, values that are no log-probs, and dumped weights against recomputed ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollout_audit.batch import Batch
from rollout_audit.config import Settings
from rollout_audit.kernels.importance import apply_threshold, clamp_log_ratio
from rollout_audit.kernels.sequence import to_tokens
from rollout_audit.metrics.family import merge_fields
from rollout_audit.report import Audited
from rollout_audit.stats import Extremes, TopK, Worst, largest

NUM_PLACES = 5
"""How many places a finding names."""


@dataclass
class FileCounts:
    """Rows and tokens of one file."""

    rows: int = 0
    empty_rows: int = 0
    tokens: int = 0

    def merge(self, other: FileCounts) -> None:
        merge_fields(self, other)


@dataclass
class Coverage:
    """Counts over everything that was read."""

    files: dict[str, FileCounts] = field(default_factory=dict)
    num_not_binary: int = 0
    num_nonfinite: int = 0
    """Tokens with NaN or infinity in any field."""
    nonfinite: dict[str, int] = field(default_factory=dict)
    present: dict[str, int] = field(default_factory=dict)
    """Rows of files that have each field."""
    nonfinite_places: TopK = field(default_factory=lambda: TopK(NUM_PLACES))
    old_range: Extremes = field(default_factory=Extremes)
    rollout_range: Extremes = field(default_factory=Extremes)
    mask_dtype: torch.dtype | None = None

    def update(self, batch: Batch) -> None:
        counts = FileCounts(batch.num_rows, int((~batch.filled).sum()), batch.num_tokens)
        self.files.setdefault(batch.path, FileCounts()).merge(counts)
        self.num_not_binary += batch.num_not_binary
        self._take_dtype(batch.mask_dtype)
        if batch.finite_N is not None:
            self._update_nonfinite(batch, ~batch.finite_N)
        add_counts(self.present, dict.fromkeys(batch.values(), batch.num_rows))
        finite = batch.for_audit
        if finite.old_N is not None:
            self.old_range.merge(finite.range_of(finite.old_N))
        if finite.rollout_N is not None:
            self.rollout_range.merge(finite.range_of(finite.rollout_N))

    def _update_nonfinite(self, batch: Batch, bad_N: Tensor) -> None:
        self.num_nonfinite += int(bad_N.sum())
        for name, values_N in batch.values().items():
            if count := int((~torch.isfinite(values_N)).sum()):
                add_counts(self.nonfinite, {name: count})
        self.nonfinite_places.add(places(batch, bad_N.double(), NUM_PLACES))

    def _take_dtype(self, dtype: torch.dtype | None) -> None:
        if dtype is not None:
            self.mask_dtype = dtype if self.mask_dtype is None else torch.promote_types(self.mask_dtype, dtype)

    def merge(self, other: Coverage) -> None:
        for path, counts in other.files.items():
            self.files.setdefault(path, FileCounts()).merge(counts)
        add_counts(self.nonfinite, other.nonfinite)
        add_counts(self.present, other.present)
        self._take_dtype(other.mask_dtype)
        merge_fields(self, other)

    @property
    def num_rows(self) -> int:
        return sum(counts.rows for counts in self.files.values())

    @property
    def num_empty(self) -> int:
        return sum(counts.empty_rows for counts in self.files.values())

    @property
    def num_tokens(self) -> int:
        return sum(counts.tokens for counts in self.files.values())

    def audited(self) -> dict[str, Audited]:
        rows, tokens = self.num_rows, self.num_tokens
        return {
            "num_sequences": Audited(rows, rows, "sequences"),
            "num_empty_sequences": Audited(self.num_empty, rows, "sequences"),
            "num_valid_tokens": Audited(tokens, tokens, "valid tokens"),
            "num_nonfinite_tokens": Audited(self.num_nonfinite, tokens, "valid tokens"),
        }


def add_counts(mine: dict[str, int], other: dict[str, int]) -> None:
    """Add counts by name."""
    for name, count in other.items():
        mine[name] = mine.get(name, 0) + count


def places(batch: Batch, size_N: Tensor, k: int) -> list[Worst]:
    """The k tokens of largest size, where it is above 0."""
    index_K = largest(size_N.cpu(), k)
    index_K = index_K[size_N.cpu()[index_K] > 0]
    return [
        Worst(-float(size_N[index]), batch.path, row, column, (float(size_N[index]),))
        for index, row, column in zip(index_K.tolist(), *batch.places_of(index_K), strict=True)
    ]


def places_as_dicts(top: TopK) -> list[dict[str, Any]]:
    """Places of a finding, for the report."""
    return [{"path": item.path, "row": item.row, "position": item.position} for item in top.items]


@dataclass
class WeightsCheck:
    """Dumped rollout_is_weights against those that the settings give from the log-probs.

    Batch-normalised weights are right when dumped / recomputed is one number everywhere.
    """

    settings: Settings
    num_checked: int = 0
    num_disagree: int = 0
    quotient: Extremes = field(default_factory=Extremes)
    dumped_range: Extremes = field(default_factory=Extremes)
    tolerance: float = 0.0
    worst: TopK = field(default_factory=lambda: TopK(NUM_PLACES))

    def update(self, batch: Batch) -> None:
        if batch.weights_N is None or not batch.has_pair or self.settings.rollout_is is None or not batch.num_tokens:
            return
        expected_N = self._expected(batch)
        self.tolerance = max(self.tolerance, 1e-4, 4 * float(torch.finfo(batch.weights_dtype).eps))
        self.num_checked += batch.num_tokens
        self.dumped_range.update(batch.weights_N)
        positive_N = expected_N > 0
        self.quotient.update(batch.weights_N[positive_N] / expected_N[positive_N])
        error_N = (batch.weights_N - expected_N).abs() / expected_N.clamp(min=1.0)
        error_N = torch.where(error_N > self.tolerance, error_N, 0.0)
        self.num_disagree += int((error_N > 0).sum())
        if not self.settings.rollout_is_batch_normalize:
            self.worst.add(places(batch, error_N, NUM_PLACES))

    def _expected(self, batch: Batch) -> Tensor:
        raw_N = batch.clamped_ratio_N
        if self.settings.rollout_is == "sequence":
            raw_N = to_tokens(clamp_log_ratio(batch.log_ratio_sum_R).exp(), batch.rows).to(raw_N)
        return apply_threshold(raw_N, self.settings.lower, self.settings.upper)

    def merge(self, other: WeightsCheck) -> None:
        self.tolerance = max(self.tolerance, other.tolerance)
        merge_fields(self, other)

    @property
    def disagree(self) -> bool:
        if not self.settings.rollout_is_batch_normalize:
            return self.num_disagree > 0
        low, high = self.quotient.min, self.quotient.max
        return not math.isnan(high) and high - low > self.tolerance * high
