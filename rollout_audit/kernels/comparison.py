"""Comparisons with a number, and what is true of them: on the CPU by numpy, which takes a fifth of torch's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def above(values: Tensor, bound: float) -> Tensor:
    """values > bound."""
    return _compare(np.greater, values, bound)


def below(values: Tensor, bound: float) -> Tensor:
    """values < bound."""
    return _compare(np.less, values, bound)


def at_most(values: Tensor, bound: float) -> Tensor:
    """values <= bound."""
    return _compare(np.less_equal, values, bound)


def at_least(values: Tensor, bound: float) -> Tensor:
    """values >= bound."""
    return _compare(np.greater_equal, values, bound)


def equal(values: Tensor, bound: float) -> Tensor:
    """values == bound."""
    return _compare(np.equal, values, bound)


_ON_DEVICE: dict[Any, Callable[[Tensor, float], Tensor]] = {
    np.greater: torch.gt, np.less: torch.lt, np.less_equal: torch.le, np.greater_equal: torch.ge, np.equal: torch.eq,
}  # fmt: skip


def _compare(ufunc: np.ufunc, values: Tensor, bound: float) -> Tensor:
    if values.device.type != "cpu":
        return _ON_DEVICE[ufunc](values, bound)
    return torch.from_numpy(ufunc(values.numpy(), bound))


def count_true(hit: Tensor) -> int:
    """How many are True."""
    return int(np.count_nonzero(hit.numpy())) if hit.device.type == "cpu" else int(torch.count_nonzero(hit))


def indices_of(hit_N: Tensor) -> Tensor:
    """Indices of what is True, on the CPU."""
    if hit_N.device.type != "cpu":
        return torch.nonzero(hit_N).reshape(-1).cpu()
    return torch.from_numpy(np.flatnonzero(hit_N.numpy()))


def values_above(values_N: Tensor, bound: float) -> Tensor:
    """The values above the bound, on the CPU."""
    if values_N.device.type != "cpu":
        return values_N[values_N > bound].cpu()
    x_N = values_N.numpy()
    return torch.from_numpy(x_N[np.flatnonzero(x_N > bound)])  # indices: a mask takes three times as long


def select(values_N: Tensor, keep_N: Tensor) -> Tensor:
    """The values to keep, on the device where they are."""
    if values_N.device.type != "cpu":
        return values_N[keep_N.to(values_N.device)]
    return torch.from_numpy(values_N.numpy()[keep_N.cpu().numpy()])
