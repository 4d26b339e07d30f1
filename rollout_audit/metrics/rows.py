"""A bounded sample of whole rows, for what sums cannot tell: alignment, permutation, change-points, repeated values.

Which rows are in it depends on their values alone: each row gets a number from a few of its log-probs, and those with
the smallest numbers are kept, as many as the limit of tokens allows. So any split of the rows keeps the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollout_audit.batch import Batch

_LIMIT = 131_072
"""Tokens: all of a small batch, some forty rows of 3,000."""
_MOST_ROWS = 2_048
_LONGEST = 4_096
"""Of a longer row the first and the last half of this are kept; positions tell."""
_PROBES = 8
_NO_ID = -1


@dataclass
class SampledRows:
    """Some rows, packed: one entry a row (key, path, row, tokens, tokens before it was cut), one entry a token."""

    key_R: Tensor
    path_R: Tensor
    row_R: Tensor
    length_R: Tensor
    full_length_R: Tensor
    old_N: Tensor
    rollout_N: Tensor
    id_N: Tensor
    """Token ids; -1 where the dump has none."""
    column_N: Tensor
    """Position in the padded row."""


_PER_ROW = ("key_R", "path_R", "row_R", "length_R", "full_length_R")
_PER_TOKEN = ("old_N", "rollout_N", "id_N", "column_N")


@dataclass
class Bound:
    """The largest key that can still get in, told from one part of the data to the next: it spares copies only."""

    value: int = 2**63 - 1

    def share(self, sample: RowSample) -> None:
        """Both know what either knew."""
        self.value = sample.bound = min(self.value, sample.bound)


@dataclass
class RowSample:
    """The rows with the smallest keys, up to a number of tokens."""

    limit: int = _LIMIT
    paths: list[str] = field(default_factory=list)
    parts: list[SampledRows] = field(default_factory=list)
    """Joined and cut when they hold twice the limit."""
    num_rows: int = 0
    """Filled rows that were seen."""
    num_tokens: int = 0
    bound: int = 2**63 - 1
    """Keys above this cannot get in any more."""

    def update(self, batch: Batch) -> None:
        if not batch.has_pair or not batch.num_tokens:
            return
        self.num_rows += batch.lengths_R.numel()
        self.num_tokens += batch.num_tokens
        key_R = keys(batch)
        length_R = np.minimum(batch.lengths_R.numpy(), _LONGEST)
        chosen = np.flatnonzero(key_R <= self.bound)
        self._lower_bound(key_R[chosen], length_R[chosen])
        chosen = chosen[key_R[chosen] <= self.bound]
        if chosen.size:
            self._add(self._take(batch, chosen, key_R))

    def _lower_bound(self, key_R: npt.NDArray[np.int64], length_R: npt.NDArray[np.int64]) -> None:
        """Learn from keys and lengths alone what cannot get in beside these rows: nothing is copied for it."""
        key = np.concatenate([key_R, *(part.key_R.numpy() for part in self.parts)])
        length = np.concatenate([length_R, *(part.length_R.numpy() for part in self.parts)])
        order = np.argsort(key, kind="stable")
        fits = min(int((np.cumsum(length[order]) <= self.limit).sum()), _MOST_ROWS)
        if fits < order.size:
            self.bound = min(self.bound, int(key[order[max(0, fits - 1)]]))

    def _take(self, batch: Batch, chosen: npt.NDArray[np.int64], key_R: npt.NDArray[np.int64]) -> SampledRows:
        if batch.path not in self.paths:
            self.paths.append(batch.path)
        lengths, starts = batch.lengths_R.numpy()[chosen], batch.rows.starts_R[chosen]
        rows = np.flatnonzero(batch.filled.numpy())[chosen] + batch.first_row
        assert batch.old_N is not None
        assert batch.rollout_N is not None
        kept = [_ends(start, length) for start, length in zip(starts, lengths, strict=True)]
        index_N = torch.from_numpy(np.concatenate(kept))
        counts = torch.tensor([part.size for part in kept])
        column_N = batch.columns_N[index_N] if batch.columns_N is not None else _from_starts(index_N, starts, counts)
        return SampledRows(
            torch.from_numpy(key_R[chosen]),
            torch.full((len(chosen),), self.paths.index(batch.path)),
            torch.from_numpy(rows),
            counts,
            torch.from_numpy(lengths),
            batch.old_N[index_N].cpu().double(),
            batch.rollout_N[index_N].cpu().double(),
            _ids(batch, index_N, rows, counts, column_N),
            column_N,
        )

    def _add(self, rows: SampledRows) -> None:
        self.parts.append(rows)
        if sum(part.old_N.numel() for part in self.parts) > 2 * self.limit:
            self.settle()

    def settle(self) -> None:
        """Join what was added and cut it to the limit."""
        if not self.parts:
            return
        joined = self.parts[0] if len(self.parts) == 1 else _join(self.parts)
        places = [(self.paths[p], r) for p, r in zip(joined.path_R.tolist(), joined.row_R.tolist(), strict=True)]
        keys = joined.key_R.tolist()
        order = torch.tensor(sorted(range(len(keys)), key=lambda i: (keys[i], *places[i])))
        tokens = torch.cumsum(joined.length_R[order], 0)
        fits = int((tokens <= self.limit).sum())
        kept = order[: max(1, min(fits, _MOST_ROWS))]
        if kept.numel() < order.numel():
            self.bound = min(self.bound, keys[int(kept[-1])])
        self.parts = [_choose(joined, kept)]

    def merge(self, other: RowSample) -> None:
        self.num_rows += other.num_rows
        self.num_tokens += other.num_tokens
        self.bound = min(self.bound, other.bound)
        for path in other.paths:
            if path not in self.paths:
                self.paths.append(path)
        number_P = torch.tensor([self.paths.index(path) for path in other.paths], dtype=torch.int64)
        for part in other.parts:
            self._lower_bound(part.key_R.numpy(), part.length_R.numpy())
            kept = torch.nonzero(part.key_R <= self.bound).reshape(-1)
            if kept.numel():
                rows = _choose(part, kept)
                rows.path_R = number_P[rows.path_R]
                self._add(rows)

    @property
    def rows(self) -> SampledRows | None:
        """The sample; None where no row has both log-probs."""
        self.settle()
        return self.parts[0] if self.parts else None


def keys(batch: Batch) -> npt.NDArray[np.int64]:
    """A number for each filled row, mixed from a few of its log-probs: equal rows have equal numbers."""
    lengths = batch.lengths_R.numpy()
    probe_RP = batch.rows.starts_R[:, None] + (lengths[:, None] - 1) * np.arange(_PROBES) // (_PROBES - 1)
    index = torch.from_numpy(probe_RP)
    assert batch.old_N is not None
    assert batch.rollout_N is not None
    mixed = lengths.astype(np.uint64)
    for values_N in (batch.old_N, batch.rollout_N):
        bits_RP = values_N[index].cpu().double().numpy().view(np.uint64)
        for probe in range(_PROBES):
            # splitmix64 (Steele, Lea, Flood 2014)
            mixed = (mixed ^ bits_RP[:, probe]) + np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(1)).astype(np.int64)


def _ends(start: int, length: int) -> npt.NDArray[np.int64]:
    """Indices of a row's tokens; of a long row those of its beginning and its end."""
    if length <= _LONGEST:
        return np.arange(start, start + length)
    half = _LONGEST // 2
    return np.concatenate([np.arange(start, start + half), np.arange(start + length - half, start + length)])


