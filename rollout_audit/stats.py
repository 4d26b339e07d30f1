"""Statistics that can be added: update with a chunk, merge with another, then read.

    weights = Moments()
    for chunk in chunks:
        weights.update(chunk)           # a float64 tensor of any shape, selected already: no masks here
    weights.merge(of_another_rank)
    weights.mean, weights.std(ddof=1)

The law, held by tests/test_stats.py: for every class here `merge` is associative and commutative up to
float64 round-off, a fresh object is its neutral element, and update(a + b) equals update(a) merged with
update(b). So a chunk, a file, a rank and a step are all the same thing: a state to merge.

A statistic of nothing is NaN, never 0. Not-finite input is not filtered: it shows in the result.

Legend: N values, B groups (rows), K kept values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_audit.kernels.comparison import above, count_true, equal, indices_of

_CANCELS = 0.01
"""Where squared deviations are a smaller share of the squares, sum of squares minus squared sum loses digits."""


@dataclass
class Moments:
    """Count, sum and squared deviations of values; each may stand for a number of copies.

    Deviations, not squares, are kept: a std of 1e-8 around a mean of 1 survives (Chan, Golub, LeVeque 1983).

    >>> a, b = Moments(), Moments()
    >>> a.update(torch.tensor([1.0, 1.0, 1.0])); b.update(torch.tensor([2.0]))
    >>> a.merge(b); a.mean
    1.25
    """

    count: float = 0.0
    total: float = 0.0
    m2: float = 0.0

    def update(self, values_N: Tensor, copies_N: Tensor | None = None, *, square: float | None = None) -> None:
        """Take values; `square` is the sum of their squares, where it is known."""
        x_N = values_N.reshape(-1)
        count = float(x_N.numel())
        if count == 0:
            return
        if copies_N is None:
            total, square = float(x_N.sum()), float(torch.dot(x_N, x_N)) if square is None else square
            m2 = square - total * total / count
            if not m2 > _CANCELS * square:
                deviation_N = x_N - total / count
                m2 = float(torch.dot(deviation_N, deviation_N))
            self.merge(Moments(count, total, m2))
            return
        copies_N = copies_N.to(x_N)
        count = float(copies_N.sum())
        if count:
            total = float(torch.dot(copies_N, x_N))
            m2 = float(torch.dot(copies_N, (x_N - total / count).square()))
            self.merge(Moments(count, total, m2))

    def merge(self, other: Moments) -> None:
        if not other.count:
            return
        if self.count:
            gap = other.mean - self.mean
            self.m2 += other.m2 + gap * gap * (self.count * other.count / (self.count + other.count))
        else:
            self.m2 = other.m2
        self.count += other.count
        self.total += other.total

    @classmethod
    def constant(cls, value: float, count: float) -> Moments:
        """The moments of `count` copies of one value."""
        return cls(count, value * count, 0.0) if count else cls()

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def shifted(self, by: float) -> Moments:
        """The moments of the values + `by`."""
        return Moments(self.count, self.total + by * self.count, self.m2)

    @property
    def square(self) -> float:
        """Sum of the squares."""
        return self.mean_square * self.count if self.count else 0.0

    @property
    def mean_square(self) -> float:
        """Mean of the squares; infinite where they overflow (`**` would raise)."""
        return self.m2 / self.count + self.mean * self.mean if self.count else math.nan

    def var(self, ddof: int = 0) -> float:
        return self.m2 / (self.count - ddof) if self.count > ddof else math.nan

    def std(self, ddof: int = 0) -> float:
        return math.sqrt(self.var(ddof))


@dataclass
class Mean:
    """Count and sum, where no spread is asked for: a third of the work of Moments.

    >>> m = Mean(); m.update(torch.tensor([1.0, 2.0])); m.merge(Mean(1, 6.0)); m.value
    3.0
    """

    count: float = 0.0
    total: float = 0.0

    def update(self, values_N: Tensor) -> None:
        if values_N.numel():
            self.count += values_N.numel()
            self.total += float(values_N.sum())

    def merge(self, other: Mean) -> None:
        self.count += other.count
        self.total += other.total

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass
class Extremes:
    """Smallest and largest value; a NaN makes both NaN, as it does in torch.

    >>> e = Extremes(); e.update(torch.tensor([3.0, -1.0])); (e.min, e.max)
    (-1.0, 3.0)
    """

    low: float = math.inf
    high: float = -math.inf

    def update(self, values_N: Tensor) -> None:
        if values_N.numel():
            low, high = torch.aminmax(values_N)
            self.merge(Extremes(float(low), float(high)))

    def merge(self, other: Extremes) -> None:
        # Each side keeps its NaN and takes the other's: no comparison with NaN is true.
        if other.low < self.low or math.isnan(other.low):
            self.low = other.low
        if other.high > self.high or math.isnan(other.high):
            self.high = other.high

    @classmethod
    def constant(cls, value: float, count: float) -> Extremes:
        return cls(value, value) if count else cls()

    @property
    def empty(self) -> bool:
        return self.low > self.high

    @property
    def min(self) -> float:
        return math.nan if self.empty else self.low

    @property
    def max(self) -> float:
        return math.nan if self.empty else self.high

    def max_deviation(self, center: float) -> float:
        """Largest |value - center|."""
        return max(abs(self.low - center), abs(self.high - center)) if not self.empty else math.nan


@dataclass
class Fraction:
    """How many of how many: hits and total stay apart, so that shares of shards add up.

    >>> f = Fraction(); f.update(torch.tensor([True, False])); f.merge(Fraction(0, 2)); f.value
    0.25
    """

    hits: int = 0
    total: int = 0

    def update(self, hit_N: Tensor, copies_N: Tensor | None = None) -> None:
        if copies_N is None:
            self.hits += count_true(hit_N)
            self.total += hit_N.numel()
        else:
            self.hits += int(copies_N[hit_N].sum())
            self.total += int(copies_N.sum())

    def merge(self, other: Fraction) -> None:
        self.hits += other.hits
        self.total += other.total

    @property
    def value(self) -> float:
        return self.hits / self.total if self.total else math.nan


@dataclass
class CoMoments:
    """Pearson correlation of two variables, from deviations (Chan, Golub, LeVeque 1983).

    Undefined (NaN) for fewer than two pairs and where a variable is constant.

    >>> c = CoMoments(); x = torch.tensor([1.0, 2.0, 3.0]); c.update(x, 2 * x + 1); round(c.pearson, 12)
    1.0
    """

    count: float = 0.0
    total_x: float = 0.0
    total_y: float = 0.0
    m2_x: float = 0.0
    m2_y: float = 0.0
    m_xy: float = 0.0

    def update(self, x_N: Tensor, y_N: Tensor) -> None:
        n = x_N.numel()
        if n == 0:
            return
        x, y = Moments(), Moments()
        x.update(x_N)
        y.update(y_N)
        m_xy = float(torch.dot(x_N, y_N)) - x.total * y.total / n
        if not (x.m2 > _CANCELS * n * x.mean_square and y.m2 > _CANCELS * n * y.mean_square):
            m_xy = float(torch.dot(x_N - x.mean, y_N - y.mean))
        self.merge(CoMoments(float(n), x.total, y.total, x.m2, y.m2, m_xy))

    def update_shifted(self, x_N: Tensor, delta_N: Tensor, delta: Moments, y_N: Callable[[], Tensor]) -> None:
        """Pairs (x, y) where y = x + delta is only made where it must be; `delta` are the moments of delta."""
        x, n = Moments(), x_N.numel()
        x.update(x_N)
        m_xd = float(torch.dot(x_N, delta_N)) - x.total * delta.mean
        m2_y = x.m2 + 2 * m_xd + delta.m2
        sound = x.m2 > _CANCELS * x.square and m2_y > _CANCELS * (x.m2 + delta.m2)
        if not (sound and delta.m2 > _CANCELS * delta.square):
            self.update(x_N, y_N())
        else:
            self.merge(CoMoments(float(n), x.total, x.total + delta.total, x.m2, m2_y, x.m2 + m_xd))

    def merge(self, other: CoMoments) -> None:
        if not other.count:
            return
        if self.count:
            gap_x = other.total_x / other.count - self.total_x / self.count
            gap_y = other.total_y / other.count - self.total_y / self.count
            share = self.count * other.count / (self.count + other.count)
            self.m2_x += gap_x * gap_x * share
            self.m2_y += gap_y * gap_y * share
            self.m_xy += gap_x * gap_y * share
        for name in ("count", "total_x", "total_y", "m2_x", "m2_y", "m_xy"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def pearson(self) -> float:
        if self.count < 2 or self._constant(self.m2_x, self.total_x) or self._constant(self.m2_y, self.total_y):
            return math.nan
        return min(1.0, max(-1.0, self.m_xy / math.sqrt(self.m2_x) / math.sqrt(self.m2_y)))

    def _constant(self, m2: float, total: float) -> bool:
        """Whether the spread is no more than the round-off of the mean (or NaN)."""
        round_off = 4 * 2.0**-52 * total / self.count
        return not m2 > self.count * round_off * round_off


@dataclass
class LogSumExp:
    """log of a sum of exponentials: sums of weights exp(x) that would overflow.

    >>> s = LogSumExp(); s.update(torch.tensor([1000.0, 1000.0], dtype=torch.float64)); round(s.value - 1000, 6)
    0.693147
    """

    value: float = -math.inf

    def update(self, values_N: Tensor) -> None:
        if values_N.numel():
            self.merge(LogSumExp(float(torch.logsumexp(values_N.reshape(-1), 0))))

    def merge(self, other: LogSumExp) -> None:
        high, low = max(self.value, other.value), min(self.value, other.value)
        if math.isnan(self.value) or math.isnan(other.value):
            self.value = math.nan
        elif math.isinf(high):
            self.value = high
        else:
            self.value = high + math.log1p(math.exp(low - high))


@dataclass
class Pending:
    """Vectors of one number a row, of several chunks: their statistics are taken of thousands of rows at once.

    A chunk has a few dozen rows, and to take some twenty statistics of so few is all overhead. Nothing is read before
    what is pending was taken. Rows are copied into memory that was taken once: small pieces that outlive their chunk
    would each cut a hole of the heap that no vector of the next chunk fits into.
    """

    buffers: list[Tensor] = field(default_factory=list)
    count: int = 0

    def add(self, *vectors_B: Tensor) -> bool:
        """Keep the next rows; True when there are enough to be taken."""
        end = self.count + vectors_B[0].numel()
        if not self.buffers or end > self.buffers[0].numel():
            size = max(_ENOUGH_ROWS, 2 * end)
            larger = [vector_B.new_empty(size) for vector_B in vectors_B]
            for new, old in zip(larger, self.buffers, strict=False):
                new[: self.count] = old[: self.count]
            self.buffers = larger
        for buffer, vector_B in zip(self.buffers, vectors_B, strict=True):
            buffer[self.count : end] = vector_B
        self.count = end
        return self.count >= _ENOUGH_ROWS

    def take(self) -> list[Tensor]:
        """The vectors, joined over chunks; none where nothing is pending."""
        vectors = [buffer[: self.count] for buffer in self.buffers]
        self.buffers, self.count = [], 0
        return vectors


_ENOUGH_ROWS = 8192


@dataclass(order=True)
class Worst:
    """One token or row of a TopK: sorted by size (largest first), then file, row, position."""

    key: float  # minus the size
    path: str
    row: int
    position: int
    values: tuple[float, ...] = field(compare=False, default=())


@dataclass
class TopK:
    """The K largest by size; ties go to the earlier file, row and position, so that the split does not matter."""

    k: int = 10
    items: list[Worst] = field(default_factory=list)

    @property
    def floor(self) -> float:
        """Sizes below this cannot get in any more."""
        return -self.items[-1].key if len(self.items) >= self.k and self.items else -math.inf

    def add(self, items: list[Worst]) -> None:
        self.items = sorted(self.items + items)[: self.k]

    def merge(self, other: TopK) -> None:
        self.add(other.items)


_BLOCK = 256


def largest(size_N: Tensor, k: int) -> Tensor:
    """Indices of the k largest values, ties by the smaller index (torch.topk breaks them at random)."""
    k = min(k, size_N.numel())
    if k == 0:
        return torch.empty(0, dtype=torch.int64)
    limit = float(size_N.topk(k).values[-1]) if size_N.numel() < 2 * _BLOCK * k else _bound(size_N, k)
    # Values equal to the limit may be many: the first k of them will do.
    index_K = torch.cat([indices_of(above(size_N, limit)), indices_of(equal(size_N, limit))[:k]])
    order_K = torch.sort(size_N[index_K.to(size_N.device)], descending=True, stable=True).indices[:k].cpu()
    return index_K[order_K]


def _bound(size_N: Tensor, k: int) -> float:
    """At most the k-th largest value, and near it: the k-th largest of the maxima of blocks."""
    whole = size_N.numel() // _BLOCK * _BLOCK
    return float(size_N[:whole].view(-1, _BLOCK).amax(1).topk(k).values[-1])
