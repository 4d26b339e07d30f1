"""Importance weights: from log ratios, truncated (TIS) or zeroed outside a band (IcePop).

verl 0.9.1, verl/trainer/ppo/rollout_corr_helper.py: compute_rollout_correction_weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAFETY_BOUND = 20.0
"""verl clamps log ratios to ±20 before exp: weights lie between 2.06e-9 and 4.85e8."""


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Log ratio within ±20, verl's SAFETY_BOUND."""
    return log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)


def truncate(weights: Tensor, upper: float) -> Tensor:
    """Truncated importance sampling: min(w, upper) (Ionides 2008; Yao et al. 2025, TIS)."""
    return weights.clamp(max=upper)


def icepop(weights: Tensor, lower: float, upper: float) -> Tensor:
    """Weights outside [lower, upper] become 0, the others stay (IcePop, Ling team 2025)."""
    return torch.where((weights >= lower) & (weights <= upper), weights, 0.0)


def apply_threshold(weights: Tensor, lower: float | None, upper: float) -> Tensor:
    """Applied weights: truncated for one bound, IcePop for two."""
    return truncate(weights, upper) if lower is None else icepop(weights, lower, upper)


def effective_sample_size(log_sum: float, log_sum_of_squares: float, count: int) -> float:
    """(Σw)² / (n Σw²), a share of n: 1 for equal weights, 1/n when one weight dominates (Kong 1992).

    From logs of the sums, so that no weight can overflow.
    """
    return math.exp(2 * log_sum - log_sum_of_squares) / count if count else math.nan
