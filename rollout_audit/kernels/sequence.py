"""Reductions over sequences: from N packed tokens to R rows that have a token, given how many each has.

On the CPU numpy's reduceat does it (a tenth of the time of torch.segment_reduce, pairwise sums); elsewhere
torch.segment_reduce. Lengths are above 0: reduceat gives x[start] for an empty segment.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def _reduce(values_N: Tensor, lengths_R: Tensor, ufunc: np.ufunc, name: str) -> Tensor:
    if values_N.device.type != "cpu":
        return torch.segment_reduce(values_N, name, lengths=lengths_R.to(values_N.device)).cpu()
    if not lengths_R.numel():
        return values_N.new_empty(0)
    lengths = lengths_R.numpy()
    with np.errstate(all="ignore"):  # infinity minus infinity is NaN here as in torch, which does not warn
        return torch.from_numpy(ufunc.reduceat(values_N.numpy(), np.cumsum(lengths) - lengths))


def seq_sum(values_N: Tensor, lengths_R: Tensor) -> Tensor:
    """Sum of each row."""
    return _reduce(values_N, lengths_R, np.add, "sum")


def seq_max(values_N: Tensor, lengths_R: Tensor) -> Tensor:
    """Largest value of each row."""
    return _reduce(values_N, lengths_R, np.maximum, "max")


def seq_min(values_N: Tensor, lengths_R: Tensor) -> Tensor:
    """Smallest value of each row."""
    return _reduce(values_N, lengths_R, np.minimum, "min")


def to_tokens(values_R: Tensor, lengths_R: Tensor) -> Tensor:
    """Each row's value repeated for its tokens: R to N."""
    return torch.repeat_interleave(values_R, lengths_R)
