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
from dataclasses import dataclass, field

import torch
from torch import Tensor


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

    def update(self, values_N: Tensor, copies_N: Tensor | None = None) -> None:
        x_N = values_N.reshape(-1)
        count = float(x_N.numel())
        if count == 0:
            return
        if copies_N is None:
            total = float(x_N.sum())
            deviation_N = x_N - total / count
            self.merge(Moments(count, total, float(torch.dot(deviation_N, deviation_N))))
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
            self.hits += int(torch.count_nonzero(hit_N))
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
        total_x, total_y = float(x_N.sum()), float(y_N.sum())
        dx_N, dy_N = x_N - total_x / n, y_N - total_y / n
        parts = (float(torch.dot(a_N, b_N)) for a_N, b_N in ((dx_N, dx_N), (dy_N, dy_N), (dx_N, dy_N)))
        self.merge(CoMoments(float(n), total_x, total_y, *parts))

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
class SmallSample:
    """Every value while there are at most `limit`, none beyond: exact answers where exactness is cheap.

    Whether it is kept depends on the total only, not on how the data were cut. Rows of K columns.
    """

    limit: int = 32_768
    buffer: Tensor | None = None
    """The values, and room for more: one piece of memory, for many small ones between chunks keep these from the OS."""
    count: int = 0

    def update(self, values_NK: Tensor) -> None:
        number = values_NK.shape[0]
        if self.count + number > self.limit:
            self.skip(number)
        elif number:
            self._room(number, values_NK)[self.count : self.count + number] = values_NK.cpu()
            self.count += number

    def skip(self, number: int) -> None:
        """Count values that would not fit anyway."""
        self.count += number
        self.buffer = None

    def _room(self, number: int, like: Tensor) -> Tensor:
        if self.buffer is None or self.count + number > self.buffer.shape[0]:
            size = min(self.limit, max(1024, 2 * (self.count + number)))
            larger = like.new_empty((size, *like.shape[1:]), device="cpu")
            if self.buffer is not None:
                larger[: self.count] = self.buffer[: self.count]
            self.buffer = larger
        return self.buffer

    def merge(self, other: SmallSample) -> None:
        if other.values_NK is not None and self.count + other.count <= self.limit:
            self.update(other.values_NK)
        elif other.count:
            self.skip(other.count)

    @property
    def values_NK(self) -> Tensor | None:
        """All values in the order of arrival, or None when there were more than the limit."""
        return None if self.buffer is None else self.buffer[: self.count]


# A float64 read as an integer is ordered like the number: dropping its last 43 bits leaves 512 bins an octave.
_SHIFT = 43
_PER_OCTAVE = 1 << (52 - _SHIFT)
_LOWEST, _HIGHEST = 2.0**-40, 2.0**24
_FIRST_BIN = (1023 - 40) * _PER_OCTAVE
NUM_BINS = 64 * _PER_OCTAVE + 2  # one for values below 2**-40 (zero too), one for 2**24 and above


@dataclass
class Quantiles:
    """Quantiles of values >= 0: exact up to 32,768 values, from then on to one part in 1,000.

    Beyond the limit, counts in bins of a fixed grid (512 an octave): they add up exactly, so any split gives the
    same answer, which no sketch with centroids does. NaN and infinity must be selected away before.

    >>> q = Quantiles(); q.update(torch.tensor([0.0, 1.0, 2.0, 4.0])); q.at(0.5)
    1.5
    """

    sample: SmallSample = field(default_factory=SmallSample)
    bins: Tensor | None = None
    count: int = 0

    def update(self, values_N: Tensor) -> None:
        x_N = values_N.reshape(-1)
        if self.sample.count + x_N.numel() <= self.sample.limit:
            self.sample.update(x_N)
        else:
            self._spill()
            self._count_in_bins(x_N)
            self.sample.update(x_N)
        self.count += x_N.numel()

    def merge(self, other: Quantiles) -> None:
        if self.sample.count + other.sample.count > self.sample.limit:
            self._spill()
            if other.bins is not None:
                self.bins = other.bins.clone() if self.bins is None else self.bins + other.bins
            elif (kept_N := other.sample.values_NK) is not None:
                self._count_in_bins(kept_N)
        self.sample.merge(other.sample)
        self.count += other.count

    def _spill(self) -> None:
        if self.bins is None and (kept_N := self.sample.values_NK) is not None:
            self._count_in_bins(kept_N)

    def _count_in_bins(self, x_N: Tensor) -> None:
        bits_N = x_N.double().contiguous().view(torch.int64)
        bin_N = (bits_N >> _SHIFT).sub_(_FIRST_BIN - 1).clamp_(0, NUM_BINS - 1)
        counts = torch.bincount(bin_N, minlength=NUM_BINS).cpu()
        self.bins = counts if self.bins is None else self.bins + counts

    @property
    def exact(self) -> bool:
        return self.bins is None

    def at(self, q: float) -> float:
        """The q-quantile, 0 <= q <= 1, linear between neighbours (torch.quantile's default)."""
        if not self.count:
            return math.nan
        if self.bins is None:
            kept_N = self.sample.values_NK
            assert kept_N is not None
            return float(torch.quantile(kept_N.double(), q))
        rank = q * (self.count - 1)
        low, high = self._ranked(math.floor(rank)), self._ranked(math.ceil(rank))
        return low + (high - low) * (rank - math.floor(rank))

    def _ranked(self, rank: int) -> float:
        """The rank-th value from below: the middle of its bin, which is within 1 part in 1,024."""
        assert self.bins is not None
        below = torch.cumsum(self.bins, 0)
        index = min(int(torch.searchsorted(below, torch.tensor(rank), right=True)), NUM_BINS - 1)
        if index == 0:
            return 0.0
        octave, step = divmod(index - 1, _PER_OCTAVE)
        return math.ldexp(1 + (step + 0.5) / _PER_OCTAVE, octave - 40)


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


def largest(size_N: Tensor, k: int) -> Tensor:
    """Indices of the k largest values, ties by the smaller index (torch.topk breaks them at random)."""
    k = min(k, size_N.numel())
    if k == 0:
        return torch.empty(0, dtype=torch.int64)
    limit = size_N.topk(k).values[-1]
    above = torch.nonzero(size_N > limit).reshape(-1)
    equal = torch.nonzero(size_N == limit).reshape(-1)[: k - above.numel()]
    return torch.cat([above, equal]).cpu()
