"""View: the sampled rows as rules see them, and what is left of them after a fault was undone.

Legend: N tokens, row after row, R rows. `old` is the train side, `rollout` the sampling side, d = old - rollout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_audit.metrics.rows import RowSample

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass
class View:
    """Finite tokens of some rows. Never changed: undoing a fault makes another view."""

    old: Floats
    rollout: Floats
    ids: Ints
    """Token ids; -1 where unknown."""
    column: Ints
    """Position in the padded row."""
    row: Ints
    """Which row each token is of: 0, 1, ..., never decreasing."""
    places: list[tuple[str, int]]
    """File and row number, for each row."""
    full_length: Ints
    """Valid tokens of each row of the file, before it was cut for the sample."""
    num_rows: int = 0
    """Filled rows of the whole batch."""
    num_tokens: int = 0

    @classmethod
    def of(cls, sample: RowSample) -> View | None:
        """All finite tokens of a sample; None where there is nothing to compare."""
        rows = sample.rows
        if rows is None:
            return None
        lengths = rows.length_R.numpy()
        everything = cls(
            rows.old_N.numpy(),
            rows.rollout_N.numpy(),
            rows.id_N.numpy(),
            rows.column_N.numpy(),
            np.repeat(np.arange(lengths.size), lengths),
            [(sample.paths[p], int(r)) for p, r in zip(rows.path_R.tolist(), rows.row_R.tolist(), strict=True)],
            rows.full_length_R.numpy(),
            sample.num_rows,
            sample.num_tokens,
        )
        return everything.keep(np.isfinite(everything.old) & np.isfinite(everything.rollout))

    def keep(self, kept: Bools) -> View:
        """Only these tokens; rows keep their numbers, some may be empty."""
        if kept.all():
            return self
        parts = {name: getattr(self, name)[kept] for name in ("old", "rollout", "ids", "column", "row")}
        return replace(self, **parts)

    def without_rows(self, rows: Ints) -> View:
        return self.keep(~np.isin(self.row, rows))

    @property
    def size(self) -> int:
        return self.old.size

    @cached_property
    def d(self) -> Floats:
        return self.old - self.rollout

    @cached_property
    def size_of_d(self) -> Floats:
        return np.abs(self.d)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each row, empty ones too."""
        return np.bincount(self.row, minlength=len(self.places))

    @cached_property
    def starts(self) -> Ints:
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def index(self) -> Ints:
        """Each token's number within its row."""
        return np.arange(self.size) - self.starts[self.row]

    @property
    def filled(self) -> int:
        """Rows that have tokens."""
        return int((self.lengths > 0).sum())

    @property
    def whole(self) -> bool:
        """Whether the sample is all of the batch."""
        return self.num_rows == len(self.places)

    def of_row(self, row: int) -> slice:
        return slice(int(self.starts[row]), int(self.starts[row] + self.lengths[row]))

    def row_mean(self, values: Floats) -> Floats:
        """Mean over each row; NaN for an empty one."""
        sums = np.bincount(self.row, weights=values, minlength=len(self.places))
        with np.errstate(invalid="ignore", divide="ignore"):
            result: Floats = sums / self.lengths
        return result

    def mean(self, values: Any, where: Bools | None = None) -> tuple[float, float]:
        """Mean and its standard error, with rows as what varies independently; infinite for fewer than two rows."""
        values = np.asarray(values, dtype=float)
        row = self.row if where is None else self.row[where]
        values = values if where is None else values[where]
        if not values.size:
            return float("nan"), float("inf")
        mean = float(values.mean())
        spread = np.bincount(row, weights=values - mean)
        rows = np.unique(row).size
        if rows < 2:
            return mean, float("inf")
        return mean, float(np.sqrt((spread**2).sum() * rows / (rows - 1)) / values.size)

    def mean_ratio(self, where: Bools | None = None) -> tuple[float, float]:
        """E[exp d], with |d| held to 5 so that one token cannot make it, and its standard error."""
        return self.mean(np.exp(np.clip(self.d, -5, 5)), where)

    def place(self, row: int, token: int | None = None) -> dict[str, Any]:
        """A place for a finding."""
        path, number = self.places[row]
        return {"path": path, "row": number} | ({} if token is None else {"position": int(self.column[token])})

    def worst_rows(self, score: Floats, number: int = 5) -> list[int]:
        """Rows with the largest score (NaN never), largest first."""
        order = np.argsort(-np.nan_to_num(score, nan=-np.inf), kind="stable")
        return [int(row) for row in order[:number] if np.isfinite(score[row]) and score[row] > 0]

    @cached_property
    def likelihood(self) -> Ints:
        """Which eighth of the tokens each is in by its rollout log-prob, 0 for the least likely."""
        return deciles(self.rollout, 8)

    @cached_property
    def relative(self) -> Floats:
        """|d| over its mean among tokens as likely; 1 is as expected."""
        return self.relative_to(None)

    def relative_to(self, reference: Bools | None) -> Floats:
        """|d| over its mean among the reference tokens that are as likely. Held to 50."""
        size = np.minimum(self.size_of_d, 5.0)
        all_sums = np.bincount(self.likelihood, weights=size, minlength=8)
        all_counts = np.bincount(self.likelihood, minlength=8)
        usual = all_sums / np.maximum(1, all_counts)
        if reference is not None:
            sums = np.bincount(self.likelihood[reference], weights=size[reference], minlength=8)
            counts = np.bincount(self.likelihood[reference], minlength=8)
            usual = np.where(counts >= 10, sums / np.maximum(1, counts), usual)
        floor = max(1e-7, float(size.mean()) * 1e-2)
        result: Floats = np.minimum(size / np.maximum(usual[self.likelihood], floor), 50.0)
        return result

    @cached_property
    def typical(self) -> float:
        """Median |d|: the batch's own noise."""
        return float(np.median(self.size_of_d)) if self.size else float("nan")


def deciles(values: Floats, number: int = 10) -> Ints:
    """Which of so many equally filled classes each value is in, 0 for the smallest; equal values stay together."""
    edges = np.quantile(values, np.linspace(0, 1, number + 1)[1:-1])
    return np.searchsorted(edges, values, side="left").astype(np.int64)