def _from_starts(index_N: Tensor, starts: npt.NDArray[np.int64], counts: Tensor) -> Tensor:
    return index_N - torch.repeat_interleave(torch.from_numpy(starts), counts)


def _ids(batch: Batch, index_N: Tensor, rows: npt.NDArray[np.int64], counts: Tensor, column_N: Tensor) -> Tensor:
    if batch.token_ids_N is not None:
        return batch.token_ids_N[index_N].cpu().to(torch.int64)
    if batch.read_row_ids is None:
        return torch.full_like(index_N, _NO_ID)
    columns = torch.split(column_N, counts.tolist())
    ids = [batch.read_row_ids(int(row))[column].to(torch.int64) for row, column in zip(rows, columns, strict=True)]
    return torch.cat(ids)


def _join(parts: list[SampledRows]) -> SampledRows:
    return SampledRows(*(torch.cat([getattr(part, name) for part in parts]) for name in (*_PER_ROW, *_PER_TOKEN)))


def _choose(rows: SampledRows, kept: Tensor) -> SampledRows:
    starts = torch.cumsum(rows.length_R, 0) - rows.length_R
    lengths = rows.length_R[kept]
    first = torch.cumsum(lengths, 0) - lengths
    index_N = torch.repeat_interleave(starts[kept] - first, lengths) + torch.arange(int(lengths.sum()))
    return SampledRows(
        *(getattr(rows, name)[kept] for name in _PER_ROW), *(getattr(rows, name)[index_N] for name in _PER_TOKEN)
    )
