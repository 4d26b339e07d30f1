"""SmallSample and Quantiles: exact while there are few values, from then on counts in fixed bins.

The law of stats.py holds here too: any split of the values gives the same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


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
        x_N = x_N if x_N.dtype == torch.float64 else x_N.cpu().double()  # mps has no float64
        bits_N = x_N.contiguous().view(torch.int64)
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
