"""Tail: the largest values, in any number up to a limit, and how many there were.

The law of stats.py holds here too, exactly: any split of the values keeps the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout_audit.kernels.comparison import values_above


@dataclass
class Tail:
    """The `limit` largest of all values; a NaN among them spoils all, infinity is a value like others.

    The default limit holds the tail that PSIS wants (kernels/psis.py) of 7.4 million values; of more, the fit of
    8,191 has a standard error of 1 %, and costs a pass over the values and no more.

    >>> t = Tail(limit=2); t.update(torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)); t.largest(9).tolist(), t.count
    ([2.0, 3.0], 3)
    """

    limit: int = 8_192
    count: int = 0
    buffer: Tensor | None = None
    """The largest values and some more, and room: one piece of memory, as in SmallSample."""
    used: int = 0
    floor: float = -math.inf
    """As many values as the limit are known that are at least this large: no other gets in that is not larger."""
    spoiled: bool = False

    def update(self, values_N: Tensor, highest: float | None = None) -> None:
        """Take values; `highest` is the largest of them (NaN where there is a NaN), where it is known."""
        if not values_N.numel():
            return
        self.count += values_N.numel()
        highest = float(values_N.max()) if highest is None else highest
        if self.spoiled or math.isnan(highest):
            self._spoil()
        elif highest > self.floor or self.floor == -math.inf:
            self._take(values_N)

    def merge(self, other: Tail) -> None:
        self.count += other.count
        if self.spoiled or other.spoiled:
            self._spoil()
        elif other.buffer is not None:
            self._take(other.buffer[: other.used])
            self.floor = max(self.floor, other.floor)

    def _spoil(self) -> None:
        self.spoiled, self.buffer, self.used = True, None, 0

    def _take(self, values_N: Tensor) -> None:
        """Put what may be among the largest into the buffer; when that is full, only the largest stay."""
        if self.floor > -math.inf:
            values_N = values_above(values_N, self.floor)
        values_N = values_N.cpu().double()  # mps has no float64
        end = self.used + values_N.numel()
        if end > 2 * self.limit:
            if self.buffer is not None and self.used:
                values_N = torch.cat([self.buffer[: self.used], values_N])
            values_N = _largest(values_N, self.limit)
            self.floor = float(values_N[0])
            self.used, end = 0, self.limit
        if self.buffer is None or end > self.buffer.numel():
            # Where there are many values there will be more: room for the most at once.
            size = 2 * self.limit if end >= 1024 else min(2 * self.limit, 1024)
            larger = torch.empty(size, dtype=torch.float64)
            if self.buffer is not None:
                larger[: self.used] = self.buffer[: self.used]
            self.buffer = larger
        self.buffer[self.used : end] = values_N
        self.used = end

    def largest(self, number: int) -> Tensor:
        """The largest values, as many as asked for, or as there are up to the limit; sorted upwards."""
        number = min(number, self.limit, self.used)
        if self.buffer is None or not number:
            return torch.empty(0, dtype=torch.float64)
        kept_K = _largest(self.buffer[: self.used], number)
        kept_K.numpy().sort()
        return kept_K

    def compact(self) -> Tail:
        """The same with no more than is needed."""
        kept_K = self.largest(self.limit)
        floor = float(kept_K[0]) if kept_K.numel() == self.limit else -math.inf
        buffer = kept_K if kept_K.numel() else None
        return Tail(self.limit, self.count, buffer, kept_K.numel(), floor, self.spoiled)


def _largest(values_N: Tensor, number: int) -> Tensor:
    """The largest ones, the smallest of them first."""
    # numpy's partition takes a tenth of the time of torch.topk.
    first = values_N.numel() - number
    return torch.from_numpy(np.partition(values_N.numpy(), first)[first:])
