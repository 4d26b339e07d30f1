"""Pareto k-hat: the shape of the tail of importance weights, which says whether their mean can be estimated at all.

Vehtari, Simpson, Gelman, Yao, Gabry, "Pareto smoothed importance sampling", JMLR 25 (2024), arXiv 1507.02646; the fit
is Zhang and Stephens (2009), Technometrics 51. Weights come as logs, so that none overflows.

Legend: K values of the tail, G points of the fit's grid, F factors of a product.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAST = 25
"""Fewer values have fewer than 5 in the tail, and no fit."""
_MOST_SPREAD = 700.0
"""exp(700) fits into float64 with room for a product."""
_PRIOR_SHAPE, _PRIOR_WEIGHT = 0.5, 10
"""The weakly informative prior: as if 10 more values had been seen, of shape 0.5."""
_BLOCK = 65_536


def tail_length(count: int) -> int:
    """How many of the largest weights are the tail: min(S / 5, 3 sqrt(S)), rounded down."""
    return math.floor(3 * count**0.5) if count > 225 else count // 5


def khat_threshold(count: int) -> float:
    """Above this k-hat an estimate from S weights is not to be trusted: min(1 - 1 / log10(S), 0.7)."""
    return min(1 - 1 / math.log10(count), 0.7) if count > 1 else math.nan


def pareto_khat(log_tail_K: Tensor, log_cutoff: float) -> float:
    """k-hat of a tail, sorted upwards, above its cutoff, the largest log weight that is not in it.

    NaN where there is no tail to fit: fewer than 5 values, all of them equal, or a quarter of them equal to the
    cutoff. Infinite where the tail spans more than float64 does.
    """
    if log_tail_K.numel() < 5 or not bool(log_tail_K[-1] > log_tail_K[0]):
        return math.nan
    above_K = log_tail_K - log_cutoff
    if not float(above_K[-1]) < _MOST_SPREAD:
        return math.nan if math.isnan(float(above_K[-1])) else math.inf
    # The shape does not depend on the scale: in units of the cutoff nothing cancels and nothing underflows.
    return fit_pareto_shape(above_K.expm1())


def fit_pareto_shape(excess_K: Tensor) -> float:
    """Shape k of the generalised Pareto law behind these values, sorted upwards; NaN where a quarter of them are 0.

    Posterior mean of b = -k / sigma over a grid with the profile likelihood, then k given b (Zhang and Stephens 2009),
    then the prior on k of PSIS.
    """
    count, highest = excess_K.numel(), float(excess_K[-1])
    quartile = float(excess_K[int(count / 4 + 0.5) - 1])
    if not quartile > 0:
        return math.nan
    size = 30 + int(count**0.5)
    step_G = torch.arange(1, size + 1, dtype=torch.float64) - 0.5
    b_G = 1 / highest + (1 - (size / step_G).sqrt()) / (3 * quartile)
    # The shape for each b is the mean of log(1 - b x): logs of products, where those fit into float64, cost a tenth.
    most = math.log1p(-float(b_G[0]) * highest)
    factors = next(n for n in (16, 8, 4, 2, 1) if n == 1 or n * most < _MOST_SPREAD)
    padded_KF = torch.nn.functional.pad(excess_K, (0, -count % factors)).view(-1, factors)

    def shape_of(b_G: Tensor) -> Tensor:
        """The shape of highest likelihood for each b."""
        return (-b_G.view(-1, 1, 1) * padded_KF).add_(1).prod(2).log_().sum(1) / count

    shape_G = torch.cat([shape_of(part_G) for part_G in torch.split(b_G, max(1, _BLOCK // count))])
    log_likelihood_G = count * ((-b_G / shape_G).log() - shape_G - 1)
    b_1 = (torch.softmax(log_likelihood_G, 0) * b_G).sum().reshape(1)
    shape = float(shape_of(b_1))
    return (count * shape + _PRIOR_WEIGHT * _PRIOR_SHAPE) / (count + _PRIOR_WEIGHT)
